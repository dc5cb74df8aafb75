"""Slot weights against their formulas, and the denominators that go with them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.config import ObjectiveConfig
from dflash_core.drafter import IGNORE
from dflash_core.objective import decay_weights, default_gamma, dpace_weights, slot_weights
from dflash_core.objective.reference import reference_dpace_weights


def block_labels(runs: list[int], block_size: int) -> torch.Tensor:
    """[1, N, S] labels in which block n has labels in slots 1..runs[n]."""
    slots = torch.arange(block_size)
    return torch.stack([torch.where((slots >= 1) & (slots <= run), 5, IGNORE) for run in runs])[None]


def test_decay_weights_follow_the_formula_and_leave_out_the_anchor():
    weights = decay_weights(16, 7.0)
    assert weights[0] == 0.0
    assert weights.tolist()[1:] == pytest.approx([math.exp(-(k - 1) / 7.0) for k in range(1, 16)])


@pytest.mark.parametrize(("block_size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0), (9, 4.0)])
def test_default_gamma_is_the_papers(block_size, gamma):
    assert default_gamma(block_size) == gamma


@settings(max_examples=50, deadline=None)
@given(
    probabilities=st.lists(st.floats(0.0, 1.0), min_size=2, max_size=9),
    run=st.integers(0, 9),
    alpha=st.sampled_from([0.0, 0.5, 0.9]),
)
def test_dpace_weights_follow_the_formula(probabilities, run, alpha):
    labels = block_labels([run], len(probabilities))
    probability = torch.tensor(probabilities)
    weights = dpace_weights(probability[None, None], labels, alpha)
    torch.testing.assert_close(weights[0, 0], reference_dpace_weights(probability, labels[0, 0], alpha), rtol=1e-5, atol=1e-6)


def test_dpace_weights_carry_no_gradient():
    probability = torch.rand(1, 1, 4, requires_grad=True)
    assert not dpace_weights(probability, block_labels([3], 4)).requires_grad


def test_dpace_of_a_certain_drafter_counts_the_slots_that_follow():
    assert dpace_weights(torch.ones(1, 1, 5), block_labels([4], 5)).tolist() == [[[0.0, 4.0, 3.0, 2.0, 1.0]]]


def test_denominator_is_the_sum_of_weights_of_labelled_slots():
    labels = block_labels([3, 1, 0], 4)
    for weighting, expected in (("decay", 2 * 1.0 + math.exp(-1 / 2.0) + math.exp(-2 / 2.0)), ("uniform", 4.0)):
        weights, denominator = slot_weights(ObjectiveConfig(weighting=weighting, gamma=2.0), labels)
        assert weights.shape == labels.shape
        assert weights[labels < 0].eq(0).all()
        assert float(denominator) == pytest.approx(expected)
        assert float(weights.sum()) == pytest.approx(expected)


def test_dpace_is_divided_by_the_number_of_labelled_slots_not_by_its_own_sum():
    labels = block_labels([3, 2], 4)
    weights, denominator = slot_weights(ObjectiveConfig(weighting="dpace"), labels, torch.full(labels.shape, 0.25))
    assert float(denominator) == 5.0
    assert float(weights.sum()) != pytest.approx(5.0)


def test_dpace_without_probabilities_is_refused():
    with pytest.raises(ValueError, match="probability"):
        slot_weights(ObjectiveConfig(weighting="dpace"), block_labels([3], 4))


def test_gamma_defaults_to_the_block_size():
    labels = block_labels([15], 16)
    weights, _ = slot_weights(ObjectiveConfig(), labels)
    assert torch.equal(weights[0, 0], decay_weights(16, 7.0))
