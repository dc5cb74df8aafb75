"""Decoders of a target with or without a drafter, and the answer to one prompt.

    decoder = open_decoder(target, drafter, rows=8, longest_prompt=512, max_new_tokens=256, block_size=16, stop_ids=target.info.eos_token_ids)
    generations = decoder.generate(prompts)     # up to 8 at a time, of any lengths; call it as often as you like
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from dflash_core.decoding.decoder import Decoder, Generation
from dflash_core.decoding.drafting import BlockDrafter
from dflash_core.decoding.sampling import GREEDY, Sampling
from dflash_core.decoding.verifying import GrowingTarget, Verifier
from dflash_core.errors import InputError, Problem
from dflash_core.target import StaticTarget

if TYPE_CHECKING:
    from dflash_core.drafter import DFlashDrafter
    from dflash_core.target import TargetModel


def open_decoder(
    target: TargetModel, drafter: DFlashDrafter | None, *, rows: int, longest_prompt: int, max_new_tokens: int, block_size: int,
    stop_ids: Collection[int], sampling: Sampling = GREEDY, graphs: bool = True,
) -> Decoder:  # fmt: skip
    """A decoder for batches of up to ``rows`` requests.

    Args:
        drafter: with None nothing is drafted: the target alone, one token a pass.
        longest_prompt: tokens of the longest prompt there will be.
        block_size: 2 up to the size the drafter was trained with; of no meaning without a drafter.
        stop_ids: tokens that end an answer; normally ``target.info.eos_token_ids``.
        sampling: greedy, or how tokens are drawn.
        graphs: on CUDA, capture the stages of a round as graphs.

    Raises:
        InputError: a block size beyond the trained one.
        TargetError: the target cannot be decoded with a cache that can be shortened, as the state of recurrent layers cannot.
    """
    block_size = 1 if drafter is None else block_size
    capacity = min(longest_prompt + max_new_tokens, target.info.max_position_embeddings) + block_size
    proposer = None
    if drafter is not None:
        trained = drafter.config.block_size
        if not 2 <= block_size <= trained:
            problem = Problem("block_size", block_size, f"must be from 2 to the trained block size {trained}", "Decode with a smaller block")
            raise InputError("speculative_generate", [problem])
        proposer = BlockDrafter(drafter, target.vocabulary, rows=rows, capacity=capacity, block_size=block_size)
    growing = rows == 1 and target.device.type == "cpu"
    verifier: Verifier = GrowingTarget(target) if growing else StaticTarget(target, rows, capacity, graphs=graphs)
    return Decoder(
        target.info, verifier, proposer, target.device,
        rows=rows, capacity=capacity, max_new_tokens=max_new_tokens, block_size=block_size, stop_ids=stop_ids, sampling=sampling,
    )  # fmt: skip


def speculative_generate(
    target: TargetModel, drafter: DFlashDrafter, prompt_ids: Sequence[int], *, max_new_tokens: int, block_size: int, stop_ids: Collection[int],
    sampling: Sampling = GREEDY, seed: int = 0,
) -> Generation:  # fmt: skip
    """Continue one prompt with blocks of ``block_size`` tokens, of which ``block_size`` - 1 are drafted.

    Greedy output is that of the target, token for token in float32; sampled output has the target's distribution exactly. ``seed`` makes all its
    draws. Arguments and errors are otherwise those of ``open_decoder``, which is the better choice for more than one prompt.

    Raises:
        InputError: an empty or too long prompt, a block size beyond the trained one.
    """
    decoder = open_decoder(
        target, drafter, rows=1, longest_prompt=len(prompt_ids), max_new_tokens=max_new_tokens, block_size=block_size, stop_ids=stop_ids,
        sampling=sampling, graphs=False,
    )  # fmt: skip
    return decoder.generate([prompt_ids], [seed])[0]


def autoregressive_generate(
    target: TargetModel, prompt_ids: Sequence[int], *, max_new_tokens: int, stop_ids: Collection[int], sampling: Sampling = GREEDY, seed: int = 0
) -> Generation:
    """Continue one prompt one token a pass: ``speculative_generate`` with nothing drafted."""
    decoder = open_decoder(
        target, None, rows=1, longest_prompt=len(prompt_ids), max_new_tokens=max_new_tokens, block_size=1, stop_ids=stop_ids, sampling=sampling,
        graphs=False,
    )  # fmt: skip
    return decoder.generate([prompt_ids], [seed])[0]
