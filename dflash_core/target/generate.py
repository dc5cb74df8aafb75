"""Generation with the target: greedy or sampled, in rows that are refilled as their answers end, so that the batch stays full.

A prompt's randomness is its own: every prompt has a seed, its numbers are drawn before its first token, and one number picks one token by the inverse
of the cumulative distribution. So neither the order nor the company of a prompt changes its draws.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dflash_core.config import GenerationConfig
from dflash_core.data.types import Response
from dflash_core.errors import TargetError
from dflash_core.target.batch import Batch, OnItsWay

if TYPE_CHECKING:
    from dflash_core.target.model import TargetModel

_STEPS = 4  # steps between two looks at what has ended: the GPU has them before it while the host works
_Ended = tuple[list[int], OnItsWay]  # prompts, and their answers


def generate(
    target: TargetModel, prompts: Sequence[Sequence[int]], settings: GenerationConfig, seeds: Sequence[int], stop_ids: frozenset[int]
) -> Iterator[tuple[int, Response]]:
    """Answers as they end, each with the index of its prompt.

    Raises:
        TargetError: a prompt without tokens, or a target that cannot be decoded with a static cache.
    """
    empty = [index for index, prompt in enumerate(prompts) if not prompt]
    if empty:
        raise TargetError(f"prompt {empty[0]} of {len(prompts)} has no tokens. Leave it out, or render it with a chat template.")
    if not prompts:
        return
    on_gpu = target.device.type == "cuda"
    # On a GPU the shapes are always the same, and so is an answer, whoever is computed beside it. On a CPU every row costs time.
    rows = settings.batch_size if on_gpu else min(settings.batch_size, len(prompts))
    batch = Batch(target, rows, max(map(len, prompts)), settings, stop_ids)
    waiting = deque(sorted(range(len(prompts)), key=lambda index: len(prompts[index])))  # like lengths are admitted together
    owners: list[int | None] = [None] * rows  # the prompt of each row
    ended: _Ended | None = None
    while True:
        free = [row for row, owner in enumerate(owners) if owner is None]
        while waiting and len(free) >= min(batch.least_admitted, len(waiting)):
            taken = [waiting.popleft() for _ in range(min(batch.most_admitted, len(free), len(waiting)))]
            places, free = free[: len(taken)], free[len(taken) :]
            batch.admit([prompts[index] for index in taken], [seeds[index] for index in taken], places)
            for row, index in zip(places, taken, strict=True):
                owners[row] = index
        alive = len(owners) - len(free)
        if not on_gpu and not waiting and 0 < 2 * alive <= len(owners):  # each time at most half, so that copies of the cache stay few
            kept = [row for row, owner in enumerate(owners) if owner is not None]
            batch.keep(kept)
            owners = [owners[row] for row in kept]
        look = batch.look() if on_gpu else None  # what it shows arrives while the steps run
        for _ in range(_STEPS if on_gpu else 1) if alive else ():
            batch.step()
        if ended is not None:
            yield from _responses(*ended, stop_ids)
        if not alive:
            return
        ended = _over(batch, owners, look or batch.look())


def _over(batch: Batch, owners: list[int | None], look: OnItsWay) -> _Ended | None:
    """What has ended by the time of ``look``; its rows are free from now on."""
    (alive,) = look.get()
    over = [(row, owner) for row, (owner, on) in enumerate(zip(owners, alive.tolist(), strict=True)) if owner is not None and not on]
    for row, _ in over:
        owners[row] = None
    return ([owner for _, owner in over], batch.answers([row for row, _ in over])) if over else None


def _responses(indices: list[int], answers: OnItsWay, stop_ids: frozenset[int]) -> Iterator[tuple[int, Response]]:
    tokens, counts = answers.get()
    for index, row, count in zip(indices, tokens.tolist(), counts.tolist(), strict=True):
        answer = tuple(row[:count])
        yield index, Response(answer, "stop" if answer[-1] in stop_ids else "length")
