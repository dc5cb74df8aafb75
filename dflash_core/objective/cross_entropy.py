"""Cross-entropy of drafted slots through the target's frozen head, without ever holding all logits.

The forward pass goes over the labelled slots in chunks. A chunk's logits are made, turned in place into the gradient
(softmax - one-hot), multiplied back into the hidden space and dropped. So the gradient of each slot's loss with respect to its
hidden state is known after the forward pass, and the backward pass is one multiplication: nothing is computed twice.
It is kept unweighted, because weights may depend on the probabilities that this same pass finds (D-PACE).

On CUDA the two products are cuBLAS's and what lies between them is one Triton kernel (``softmax_kernel``). With an ``Fp8Head`` the products are
fp8, the softmax alone is multiplied back, and the one-hot is subtracted at the end as rows of the head.

Shapes: M slots, C slots of a chunk, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dflash_core.fp8 import SOFTMAX_SCALE, Fp8Head


class SlotLosses(NamedTuple):
    """What one pass over the vocabulary tells about each slot; all zero for slots without a label.

    nll:         [M] float32 (float64 for float64 input), -log p(label); differentiable with respect to the hidden states
    probability: [M] same dtype, p(label), without gradient
    hit:         [M] bool, the label is the most likely token
    """

    nll: Tensor
    probability: Tensor
    hit: Tensor


def linear_cross_entropy(
    hidden_MH: Tensor,
    head: Tensor | Fp8Head,
    labels_M: Tensor,
    *,
    chunk_slots: int,
    softcap: float | None = None,
    max_labelled: int | None = None,
) -> SlotLosses:
    """Per-slot cross-entropy of ``softmax(softcap * tanh(hidden @ weight.T / softcap))``; the head gets no gradient.

    Slots without a label are never multiplied into the vocabulary. On the CPU products run in float32 (float64 for float64
    input), whatever the dtype of the arguments; on CUDA in the dtype of the head with float32 accumulation, and the softmax
    in float32. Free of global state: threads may call it at the same time.

    Args:
        hidden_MH: hidden states after the drafter's final norm.
        head: the target's head [V, H], frozen. On the CPU hold it in float32, or it is converted at every call. As an ``Fp8Head`` both products
            are fp8; it takes no softcap.
        labels_M: int64, negative where a slot has no label.
        chunk_slots: most rows of logits alive at a time; memory is chunk_slots * V elements.
        softcap: the target's final logit softcap, if it has one.
        max_labelled: bound on the number of labelled slots. None counts them, which on CUDA waits for the device. With the bound,
            shapes are fixed and nothing waits; labelled slots beyond it get nll = NaN. With a bound of M or more nothing is moved either.
    Raises:
        ValueError: shapes that do not fit together, or a chunk or bound below 1.
    """
    weight_VH = head.weight_VH if isinstance(head, Fp8Head) else head
    if hidden_MH.ndim != 2 or weight_VH.ndim != 2 or hidden_MH.shape[1] != weight_VH.shape[1] or labels_M.shape != hidden_MH.shape[:1]:
        raise ValueError(
            f"expected hidden [M, H], weight [V, H] and labels [M], found {list(hidden_MH.shape)}, {list(weight_VH.shape)} and {list(labels_M.shape)}"
        )
    if chunk_slots < 1 or (max_labelled is not None and max_labelled < 1):
        raise ValueError(f"chunk_slots and max_labelled must be at least 1, found {chunk_slots} and {max_labelled}")
    if softcap is not None and isinstance(head, Fp8Head):
        raise ValueError("a head in fp8 takes no softcap")
    want_gradient = hidden_MH.requires_grad and torch.is_grad_enabled()
    slots = _labelled_slots(labels_M, max_labelled)
    # autocast would turn the float32 products of the CPU path into bfloat16 ones
    with torch.autocast(hidden_MH.device.type, enabled=False):
        return SlotLosses(
            *_LinearCrossEntropy.apply(
                hidden_MH, weight_VH.detach() if head is weight_VH else head, labels_M, slots, chunk_slots, softcap, want_gradient
            )
        )


def _labelled_slots(labels_M: Tensor, max_labelled: int | None) -> Tensor | None:
    """Indices of the labelled slots: exactly those, or with a bound that many, the labelled ones first; None for all slots as they are."""
    if max_labelled is None:
        return (labels_M >= 0).nonzero().squeeze(1)
    if max_labelled >= len(labels_M):
        return None
    return torch.argsort((labels_M < 0).to(torch.uint8), stable=True)[:max_labelled]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MH: Tensor,
        head: Tensor | Fp8Head,
        labels_M: Tensor,
        slots_L: Tensor | None,
        chunk_slots: int,
        softcap: float | None,
        want_gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        fp8 = head if isinstance(head, Fp8Head) else None
        weight_VH = head.weight_VH if isinstance(head, Fp8Head) else head
        dtype = _product_dtype(hidden_MH, weight_VH)
        weight_VH = weight_VH.to(dtype)
        statistics_dtype = torch.promote_types(dtype, torch.float32)
        labels_L = labels_M if slots_L is None else labels_M[slots_L]
        slots = len(labels_L)
        nll_L = labels_L.new_zeros(labels_L.shape, dtype=statistics_dtype)
        hit_L = torch.zeros_like(labels_L, dtype=torch.bool)
        gradient_LH = hidden_MH.new_empty((slots if want_gradient else 0, hidden_MH.shape[1]), dtype=dtype)
        chunk_size = min(chunk_slots, slots)
        logits_CV = weight_VH.new_empty((chunk_size, weight_VH.shape[0]))
        softmax_CV = fp8.softmax_buffer(chunk_size) if fp8 is not None else None
        for start in range(0, slots, chunk_slots):
            chunk = slice(start, start + chunk_slots)
            hidden_CH = hidden_MH[chunk if slots_L is None else slots_L[chunk]].to(dtype)
            chunk_CV, size = logits_CV[: len(hidden_CH)], len(hidden_CH)
            if fp8 is not None and softmax_CV is not None:
                fp8.logits(hidden_CH, out=chunk_CV)
                nll_L[chunk], hit_L[chunk] = softmax_into_(softmax_CV[:size], chunk_CV, labels_L[chunk], want_gradient)
                if want_gradient:
                    fp8.pull_back(softmax_CV[:size], out=gradient_LH[chunk])
                continue
            torch.mm(hidden_CH, weight_VH.T, out=chunk_CV)
            nll_L[chunk], hit_L[chunk] = softmax_gradient_(chunk_CV, labels_L[chunk], softcap, want_gradient)
            if want_gradient:
                torch.mm(chunk_CV, weight_VH, out=gradient_LH[chunk])
        if fp8 is not None and want_gradient:
            gradient_LH.sub_(weight_VH[labels_L.clamp(min=0)])
        ctx.save_for_backward(slots_L, labels_L, gradient_LH)
        ctx.hidden_shape, ctx.hidden_dtype = hidden_MH.shape, hidden_MH.dtype
        labelled_M = labels_M >= 0
        nll_M, hit_M = nll_L, hit_L
        if slots_L is not None:  # a labelled slot beyond the bound keeps NaN, so that it cannot go unnoticed
            nll_M = torch.zeros_like(labels_M, dtype=statistics_dtype).masked_fill_(labelled_M, torch.nan).index_copy_(0, slots_L, nll_L)
            hit_M = torch.zeros_like(labelled_M).index_copy_(0, slots_L, hit_L)
        probability_M = torch.exp(-nll_M).masked_fill_(~labelled_M, 0.0)  # torch.where copies its scalar to the device, and waits
        ctx.mark_non_differentiable(probability_M, hit_M)
        return nll_M, probability_M, hit_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_nll_M: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        slots_L, labels_L, gradient_LH = ctx.saved_tensors
        scaled_LH = torch.empty_like(gradient_LH, dtype=ctx.hidden_dtype)
        grad_nll_L = grad_nll_M if slots_L is None else grad_nll_M[slots_L]
        torch.mul(gradient_LH, grad_nll_L[:, None], out=scaled_LH)  # in float32, rounded once
        scaled_LH.masked_fill_((labels_L < 0)[:, None], 0.0)  # with a bound, rows of slots without a label are there and may hold anything
        grad_hidden_MH = scaled_LH if slots_L is None else scaled_LH.new_zeros(ctx.hidden_shape).index_copy_(0, slots_L, scaled_LH)
        return grad_hidden_MH, None, None, None, None, None, None


def _product_dtype(hidden_MH: Tensor, weight_VH: Tensor) -> torch.dtype:
    if hidden_MH.is_cuda:
        return weight_VH.dtype
    # CPUs without bfloat16 instructions multiply it many times slower than float32
    return torch.promote_types(torch.promote_types(hidden_MH.dtype, weight_VH.dtype), torch.float32)


def softmax_gradient_(logits_CV: Tensor, labels_C: Tensor, softcap: float | None, want_gradient: bool) -> tuple[Tensor, Tensor]:
    """Loss and top-1 hit of each row; the logits are overwritten with the gradient of the loss (or with scratch).

    Args:
        logits_CV: logits before the softcap, any float dtype.
        labels_C: int64; rows with a negative label get 0 and False, and their logits may hold anything afterwards.
    Returns: nll [C] float32 (float64 for float64 logits), hit [C] bool.
    """
    if logits_CV.is_cuda:
        from dflash_core.objective.softmax_kernel import softmax_gradient_triton_  # Triton is not there on every platform

        return softmax_gradient_triton_(logits_CV, labels_C, softcap, want_gradient)
    return _softmax_gradient_torch_(logits_CV, labels_C, softcap, want_gradient)


def softmax_into_(softmax_CV: Tensor, logits_CV: Tensor, labels_C: Tensor, want_softmax: bool) -> tuple[Tensor, Tensor]:
    """``softmax_gradient_`` without softcap, with the softmax over ``SOFTMAX_SCALE`` in ``softmax_CV`` instead of the gradient in the logits."""
    if logits_CV.is_cuda:
        from dflash_core.objective.softmax_kernel import softmax_gradient_triton_

        return softmax_gradient_triton_(
            logits_CV, labels_C, None, want_softmax, softmax_CV, softmax_scale=1 / SOFTMAX_SCALE, block=16_384, num_warps=16
        )  # a tenth faster than the block for bfloat16
    if want_softmax:
        softmax_CV.copy_(logits_CV.float().softmax(dim=1) / SOFTMAX_SCALE)
    return _softmax_gradient_torch_(logits_CV, labels_C, None, False)


def _softmax_gradient_torch_(logits_CV: Tensor, labels_C: Tensor, softcap: float | None, want_gradient: bool) -> tuple[Tensor, Tensor]:
    labelled_C = labels_C >= 0
    index_C1 = labels_C.clamp(min=0)[:, None]
    slope_CV: Tensor | float = 1.0
    if softcap is not None:
        logits_CV.div_(softcap).tanh_()
        slope_CV = 1 - logits_CV.square() if want_gradient else 1.0
        logits_CV.mul_(softcap)
    largest_C, top_C = logits_CV.max(dim=1)
    label_logit_C = logits_CV.gather(1, index_C1).squeeze(1)
    logits_CV.sub_(largest_C[:, None]).exp_()
    total_C = logits_CV.sum(dim=1)
    if want_gradient:
        logits_CV.div_(total_C[:, None])
        logits_CV.scatter_add_(1, index_C1, logits_CV.new_full(index_C1.shape, -1.0))
        if softcap is not None:
            logits_CV.mul_(slope_CV)
    nll_C = torch.where(labelled_C, total_C.log() + largest_C - label_logit_C, 0.0)
    return nll_C, labelled_C & (top_C == labels_C)
