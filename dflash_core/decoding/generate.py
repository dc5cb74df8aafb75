"""Decoders of a target with or without a drafter, and the answer to one prompt.

room = Room(rows=8, longest_prompt=512, max_new_tokens=256, block_size=16)
verifier = open_verifier(target, room)
with_drafter, alone = (open_decoder(target, model, verifier, room, stop_ids=target.info.eos_token_ids) for model in (drafter, None))
generations = with_drafter.generate(prompts)     # up to 8 at a time, of any lengths; call it as often as you like
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_core.decoding.decoder import Decoder, Generation
from dflash_core.decoding.drafting import BlockDrafter
from dflash_core.decoding.sampling import GREEDY, Sampling
from dflash_core.decoding.verifying import GrowingTarget, Verifier
from dflash_core.errors import InputError, Problem, TargetError

if TYPE_CHECKING:
    from dflash_core.drafter import DFlashConfig, DFlashDrafter
    from dflash_core.target import TargetInfo, TargetModel


@dataclass(frozen=True)
class Room:
    """What decoding must have room for: up to ``rows`` requests at once, of prompts, answers and blocks (in tokens) of these sizes at most."""

    rows: int
    longest_prompt: int
    max_new_tokens: int
    block_size: int

    def capacity(self, info: TargetInfo) -> int:
        """Positions of a row."""
        return min(self.longest_prompt + self.max_new_tokens, info.max_position_embeddings) + self.block_size

    def cache_bytes(self, info: TargetInfo, drafter: DFlashConfig, element: int, *, drafters: int = 1) -> int:
        """Keys and values of the target, and of so many drafters, with ``element`` bytes a number."""
        from dflash_core.drafter import DrafterCache
        from dflash_core.target import static_cache_bytes

        size = self.rows, self.capacity(info), element
        return static_cache_bytes(info, *size) + drafters * DrafterCache.bytes_needed(drafter, *size)


def open_verifier(target: TargetModel, room: Room, *, graphs: bool = True) -> Verifier:
    """The target's side, which any number of decoders may take turns with.

    Args:
        graphs: on CUDA, capture the stages of a round as graphs.

    Raises:
        TargetError: the target has no cache that can be shortened, as the state of recurrent layers cannot.
    """
    from dflash_core.target import StaticTarget

    try:
        return StaticTarget(target, room.rows, room.capacity(target.info), graphs=graphs)
    except TargetError:
        if room.rows > 1 or target.device.type != "cpu":
            raise
        return GrowingTarget(target)


def open_decoder(
    target: TargetModel, drafter: DFlashDrafter | None, verifier: Verifier, room: Room, *, stop_ids: Collection[int], sampling: Sampling = GREEDY
) -> Decoder:
    """A decoder for batches of requests.

    Args:
        drafter: with None nothing is drafted: the target alone, one token a pass.
        room: its block size is 2 up to the size the drafter was trained with; of no meaning without a drafter.
        stop_ids: tokens that end an answer; normally ``target.info.eos_token_ids``.
        sampling: greedy, or how tokens are drawn.

    Raises:
        InputError: a block size beyond the trained one.
    """
    capacity, block_size, proposer = room.capacity(target.info), 1, None
    if drafter is not None:
        block_size, trained = room.block_size, drafter.config.block_size
        if not 2 <= block_size <= trained:
            problem = Problem("block_size", block_size, f"must be from 2 to the trained block size {trained}", "Decode with a smaller block")
            raise InputError("speculative_generate", [problem])
        proposer = BlockDrafter(drafter, target.vocabulary, rows=room.rows, capacity=capacity, block_size=block_size)
    return Decoder(
        target.info, verifier, proposer,
        rows=room.rows, capacity=capacity, max_new_tokens=room.max_new_tokens, block_size=block_size, stop_ids=stop_ids, sampling=sampling,
    )  # fmt: skip


def speculative_generate(
    target: TargetModel, drafter: DFlashDrafter, prompt_ids: Sequence[int], *, max_new_tokens: int, block_size: int, stop_ids: Collection[int],
    sampling: Sampling = GREEDY, seed: int = 0,
) -> Generation:  # fmt: skip
    """Continue one prompt with blocks of ``block_size`` tokens, of which ``block_size`` - 1 are drafted. For many prompts see ``open_decoder``.

    Greedy output is that of the target, token for token in float32; sampled output has the target's distribution exactly.

    Args:
        block_size: 2 up to the size the drafter was trained with.
        seed: makes every draw of ``sampling``.

    Raises:
        InputError: an empty or too long prompt, a block size beyond the trained one.
    """
    return _one(target, drafter, prompt_ids, max_new_tokens, block_size, stop_ids, sampling, seed)


def autoregressive_generate(
    target: TargetModel, prompt_ids: Sequence[int], *, max_new_tokens: int, stop_ids: Collection[int], sampling: Sampling = GREEDY, seed: int = 0
) -> Generation:
    """Continue one prompt one token a pass: ``speculative_generate`` with nothing drafted. Same arguments, same errors."""
    return _one(target, None, prompt_ids, max_new_tokens, 1, stop_ids, sampling, seed)


def _one(
    target: TargetModel, drafter: DFlashDrafter | None, prompt_ids: Sequence[int], max_new_tokens: int, block_size: int, stop_ids: Collection[int],
    sampling: Sampling, seed: int,
) -> Generation:  # fmt: skip
    room = Room(1, len(prompt_ids), max_new_tokens, block_size)
    # For one answer neither graphs nor a static cache with packed weights would pay.
    verifier = GrowingTarget(target) if target.device.type == "cpu" else open_verifier(target, room, graphs=False)
    return open_decoder(target, drafter, verifier, room, stop_ids=stop_ids, sampling=sampling).generate([prompt_ids], [seed])[0]
