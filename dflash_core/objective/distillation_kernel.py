"""The Triton kernel between the products of ``distillation``: one program a slot, two passes over its two rows of logits.

The first pass finds the sums of exponentials (the drafter's also at the temperature), the teacher's mean of the difference of the logits, and
whether the label is the most likely token; the second writes the gradient of the mixture where the drafter's logits were, backwards, because
the ends of the rows are what the cache still holds. The twin is ``distillation._mixture_torch_``.

Runs on CUDA, and on the CPU in Triton's interpreter (``TRITON_INTERPRET=1``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from dflash_core.objective.softmax_kernel import capped

if TYPE_CHECKING:
    from dflash_core.objective.distillation import Rows

BLOCK, NUM_WARPS = 2048, 8


@triton.jit
def _mixture_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    teacher_ptr,
    labels_ptr,
    nll_ptr,
    hit_ptr,
    divergence_ptr,
    logits_stride,
    teacher_stride,
    softcap,
    hard,
    soft,
    coldness,
    VOCABULARY: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_TEACHER: tl.constexpr,
    WANT_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row)
    logits_ptr += row * logits_stride
    teacher_ptr += row * teacher_stride
    nll = 0.0
    hit = False
    divergence = 0.0
    if label >= 0:
        label_logit = capped(tl.load(logits_ptr + label).to(tl.float32), softcap, HAS_SOFTCAP)
        largest = -1e30  # not minus infinity: columns beyond the vocabulary are, and their difference to it must be none
        teacher_largest = -1e30
        total = tl.zeros([BLOCK], tl.float32)
        warm_total = tl.zeros([BLOCK], tl.float32)
        teacher_total = tl.zeros([BLOCK], tl.float32)
        gap_total = tl.zeros([BLOCK], tl.float32)
        earlier_tie = tl.zeros([BLOCK], tl.int32)
        for start in range(0, VOCABULARY, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < VOCABULARY
            logits = capped(tl.load(logits_ptr + columns, mask=inside, other=0.0).to(tl.float32), softcap, HAS_SOFTCAP)
            if HAS_TEACHER:
                teacher = capped(tl.load(teacher_ptr + columns, mask=inside, other=0.0).to(tl.float32), softcap, HAS_SOFTCAP)
                gap = (teacher - logits) * coldness
                teacher = tl.where(inside, teacher, float("-inf"))
                new_teacher_largest = tl.maximum(teacher_largest, tl.max(teacher, 0))
                shrink = tl.exp((teacher_largest - new_teacher_largest) * coldness)
                exponentials = tl.exp((teacher - new_teacher_largest) * coldness)
                teacher_total = teacher_total * shrink + exponentials
                gap_total = gap_total * shrink + exponentials * gap
                teacher_largest = new_teacher_largest
            logits = tl.where(inside, logits, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(logits, 0))
            total = total * tl.exp(largest - new_largest) + tl.exp(logits - new_largest)
            warm_total = warm_total * tl.exp((largest - new_largest) * coldness) + tl.exp((logits - new_largest) * coldness)
            largest = new_largest
            earlier_tie = earlier_tie | ((logits == label_logit) & (columns < label)).to(tl.int32)
        log_sum = largest + tl.log(tl.sum(total, 0))
        warm_log_sum = largest * coldness + tl.log(tl.sum(warm_total, 0))
        nll = log_sum - label_logit
        hit = (label_logit >= largest) & (tl.max(earlier_tie, 0) == 0)
        divergence = warm_log_sum
        if HAS_TEACHER:
            sum_of_teacher = tl.sum(teacher_total, 0)
            teacher_log_sum = teacher_largest * coldness + tl.log(sum_of_teacher)
            divergence = tl.sum(gap_total, 0) / sum_of_teacher - teacher_log_sum + warm_log_sum
        if WANT_GRADIENT:
            for back in range(0, VOCABULARY, BLOCK):
                columns = (VOCABULARY - 1) // BLOCK * BLOCK - back + tl.arange(0, BLOCK)
                inside = columns < VOCABULARY
                logits = capped(tl.load(logits_ptr + columns, mask=inside, other=0.0).to(tl.float32), softcap, HAS_SOFTCAP)
                one_hot = tl.where(columns == label, 1.0, 0.0)
                warm = tl.exp(logits * coldness - warm_log_sum)
                if HAS_TEACHER:
                    teacher = capped(tl.load(teacher_ptr + columns, mask=inside, other=0.0).to(tl.float32), softcap, HAS_SOFTCAP)
                    warm -= tl.exp(teacher * coldness - teacher_log_sum)
                gradient = hard * (tl.exp(logits - log_sum) - one_hot) + soft * warm
                if HAS_SOFTCAP:
                    gradient = gradient * (1 - logits * logits / (softcap * softcap))
                tl.store(logits_ptr + columns, gradient.to(logits_ptr.dtype.element_ty), mask=inside)
    tl.store(nll_ptr + row, nll)
    tl.store(hit_ptr + row, hit)
    tl.store(divergence_ptr + row, divergence)


def mixture_triton_(
    logits_CV: Tensor, teacher_CV: Tensor | None, labels_C: Tensor, result: Rows,
    share: float, temperature: float, softcap: float | None, want_gradient: bool,
    block: int = BLOCK, num_warps: int = NUM_WARPS,
) -> None:  # fmt: skip
    """``distillation.mixture_`` as one kernel launch, rows contiguous; the arithmetic is float32 whatever the dtype of the logits."""
    _mixture_kernel[(len(labels_C),)](
        logits_CV,
        teacher_CV if teacher_CV is not None else logits_CV,
        labels_C,
        *result,
        logits_CV.stride(0),
        teacher_CV.stride(0) if teacher_CV is not None else 0,
        1.0 if softcap is None else float(softcap),
        1.0 - share,
        share * temperature,
        1.0 / temperature,
        VOCABULARY=logits_CV.shape[1],
        HAS_SOFTCAP=softcap is not None,
        HAS_TEACHER=teacher_CV is not None,
        WANT_GRADIENT=want_gradient,
        BLOCK=block,
        num_warps=num_warps,
    )
