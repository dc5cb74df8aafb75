"""Run in a process of its own with TRITON_INTERPRET=1: the Triton kernel of the mixture against its twin and through the whole loss."""

from __future__ import annotations

from functools import partial

import torch

from dflash_core.drafter import IGNORE
from dflash_core.objective import distillation, distilled_cross_entropy
from dflash_core.objective.distillation import Rows
from dflash_core.objective.distillation_kernel import mixture_triton_
from dflash_core.objective.reference import reference_distilled_cross_entropy

BLOCK = 64


def kernel_equals_twin(vocabulary: int, softcap: float | None, temperature: float, dtype: torch.dtype, taught: bool = True) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits, teacher = ((4 * torch.randn(6, vocabulary, generator=generator)).to(dtype) for _ in range(2))
    labels = torch.randint(0, vocabulary, (6,), generator=generator)
    labels[0], labels[1], labels[2] = vocabulary - 1, IGNORE, 0
    logits[3, labels[3]] = 20.0  # a hit
    logits[4, labels[4]] = logits[4, 0] = 20.0  # a tie with an earlier token: a hit only if the label is token 0
    logits[5] += 30 * torch.arange(vocabulary) // BLOCK  # each tile's largest logit lies far above those of the tiles before it
    results, written = [], []
    for mixture_, dtype_of_twin in ((distillation._mixture_torch_, torch.float32), (partial(mixture_triton_, block=BLOCK), dtype)):
        rows = Rows(torch.full((6,), torch.nan), torch.zeros(6, dtype=torch.bool), torch.full((6,), torch.nan))
        values = logits.to(dtype_of_twin, copy=True)
        mixture_(values, teacher.to(dtype_of_twin, copy=True) if taught else None, labels, rows, 0.4, temperature, softcap, True)
        results.append(rows)
        written.append(values[labels >= 0].float())
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found[labels >= 0], expected[labels >= 0], rtol=1e-4, atol=2e-5)
    assert float(results[1].nll[1]) == 0.0
    torch.testing.assert_close(written[1], written[0], rtol=1e-4 if dtype == torch.float32 else 8e-3, atol=1e-5)


def loss_equals_twin(softcap: float | None, max_labelled: int | None) -> None:
    generator = torch.Generator().manual_seed(7)
    hidden, teacher = torch.randn(11, 8, generator=generator).requires_grad_(), torch.randn(11, 8, generator=generator)
    weight, weights = torch.randn(150, 8, generator=generator), torch.rand(11, generator=generator)
    labels = torch.randint(0, 150, (11,), generator=generator)
    labels[::3] = IGNORE
    mixture = {"share": 0.3, "temperature": 2.0, "softcap": softcap}
    results = []
    for losses in (
        distilled_cross_entropy(hidden, weight, labels, teacher, chunk_slots=4, max_labelled=max_labelled, **mixture),
        reference_distilled_cross_entropy(hidden, weight, labels, teacher, **mixture),
    ):
        results.append((*losses, *torch.autograd.grad((losses.loss * weights).sum(), hidden)))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    kernel_equals_twin(3, None, 1.0, torch.float32)
    kernel_equals_twin(150, None, 2.0, torch.bfloat16)
    kernel_equals_twin(150, 5.0, 0.5, torch.float32)
    kernel_equals_twin(150, None, 2.0, torch.float32, taught=False)
    distillation.mixture_ = partial(mixture_triton_, block=BLOCK)
    loss_equals_twin(softcap=None, max_labelled=9)
    loss_equals_twin(softcap=3.0, max_labelled=None)
