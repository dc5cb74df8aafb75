"""What a set of generations says about a drafter: acceptance, and what was saved and wasted.

A round's acceptance length is its accepted drafts plus the target's own token: 1 to S. Two means are in use and differ: over requests
of each request's mean (the DFlash paper's), and over all rounds of all requests (pooled). Both are given.

Rounds are counted as verification found them, never cut with the text (``decoder.py`` says why); rounds that the end of the target's positions
forced to draft less than the block are left out of acceptance, and so are requests that drafted nothing: answers of one token have no round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_core.decoding.decoder import Generation


@dataclass(frozen=True)
class Acceptance:
    """Acceptance over a set of requests, all decoded with the same block size S.

    rounds:           rounds counted
    mean_of_requests: mean over requests of each request's mean acceptance length, 1..S
    pooled:           mean acceptance length over all rounds, 1..S
    per_position:     share of rounds in which slot k = 1..S-1 was accepted, which takes all slots before it too; sums to pooled - 1
    histogram:        rounds by their accepted drafts, 0..S-1
    drafted:          tokens drafted, of which ``accepted`` were kept and the rest wasted
    """

    rounds: int
    mean_of_requests: float
    pooled: float
    per_position: tuple[float, ...]
    histogram: tuple[int, ...]
    drafted: int
    accepted: int


def acceptance_length(generation: Generation, block_size: int) -> float | None:
    """Mean acceptance length of one request; None if it has no full round."""
    rounds = full_rounds(generation, block_size)
    return 1.0 + sum(rounds) / len(rounds) if rounds else None


def full_rounds(generation: Generation, block_size: int) -> list[int]:
    """Accepted drafts of every round in which the whole block was drafted."""
    return [kept for kept, count in zip(generation.accepted, generation.drafted, strict=True) if count == block_size - 1]


def measure_acceptance(generations: Sequence[Generation], block_size: int) -> Acceptance:
    """Acceptance of ``generations``. Without a single round every mean is 1.0: nothing was gained."""
    rounds = [kept for generation in generations for kept in full_rounds(generation, block_size)]
    means = [mean for generation in generations if (mean := acceptance_length(generation, block_size)) is not None]
    histogram = tuple(rounds.count(kept) for kept in range(block_size))
    reached = [sum(histogram[slot:]) for slot in range(1, block_size)]
    return Acceptance(
        rounds=len(rounds),
        mean_of_requests=sum(means) / len(means) if means else 1.0,
        pooled=1.0 + sum(rounds) / len(rounds) if rounds else 1.0,
        per_position=tuple(count / max(len(rounds), 1) for count in reached),
        histogram=histogram,
        drafted=len(rounds) * (block_size - 1),
        accepted=sum(rounds),
    )
