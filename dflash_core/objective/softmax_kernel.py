"""The Triton kernels around the two products of the cross-entropy.

Between them: one program a slot, which goes over its row of logits **once**, and leaves exponentials where the logits were. Their sum, which a
softmax divides by, is known only at the end of the row, but a factor of a whole row may just as well be multiplied in after the product with the
head.
The label's own column is left out of that product: its part is a row of the head times a number that is known in float32 (see ``Softmax``).
For an fp8 head there are two passes, because numbers with few exponent bits have to be softmax values when they are written; the second
goes backwards, because the end of the row is what the cache still holds.

After them: factor, label's part and the weight of the slot's loss in one pass over the gradients of the hidden states.

The twins are ``cross_entropy._softmax_torch_`` and ``cross_entropy._hidden_gradient_torch``. Runs on CUDA, and on the CPU in Triton's interpreter
(``TRITON_INTERPRET=1``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_core.objective.softmax import Softmax

BLOCK, NUM_WARPS = 1024, 4  # 56 registers: all 1,024 rows of a chunk are under way at once on 132 multiprocessors
FP8_BLOCK, FP8_NUM_WARPS = 16_384, 16  # a tenth faster there
_HEADROOM: tl.constexpr = tl.constexpr(40.0)
"""How far a logit may lie above the one that exponentials are relative to. e^40 times a vocabulary times a head is far from the end of float32."""


@triton.jit
def capped(logits, softcap, HAS_SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """softcap·tanh(logits / softcap)."""
    if HAS_SOFTCAP:
        logits = softcap * (1 - 2 / (tl.exp(2 * logits / softcap) + 1))
    return logits


@triton.jit
def _exponentials_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    exponentials_ptr,
    labels_ptr,
    nll_ptr,
    hit_ptr,
    scale_ptr,
    at_label_ptr,
    logits_stride,
    exponentials_stride,
    softcap,
    VOCABULARY: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    WANT_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row)
    logits_ptr += row * logits_stride
    exponentials_ptr += row * exponentials_stride
    nll = 0.0
    hit = False
    scale = 0.0
    at_label = 0.0
    if label >= 0:
        label_logit = capped(tl.load(logits_ptr + label).to(tl.float32), softcap, HAS_SOFTCAP)
        origin = float("-inf")
        beaten = False
        others = tl.zeros([BLOCK], tl.float32)
        columns = tl.arange(0, BLOCK)
        ahead = tl.load(logits_ptr + columns, mask=columns < VOCABULARY, other=float("-inf"))
        for start in range(0, VOCABULARY, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < VOCABULARY
            logits = capped(ahead.to(tl.float32), softcap, HAS_SOFTCAP)
            ahead = tl.load(logits_ptr + columns + BLOCK, mask=columns + BLOCK < VOCABULARY, other=float("-inf"))
            if HAS_SOFTCAP:
                logits = tl.where(inside, logits, float("-inf"))
            largest = tl.max(logits, 0)
            if start + BLOCK <= label:
                beaten = beaten | (largest >= label_logit)  # argmax takes the first of equal logits
            else:
                beaten = beaten | (largest > label_logit)
                if start <= label:
                    beaten = beaten | (tl.max(tl.where(columns < label, logits, float("-inf")), 0) >= label_logit)
            if largest > origin + _HEADROOM:  # true of the first tile, and hardly ever again
                shrink = tl.exp(origin - largest)
                others *= shrink
                origin = largest
                if WANT_GRADIENT:
                    for before in range(0, start, BLOCK):
                        tl.debug_barrier()
                        written = tl.load(exponentials_ptr + before + tl.arange(0, BLOCK)).to(tl.float32) * shrink
                        tl.store(exponentials_ptr + before + tl.arange(0, BLOCK), written.to(exponentials_ptr.dtype.element_ty))
            exponentials = tl.where(columns == label, 0.0, tl.exp(logits - origin))
            others += exponentials
            if WANT_GRADIENT:
                if HAS_SOFTCAP:
                    exponentials = exponentials * (1 - logits * logits / (softcap * softcap))
                tl.store(exponentials_ptr + columns, exponentials.to(exponentials_ptr.dtype.element_ty), mask=inside)
        sum_of_others = tl.sum(others, 0)
        total = sum_of_others + tl.exp(label_logit - origin)
        nll = tl.log(total) + (origin - label_logit)
        hit = not beaten
        scale = 1 / total
        at_label = -sum_of_others / total
        if HAS_SOFTCAP:
            at_label = at_label * (1 - label_logit * label_logit / (softcap * softcap))
    tl.store(nll_ptr + row, nll)
    tl.store(hit_ptr + row, hit)
    if WANT_GRADIENT:
        tl.store(scale_ptr + row, scale)
        tl.store(at_label_ptr + row, at_label)


@triton.jit
def _softmax_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    softmax_ptr,
    labels_ptr,
    nll_ptr,
    hit_ptr,
    at_label_ptr,
    logits_stride,
    softmax_stride,
    factor,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row)
    logits_ptr += row * logits_stride
    softmax_ptr += row * softmax_stride
    nll = 0.0
    hit = False
    at_label = 0.0
    if label >= 0:
        label_logit = tl.load(logits_ptr + label).to(tl.float32)
        largest = float("-inf")
        others = tl.zeros([BLOCK], tl.float32)
        earlier_tie = tl.zeros([BLOCK], tl.int32)
        for start in range(0, VOCABULARY, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            logits = tl.load(logits_ptr + columns, mask=columns < VOCABULARY, other=float("-inf")).to(tl.float32)
            new_largest = tl.maximum(largest, tl.max(logits, 0))
            others = others * tl.exp(largest - new_largest) + tl.where(columns == label, 0.0, tl.exp(logits - new_largest))
            earlier_tie = earlier_tie | ((logits == label_logit) & (columns < label)).to(tl.int32)
            largest = new_largest
        sum_of_others = tl.sum(others, 0)
        total = sum_of_others + tl.exp(label_logit - largest)
        log_sum = largest + tl.log(total)
        nll = log_sum - label_logit
        hit = (label_logit >= largest) & (tl.max(earlier_tie, 0) == 0)
        at_label = -sum_of_others / total
        for back in range(0, VOCABULARY, BLOCK):
            columns = (VOCABULARY - 1) // BLOCK * BLOCK - back + tl.arange(0, BLOCK)
            inside = columns < VOCABULARY
            logits = tl.load(logits_ptr + columns, mask=inside, other=float("-inf")).to(tl.float32)
            softmax = tl.where(columns == label, 0.0, tl.exp(logits - log_sum)) * factor
            tl.store(softmax_ptr + columns, softmax.to(softmax_ptr.dtype.element_ty), mask=inside)
    tl.store(nll_ptr + row, nll)
    tl.store(hit_ptr + row, hit)
    tl.store(at_label_ptr + row, at_label)


@triton.jit
def _hidden_gradient_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    pulled_ptr,
    head_ptr,
    labels_ptr,
    scale_ptr,
    at_label_ptr,
    grad_nll_ptr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    label = tl.load(labels_ptr + row)
    gradient = tl.zeros([BLOCK], tl.float32)
    if label >= 0:  # other rows of the product may hold anything
        weight = tl.load(grad_nll_ptr + row)
        pulled = tl.load(pulled_ptr + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        head = tl.load(head_ptr + label * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        gradient = weight * (tl.load(scale_ptr + row) * pulled + tl.load(at_label_ptr + row) * head)
    tl.store(out_ptr + row * WIDTH + columns, gradient.to(out_ptr.dtype.element_ty), mask=inside)


def softmax_triton_(
    logits_CV: Tensor,
    labels_C: Tensor,
    result: Softmax,
    softcap: float | None,
    want_gradient: bool,
    out_CV: Tensor | None = None,
    block: int = BLOCK,
    num_warps: int = NUM_WARPS,
) -> None:
    """``cross_entropy.softmax_`` as one kernel launch; the arithmetic is float32 whatever the dtype of the logits.

    Args:
        logits_CV: rows contiguous; overwritten, unless ``out_CV`` is given, where the result goes instead in its own dtype, bfloat16 or wider.
    """
    out_CV = logits_CV if out_CV is None else out_CV
    _exponentials_kernel[(len(labels_C),)](
        logits_CV,
        out_CV,
        labels_C,
        *result,
        logits_CV.stride(0),
        out_CV.stride(0),
        1.0 if softcap is None else float(softcap),
        VOCABULARY=logits_CV.shape[1],
        HAS_SOFTCAP=softcap is not None,
        WANT_GRADIENT=want_gradient,
        BLOCK=block,
        num_warps=num_warps,
    )


def softmax_into_triton(
    softmax_CV: Tensor, logits_CV: Tensor, labels_C: Tensor, result: Softmax, factor: float, block: int = FP8_BLOCK, num_warps: int = FP8_NUM_WARPS
) -> None:
    """The softmax, times ``factor`` and without the labels' column, in ``softmax_CV``; its rows need no factor of their own any more."""
    result.scale.fill_(1.0)
    _softmax_kernel[(len(labels_C),)](
        logits_CV,
        softmax_CV,
        labels_C,
        result.nll,
        result.hit,
        result.at_label,
        logits_CV.stride(0),
        softmax_CV.stride(0),
        factor,
        VOCABULARY=logits_CV.shape[1],
        BLOCK=block,
        num_warps=num_warps,
    )


def hidden_gradient_triton(
    pulled_LH: Tensor, head_VH: Tensor, labels_L: Tensor, scale_L: Tensor, at_label_L: Tensor, grad_nll_L: Tensor, dtype: torch.dtype
) -> Tensor:
    """``cross_entropy._hidden_gradient_torch`` as one kernel launch. All contiguous."""
    out_LH = torch.empty_like(pulled_LH, dtype=dtype)
    rows, width = pulled_LH.shape
    block = min(triton.next_power_of_2(width), 2048)
    _hidden_gradient_kernel[(rows, triton.cdiv(width, block))](
        out_LH, pulled_LH, head_VH, labels_L, scale_L, at_label_L, grad_nll_L.contiguous(), WIDTH=width, BLOCK=block, num_warps=4
    )
    return out_LH
