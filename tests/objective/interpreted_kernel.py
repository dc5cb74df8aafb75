"""Run in a process of its own with TRITON_INTERPRET=1: the Triton kernel against its twin and through the whole cross-entropy."""

from __future__ import annotations

import itertools

import torch

from dflash_core.drafter import IGNORE
from dflash_core.objective import cross_entropy, linear_cross_entropy
from dflash_core.objective.reference import reference_linear_cross_entropy
from dflash_core.objective.softmax_kernel import softmax_gradient_triton_

BLOCK = 64


def kernel_equals_twin(vocabulary: int, softcap: float | None, dtype: torch.dtype, in_place: bool) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    slots = 6
    logits = (4 * torch.randn(slots, vocabulary, generator=generator)).to(dtype)
    labels = torch.randint(0, vocabulary, (slots,), generator=generator)
    labels[0], labels[1], labels[2] = vocabulary - 1, IGNORE, 0
    logits[3, labels[3]] = 20.0  # a hit
    logits[4, labels[4]] = logits[4, 0] = 20.0  # a tie with an earlier token: a hit only if the label is token 0
    twin = logits.to(torch.float32, copy=True)
    expected_nll, expected_hit = cross_entropy._softmax_gradient_torch_(twin, labels, softcap, True)
    gradient = None if in_place else torch.full(logits.shape, torch.nan, dtype=torch.bfloat16)
    nll, hit = softmax_gradient_triton_(logits, labels, softcap, True, gradient, block=BLOCK)
    torch.testing.assert_close(nll, expected_nll, rtol=1e-5, atol=1e-5)
    assert torch.equal(hit, expected_hit), (vocabulary, softcap, dtype)
    written = logits if gradient is None else gradient
    tolerance = 1e-5 if written.dtype == torch.float32 else 8e-3  # the interpreter truncates to bfloat16
    torch.testing.assert_close(written[labels >= 0].float(), twin[labels >= 0], rtol=tolerance, atol=1e-6)


def cross_entropy_equals_twin(softcap: float | None, max_labelled: int | None) -> None:
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(11, 8, generator=generator).requires_grad_()
    weight = torch.randn(150, 8, generator=generator)
    labels = torch.randint(0, 150, (11,), generator=generator)
    labels[::3] = IGNORE
    weights = torch.rand(11, generator=generator)
    results = []
    for losses in (
        linear_cross_entropy(hidden, weight, labels, chunk_slots=4, softcap=softcap, max_labelled=max_labelled),
        reference_linear_cross_entropy(hidden, weight, labels, softcap=softcap),
    ):
        results.append((*losses, *torch.autograd.grad((losses.nll * weights).sum(), hidden)))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    for case in itertools.product((3, 150), (None, 5.0), (torch.float32, torch.bfloat16), (True, False)):
        kernel_equals_twin(*case)
    cross_entropy.softmax_gradient_ = lambda logits, labels, softcap, want: softmax_gradient_triton_(logits, labels, softcap, want, block=BLOCK)
    for softcap, max_labelled in itertools.product((None, 3.0), (None, 9)):
        cross_entropy_equals_twin(softcap, max_labelled)
    print("equal")
