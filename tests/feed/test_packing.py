from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_core.errors import DataError
from dflash_core.feed import pack_rows

T = 3072


def mix(median: float = 700, sigma: float = 0.8, count: int = 5000, row_length: int = T) -> np.ndarray:
    """Lengths as of a chat mix: log-normal, cut off at the row length."""
    draws = np.random.default_rng(0).normal(np.log(median), sigma, count)
    return np.clip(np.exp(draws), 16, row_length).astype(np.int64)


def waste(lengths: np.ndarray, row_length: int) -> float:
    return 1 - lengths.sum() / (len(pack_rows(lengths, row_length, seed=0, epoch=0)) * row_length)


@given(lengths=st.lists(st.integers(1, 64), max_size=200), row_length=st.integers(64, 200), seed=st.integers(0, 2**40), epoch=st.integers(0, 9))
def test_every_sample_is_in_one_row_once_and_no_row_overflows(lengths: list[int], row_length: int, seed: int, epoch: int) -> None:
    rows = pack_rows(lengths, row_length, seed=seed, epoch=epoch)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(row for row in rows)
    assert all(sum(lengths[i] for i in row) <= row_length for row in rows)


@given(lengths=st.lists(st.integers(1, 64), min_size=1, max_size=200), seed=st.integers(0, 99))
def test_the_number_of_rows_depends_on_the_lengths_alone(lengths: list[int], seed: int) -> None:
    counts = {len(pack_rows(lengths, 64, seed=seed, epoch=epoch)) for epoch in range(3)} | {len(pack_rows(lengths[::-1], 64, seed=0, epoch=0))}
    assert len(counts) == 1


@given(lengths=st.lists(st.integers(1, 64), min_size=1, max_size=200))
def test_no_two_rows_would_fit_into_one(lengths: list[int]) -> None:
    fills = sorted(sum(lengths[i] for i in row) for row in pack_rows(lengths, 64, seed=0, epoch=0))
    assert len(fills) < 2 or fills[0] + fills[1] > 64


@pytest.mark.parametrize(
    ("median", "sigma", "count", "row_length"),
    [(700, 0.8, 5000, 3072), (700, 0.8, 5000, 2048), (1500, 0.7, 5000, 3072), (400, 1.0, 20000, 3072), (180, 0.4, 700, 512)],
)
def test_at_most_two_percent_of_a_chat_mix_is_padding(median: float, sigma: float, count: int, row_length: int) -> None:
    assert waste(mix(median, sigma, count, row_length), row_length) <= 0.02


@pytest.mark.parametrize("row_length", [552, 736, 920, 1280, 2048])
def test_samples_of_nearly_one_length_are_packed_where_best_fit_alone_leaves_five_percent(row_length: int) -> None:
    lengths = np.random.default_rng(0).normal(182, 14, 400).round().clip(110, 250).astype(np.int64)
    assert waste(lengths, row_length) <= 0.02


def test_the_same_seed_and_epoch_give_the_same_rows_and_others_do_not() -> None:
    lengths = mix(count=500)
    first = pack_rows(lengths, T, seed=1, epoch=0)
    assert pack_rows(lengths, T, seed=1, epoch=0) == first
    for other in (pack_rows(lengths, T, seed=1, epoch=1), pack_rows(lengths, T, seed=2, epoch=0)):
        assert other != first
        assert sorted(other) != sorted(first), "the rows themselves are mixed afresh, not only their order"


def test_long_and_short_samples_are_spread_over_the_epoch() -> None:
    lengths = mix(count=5000)
    rows = pack_rows(lengths, T, seed=0, epoch=0)
    sizes = np.array([len(row) for row in rows])
    quarters = [quarter.mean() for quarter in np.array_split(sizes, 4)]
    assert max(quarters) < 1.3 * min(quarters)


@pytest.mark.parametrize("length", [0, -1, 65])
def test_a_sample_that_cannot_fit_is_named_with_its_length(length: int) -> None:
    with pytest.raises(DataError, match=rf"sample 2 = {length}: .*from 1 to the row length 64.*training\.row_length"):
        pack_rows([5, 64, length, 7], 64, seed=0, epoch=0)
