"""Acceptance statistics: both means, positions, histogram, and the rule on rounds at the end."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_core.decoding import Generation, acceptance_length, measure_acceptance


def generation(accepted: list[int], drafted: list[int] | None = None, block: int = 4) -> Generation:
    counts = drafted or [block - 1] * len(accepted)
    return Generation(
        tokens=(0,) * (1 + len(accepted) + sum(accepted)), finish_reason="length", accepted=tuple(accepted), drafted=tuple(counts),
        target_passes=1 + len(accepted), draft_passes=len(accepted), seconds=1.0, prefill_seconds=0.1, draft_seconds=0.2, verify_seconds=0.5,
    )  # fmt: skip


def test_the_two_means_weigh_requests_and_rounds() -> None:
    measured = measure_acceptance([generation([3]), generation([0, 0, 0])], 4)
    assert measured.mean_of_requests == pytest.approx((4 + 1) / 2)
    assert measured.pooled == pytest.approx(1 + 3 / 4)


def test_positions_histogram_and_waste() -> None:
    measured = measure_acceptance([generation([0, 1, 3]), generation([1])], 4)
    assert measured.histogram == (1, 2, 0, 1)
    assert measured.per_position == (3 / 4, 1 / 4, 1 / 4)
    assert (measured.drafted, measured.accepted, measured.rounds) == (12, 5, 4)


def test_rounds_that_could_not_draft_a_whole_block_are_left_out() -> None:
    assert acceptance_length(generation([3, 1], [3, 1]), 4) == 4.0
    assert measure_acceptance([generation([3, 1], [3, 1])], 4).pooled == 4.0


def test_an_answer_without_a_round_has_no_acceptance_length_and_counts_in_no_mean() -> None:
    assert acceptance_length(generation([]), 4) is None
    assert measure_acceptance([generation([]), generation([1])], 4).mean_of_requests == 2.0
    assert measure_acceptance([generation([])], 4).pooled == 1.0


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=8), min_size=1, max_size=6))
def test_per_position_shares_fall_and_sum_to_the_pooled_gain(requests: list[list[int]]) -> None:
    measured = measure_acceptance([generation(accepted, block=6) for accepted in requests], 6)
    shares = measured.per_position
    assert all(a >= b for a, b in itertools.pairwise(shares))
    assert sum(shares) == pytest.approx(measured.pooled - 1)
    assert sum(measured.histogram) == measured.rounds
    assert sum(kept * count for kept, count in enumerate(measured.histogram)) == measured.accepted
