"""Intervals: as scipy's, over conversations rather than their turns, within their sets, and the same every time."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from dflash_core.evaluation.intervals import Floats, bootstrap, ratio

GENERATOR = np.random.default_rng(7)
ROUNDS = GENERATOR.integers(3, 30, 60).astype(float)
LENGTHS = ROUNDS * (1.0 + GENERATOR.gamma(2.0, 0.8, 60))
PLACES = [("set", f"c{index}") for index in range(60)]


def pooled(sums: Floats) -> Floats:
    return ratio(sums[..., 0], sums[..., 1])


def test_the_interval_of_a_ratio_is_the_one_that_scipy_finds() -> None:
    ours = bootstrap(np.stack([LENGTHS, ROUNDS], axis=1), PLACES, pooled)
    theirs = stats.bootstrap(
        (LENGTHS, ROUNDS), lambda a, b, axis: a.sum(axis) / b.sum(axis), paired=True, n_resamples=9999, method="BCa", rng=1
    ).confidence_interval
    width = theirs.high - theirs.low
    assert ours is not None
    assert ours.low == pytest.approx(theirs.low, abs=0.06 * width)
    assert ours.high == pytest.approx(theirs.high, abs=0.06 * width)
    assert ours == bootstrap(np.stack([LENGTHS, ROUNDS], axis=1), PLACES, pooled)


def test_it_holds_the_truth_about_as_often_as_it_says() -> None:
    held, generator = 0, np.random.default_rng(1)
    for _ in range(200):
        values = generator.gamma(2.0, 1.0, 40)
        found = bootstrap(np.stack([values, np.ones(40)], axis=1), PLACES[:40], pooled)
        assert found is not None
        held += found.low <= 2.0 <= found.high
    assert 0.90 <= held / 200 <= 0.99


def test_turns_of_a_conversation_do_not_count_as_so_many_witnesses() -> None:
    columns = np.stack([LENGTHS / ROUNDS, np.ones(60)], axis=1)
    alone = bootstrap(columns, PLACES, pooled)
    twice = bootstrap(np.repeat(columns, 2, axis=0), [place for place in PLACES for _ in range(2)], pooled)
    believed = bootstrap(np.repeat(columns, 2, axis=0), [(name, f"{c}{n}") for name, c in PLACES for n in range(2)], pooled)
    assert alone is not None
    assert twice is not None
    assert believed is not None
    assert twice.high - twice.low == pytest.approx(alone.high - alone.low, rel=1e-9)
    assert believed.high - believed.low < 0.8 * (alone.high - alone.low)


def test_a_difference_between_sets_is_no_doubt_about_their_mean() -> None:
    values = np.array([1.0] * 20 + [5.0] * 20) + np.random.default_rng(1).normal(0, 0.01, 40)
    columns = np.stack([values, np.ones(40)], axis=1)
    found = bootstrap(columns, [("easy" if index < 20 else "hard", str(index)) for index in range(40)], pooled)
    assert found is not None
    assert found.high - found.low < 0.02


def test_constants_have_an_interval_of_no_width_and_one_conversation_has_none() -> None:
    found = bootstrap([[2.0, 1.0]] * 5, PLACES[:5], pooled)
    assert found is not None
    assert (found.low, found.high) == (2.0, 2.0)
    assert bootstrap([[2.0, 1.0]] * 2, [("set", "c")] * 2, pooled) is None
    nothing = bootstrap([[0.0, 0.0]] * 3, PLACES[:3], pooled)
    assert nothing is not None
    assert nothing.high == 1.0, "no round gains nothing"
