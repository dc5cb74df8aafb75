"""The chunked cross-entropy against its plain twin: values, gradients and the corners."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash_core.drafter import IGNORE
from dflash_core.objective import SlotLosses, linear_cross_entropy
from dflash_core.objective.reference import reference_linear_cross_entropy


def problem(
    slots: int, hidden: int, vocabulary: int, seed: int = 0, unlabelled: float = 0.3, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    hidden_MH = torch.randn(slots, hidden, generator=generator).to(dtype).requires_grad_()
    weight_VH = torch.randn(vocabulary, hidden, generator=generator).to(dtype)
    labels_M = torch.randint(0, vocabulary, (slots,), generator=generator)
    labels_M[torch.rand(slots, generator=generator) < unlabelled] = IGNORE
    weights_M = torch.rand(slots, generator=generator)
    return hidden_MH, weight_VH, labels_M, weights_M


def losses_and_gradient(losses: SlotLosses, hidden_MH: Tensor, weights_M: Tensor) -> tuple[SlotLosses, Tensor]:
    (gradient_MH,) = torch.autograd.grad((losses.nll * weights_M).sum(), hidden_MH)
    return losses, gradient_MH


def assert_same(actual: tuple[SlotLosses, Tensor], expected: tuple[SlotLosses, Tensor], tolerance: float = 1e-5) -> None:
    (losses, gradient), (twin, twin_gradient) = actual, expected
    torch.testing.assert_close(losses.nll, twin.nll, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(losses.probability, twin.probability, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradient.float(), twin_gradient.float(), rtol=tolerance, atol=tolerance)
    assert torch.equal(losses.hit, twin.hit)


@settings(max_examples=40, deadline=None)
@given(
    slots=st.integers(1, 33),
    hidden=st.integers(1, 9),
    vocabulary=st.integers(1, 40),
    chunk=st.integers(1, 40),
    softcap=st.sampled_from([None, 0.7, 30.0]),
    unlabelled=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    bounded=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_values_and_gradients_equal_the_plain_twin(slots, hidden, vocabulary, chunk, softcap, unlabelled, bounded, seed):
    hidden_MH, weight_VH, labels_M, weights_M = problem(slots, hidden, vocabulary, seed, unlabelled)
    bound = max(1, int((labels_M >= 0).sum())) + seed % 3 if bounded else None
    actual = linear_cross_entropy(hidden_MH, weight_VH, labels_M, chunk_slots=chunk, softcap=softcap, max_labelled=bound)
    expected = reference_linear_cross_entropy(hidden_MH, weight_VH, labels_M, softcap=softcap)
    assert_same(losses_and_gradient(actual, hidden_MH, weights_M), losses_and_gradient(expected, hidden_MH, weights_M))


@pytest.mark.parametrize("chunk", [1, 7, 8, 9, 64])
def test_chunk_boundaries_change_nothing(chunk):
    hidden_MH, weight_VH, labels_M, weights_M = problem(16, 8, 31, unlabelled=0.0)
    actual = losses_and_gradient(linear_cross_entropy(hidden_MH, weight_VH, labels_M, chunk_slots=chunk), hidden_MH, weights_M)
    expected = losses_and_gradient(linear_cross_entropy(hidden_MH, weight_VH, labels_M, chunk_slots=16), hidden_MH, weights_M)
    assert_same(actual, expected, 1e-6)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradient_passes_gradcheck_in_float64(softcap):
    hidden_MH, weight_VH, labels_M, _ = problem(7, 5, 11, dtype=torch.float64)

    def nll(hidden: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight_VH, labels_M, chunk_slots=3, softcap=softcap).nll

    assert torch.autograd.gradcheck(nll, (hidden_MH,))


@pytest.mark.parametrize("labelled", [0, 1])
def test_no_or_one_labelled_slot_gives_zero_loss_and_gradient_elsewhere(labelled):
    hidden_MH, weight_VH, labels_M, _ = problem(5, 4, 6, unlabelled=1.0)
    labels_M[:labelled] = 3
    losses = linear_cross_entropy(hidden_MH, weight_VH, labels_M, chunk_slots=2)
    losses.nll.sum().backward()
    assert not losses.nll[labelled:].any()
    assert not losses.probability[labelled:].any()
    assert not losses.hit[labelled:].any()
    assert not hidden_MH.grad[labelled:].any()
    assert bool(hidden_MH.grad[:labelled].any()) == bool(labelled)


def test_hidden_states_of_unlabelled_slots_are_never_read():
    hidden_MH, weight_VH, labels_M, weights_M = problem(24, 8, 31)
    poisoned_MH = torch.where((labels_M < 0)[:, None], torch.nan, hidden_MH.detach()).requires_grad_()
    bound = int((labels_M >= 0).sum())
    for max_labelled in (None, bound, bound + 2):
        actual = linear_cross_entropy(poisoned_MH, weight_VH, labels_M, chunk_slots=5, max_labelled=max_labelled)
        expected = linear_cross_entropy(hidden_MH, weight_VH, labels_M, chunk_slots=5)
        assert_same(losses_and_gradient(actual, poisoned_MH, weights_M), losses_and_gradient(expected, hidden_MH, weights_M), 1e-6)


def test_labelled_slots_beyond_the_bound_are_nan_instead_of_silently_lost():
    hidden_MH, weight_VH, labels_M, _ = problem(10, 4, 6, unlabelled=0.0)
    nll_M = linear_cross_entropy(hidden_MH, weight_VH, labels_M, chunk_slots=4, max_labelled=8).nll
    assert nll_M[:8].isfinite().all()
    assert nll_M[8:].isnan().all()


def test_bfloat16_arguments_are_accumulated_in_float32():
    hidden_MH, weight_VH, labels_M, weights_M = problem(40, 256, 500, dtype=torch.bfloat16)
    twin_MH = hidden_MH.detach().double().requires_grad_()
    losses, gradient = losses_and_gradient(linear_cross_entropy(hidden_MH, weight_VH, labels_M, chunk_slots=16), hidden_MH, weights_M)
    twin, twin_gradient = losses_and_gradient(reference_linear_cross_entropy(twin_MH, weight_VH.double(), labels_M), twin_MH, weights_M)
    assert losses.nll.dtype == losses.probability.dtype == torch.float32
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(losses.nll.double(), twin.nll, rtol=1e-5, atol=1e-5)  # bfloat16 accumulation is off by more than 1e-2
    assert (gradient.double() - twin_gradient).norm() < 4e-3 * twin_gradient.norm()  # one rounding to bfloat16


def test_autocast_does_not_lower_the_precision():
    hidden_MH, weight_VH, labels_M, weights_M = problem(16, 64, 50)
    expected = losses_and_gradient(linear_cross_entropy(hidden_MH, weight_VH, labels_M, chunk_slots=16), hidden_MH, weights_M)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = linear_cross_entropy(hidden_MH, weight_VH, labels_M, chunk_slots=16)
    assert_same(losses_and_gradient(losses, hidden_MH, weights_M), expected, 0.0)


def test_large_logits_do_not_overflow():
    hidden_MH, weight_VH, labels_M, weights_M = problem(8, 4, 12)
    hidden_MH = (hidden_MH.detach() * 1e4).requires_grad_()
    actual = losses_and_gradient(linear_cross_entropy(hidden_MH, weight_VH, labels_M, chunk_slots=3), hidden_MH, weights_M)
    assert_same(actual, losses_and_gradient(reference_linear_cross_entropy(hidden_MH, weight_VH, labels_M), hidden_MH, weights_M))


def test_without_gradient_the_values_are_the_same():
    hidden_MH, weight_VH, labels_M, _ = problem(20, 8, 31)
    expected = linear_cross_entropy(hidden_MH, weight_VH, labels_M, chunk_slots=6, softcap=5.0)
    with torch.no_grad():
        actual = linear_cross_entropy(hidden_MH, weight_VH, labels_M, chunk_slots=6, softcap=5.0)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert not actual.nll.requires_grad
    assert not expected.probability.requires_grad


def test_the_frozen_head_gets_no_gradient():
    hidden_MH, weight_VH, labels_M, _ = problem(6, 4, 9)
    weight_VH.requires_grad_()
    linear_cross_entropy(hidden_MH, weight_VH, labels_M, chunk_slots=6).nll.sum().backward()
    assert weight_VH.grad is None


@pytest.mark.parametrize(
    "wrong", [{"labels_M": torch.zeros(5, dtype=torch.int64)}, {"head": torch.zeros(9, 3)}, {"chunk_slots": 0}, {"max_labelled": 0}]
)
def test_arguments_that_do_not_fit_are_refused_with_what_was_found(wrong):
    arguments = {
        "hidden_MH": torch.zeros(6, 4),
        "head": torch.zeros(9, 4),
        "labels_M": torch.zeros(6, dtype=torch.int64),
        "chunk_slots": 2,
    } | wrong
    with pytest.raises(ValueError, match="found"):
        linear_cross_entropy(**arguments)


def test_two_threads_at_once_get_what_one_alone_gets():
    problems = [problem(120, 64, 900, seed) for seed in range(2)]

    def run(hidden_MH: Tensor, weight_VH: Tensor, labels_M: Tensor, weights_M: Tensor) -> tuple[SlotLosses, Tensor]:
        return losses_and_gradient(linear_cross_entropy(hidden_MH, weight_VH, labels_M, chunk_slots=32), hidden_MH, weights_M)

    alone = [run(*arguments) for arguments in problems]
    together: list[list[tuple[SlotLosses, Tensor]]] = [[], []]
    threads = [threading.Thread(target=lambda i=i: together[i].extend(run(*problems[i]) for _ in range(10))) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for expected, results in zip(alone, together, strict=True):
        assert len(results) == 10
        for result in results:
            assert_same(result, expected, 1e-6)
