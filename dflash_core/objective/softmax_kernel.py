"""The Triton kernel between the two products of the cross-entropy: one program a slot, two passes over its row of logits.

The first pass finds the log-sum-exp and whether the label is the most likely token, the second writes softmax - one-hot. The second
goes backwards, because the end of the row is what the cache still holds. The twin is ``cross_entropy._softmax_gradient_torch_``.

Runs on CUDA, and on the CPU in Triton's interpreter (``TRITON_INTERPRET=1``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, NUM_WARPS = 4096, 8  # measured: loads that run ahead gain nothing once several programs share a multiprocessor


@triton.jit
def _capped(logits, softcap, HAS_SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    if HAS_SOFTCAP:
        logits = softcap * (1 - 2 / (tl.exp(2 * logits / softcap) + 1))
    return logits


@triton.jit
def _softmax_gradient_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    gradient_ptr,
    labels_ptr,
    nll_ptr,
    hit_ptr,
    logits_stride,
    gradient_stride,
    softcap,
    softmax_scale,
    VOCABULARY: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    WANT_GRADIENT: tl.constexpr,
    ONE_HOT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row)
    logits_ptr += row * logits_stride
    gradient_ptr += row * gradient_stride
    nll = 0.0
    hit = False
    if label >= 0:
        label_logit = _capped(tl.load(logits_ptr + label).to(tl.float32), softcap, HAS_SOFTCAP)
        largest = float("-inf")
        total = tl.zeros([BLOCK], tl.float32)
        earlier_tie = tl.zeros([BLOCK], tl.int32)
        for start in range(0, VOCABULARY, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < VOCABULARY
            logits = _capped(tl.load(logits_ptr + columns, mask=inside, other=0.0).to(tl.float32), softcap, HAS_SOFTCAP)
            logits = tl.where(inside, logits, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(logits, 0))
            total = total * tl.exp(largest - new_largest) + tl.exp(logits - new_largest)
            earlier_tie = earlier_tie | ((logits == label_logit) & (columns < label)).to(tl.int32)
            largest = new_largest
        log_sum = largest + tl.log(tl.sum(total, 0))
        nll = log_sum - label_logit
        hit = (label_logit >= largest) & (tl.max(earlier_tie, 0) == 0)  # argmax takes the first of equal logits
        if WANT_GRADIENT:
            for back in range(0, VOCABULARY, BLOCK):
                columns = (VOCABULARY - 1) // BLOCK * BLOCK - back + tl.arange(0, BLOCK)
                inside = columns < VOCABULARY
                logits = _capped(tl.load(logits_ptr + columns, mask=inside, other=0.0).to(tl.float32), softcap, HAS_SOFTCAP)
                gradient = tl.exp(logits - log_sum)
                if ONE_HOT:
                    gradient -= (columns == label).to(tl.float32)
                else:
                    gradient *= softmax_scale
                if HAS_SOFTCAP:
                    gradient = gradient * (1 - logits * logits / (softcap * softcap))
                tl.store(gradient_ptr + columns, gradient.to(gradient_ptr.dtype.element_ty), mask=inside)
    tl.store(nll_ptr + row, nll)
    tl.store(hit_ptr + row, hit)


def softmax_gradient_triton_(
    logits_CV: Tensor,
    labels_C: Tensor,
    softcap: float | None,
    want_gradient: bool,
    gradient_CV: Tensor | None = None,
    softmax_scale: float | None = None,
    block: int = BLOCK,
    num_warps: int = NUM_WARPS,
) -> tuple[Tensor, Tensor]:
    """``cross_entropy.softmax_gradient_`` as one kernel launch; the arithmetic is float32 whatever the dtype of the logits.

    Args:
        logits_CV: rows contiguous; overwritten with the gradient unless ``gradient_CV`` is given.
        gradient_CV: where the gradient goes instead, in its own dtype.
        softmax_scale: leave the one-hot out and multiply by this what is left, the softmax.
    """
    slots, vocabulary = logits_CV.shape
    nll_C = torch.empty(slots, dtype=torch.float32, device=logits_CV.device)
    hit_C = torch.empty(slots, dtype=torch.bool, device=logits_CV.device)
    gradient_CV = logits_CV if gradient_CV is None else gradient_CV
    _softmax_gradient_kernel[(slots,)](
        logits_CV,
        gradient_CV,
        labels_C,
        nll_C,
        hit_C,
        logits_CV.stride(0),
        gradient_CV.stride(0),
        1.0 if softcap is None else float(softcap),
        1.0 if softmax_scale is None else softmax_scale,
        VOCABULARY=vocabulary,
        HAS_SOFTCAP=softcap is not None,
        WANT_GRADIENT=want_gradient,
        ONE_HOT=softmax_scale is None,
        BLOCK=block,
        num_warps=num_warps,
    )
    return nll_C, hit_C
