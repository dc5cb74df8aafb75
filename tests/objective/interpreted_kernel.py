"""Run in a process of its own with TRITON_INTERPRET=1: the Triton kernel against its twin and through the whole cross-entropy."""

from __future__ import annotations

import itertools
from functools import partial

import torch

from dflash_core.drafter import IGNORE
from dflash_core.objective import cross_entropy, linear_cross_entropy
from dflash_core.objective.reference import reference_linear_cross_entropy
from dflash_core.objective.softmax import Softmax
from dflash_core.objective.softmax_kernel import hidden_gradient_triton, softmax_into_triton, softmax_triton_

BLOCK = 64


def kernel_equals_twin(vocabulary: int, softcap: float | None, dtype: torch.dtype, in_place: bool, climbing: bool) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    slots = 6
    logits = (4 * torch.randn(slots, vocabulary, generator=generator)).to(dtype)
    labels = torch.randint(0, vocabulary, (slots,), generator=generator)
    labels[0], labels[1], labels[2] = vocabulary - 1, IGNORE, 0
    logits[3, labels[3]] = 20.0  # a hit
    logits[4, labels[4]] = logits[4, 0] = 20.0  # a tie with an earlier token: a hit only if the label is token 0
    if climbing:  # each tile's largest logit lies far above those of the tiles before it
        logits += 30 * torch.arange(vocabulary) // BLOCK
    twin = logits.to(torch.float32, copy=True)
    expected, found = Softmax.empty(labels), Softmax.empty(labels)
    cross_entropy._softmax_torch_(twin, labels, expected, softcap, True)
    out = None if in_place else torch.full(logits.shape, torch.nan, dtype=torch.bfloat16)
    softmax_triton_(logits, labels, found, softcap, True, out, block=BLOCK)
    written = logits if out is None else out
    tolerance = 1e-5 if written.dtype == torch.float32 else 8e-3  # the interpreter truncates to bfloat16
    compare(found, written, expected, twin, labels, tolerance)


def kernel_for_fp8_equals_twin(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (4 * torch.randn(5, vocabulary, generator=generator)).bfloat16()
    labels = torch.randint(0, vocabulary, (5,), generator=generator)
    labels[1] = IGNORE
    twin = logits.float()
    expected, found = Softmax.empty(labels), Softmax.empty(labels)
    cross_entropy._softmax_torch_(twin, labels, expected, None, True)
    written = torch.full(logits.shape, torch.nan)
    softmax_into_triton(written, logits, labels, found, 8.0, block=BLOCK)
    compare(found, written / 8, expected, twin, labels, 1e-5)


def compare(found: Softmax, written: torch.Tensor, expected: Softmax, twin: torch.Tensor, labels: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found.nll, expected.nll, rtol=1e-5, atol=1e-5)
    assert torch.equal(found.hit, expected.hit)
    labelled = labels >= 0
    torch.testing.assert_close(found.at_label[labelled], expected.at_label[labelled], rtol=1e-5, atol=1e-6)
    gradients = [(row.float() * softmax.scale[:, None])[labelled] for row, softmax in ((written, found), (twin, expected))]
    torch.testing.assert_close(*gradients, rtol=tolerance, atol=1e-6)


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
    for case in itertools.product((3, 150), (None, 5.0), (torch.float32, torch.bfloat16), (True, False), (True, False)):
        kernel_equals_twin(*case)
    for vocabulary in (3, 150):
        kernel_for_fp8_equals_twin(vocabulary)
    cross_entropy.softmax_ = partial(softmax_triton_, block=BLOCK)
    cross_entropy.hidden_gradient = hidden_gradient_triton
    for softcap, max_labelled in itertools.product((None, 3.0), (None, 9)):
        cross_entropy_equals_twin(softcap, max_labelled)
