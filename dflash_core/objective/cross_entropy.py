"""Cross-entropy of drafted slots through the target's frozen head, without ever holding all logits.

The forward pass goes over the labelled slots in chunks. A chunk's logits are made, turned in place into exponentials (the softmax but for a factor of
each row), multiplied back into the hidden space and dropped. So the gradient of each slot's loss with respect to its
hidden state is known after the forward pass, but for that factor and a row of the head; the backward pass adds them and the slot's weight in
one go over the hidden states: nothing is computed twice. Weights come last because they may depend on the probabilities that this same pass
finds (D-PACE).

On CUDA the two products are cuBLAS's and what lies between and behind them are Triton kernels (``softmax_kernel``). With an ``Fp8Head`` the products
are fp8.

Shapes: M slots, C slots of a chunk, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dflash_core.fp8 import SOFTMAX_SCALE, Fp8Head
from dflash_core.objective.softmax import Softmax


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
    slots = labelled_slots(labels_M, max_labelled)
    # autocast would turn the float32 products of the CPU path into bfloat16 ones
    with torch.autocast(hidden_MH.device.type, enabled=False):
        return SlotLosses(
            *_LinearCrossEntropy.apply(
                hidden_MH, weight_VH.detach() if head is weight_VH else head, labels_M, slots, chunk_slots, softcap, want_gradient
            )
        )


def labelled_slots(labels_M: Tensor, max_labelled: int | None) -> Tensor | None:
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
        products = HeadProducts(hidden_MH, head)
        fp8, weight_VH, dtype, statistics_dtype = products.fp8, products.weight_VH, products.dtype, products.statistics
        labels_L = labels_M if slots_L is None else labels_M[slots_L]
        slots = len(labels_L)
        softmax_L = Softmax.empty(labels_L, statistics_dtype)
        pulled_LH = hidden_MH.new_empty((slots if want_gradient else 0, hidden_MH.shape[1]), dtype=dtype)
        chunk_size = min(chunk_slots, slots)
        logits_CV = weight_VH.new_empty((chunk_size, weight_VH.shape[0]))
        softmax_CV = fp8.softmax_buffer(chunk_size) if fp8 is not None and want_gradient else None
        for start in range(0, slots, chunk_slots):
            chunk = slice(start, start + chunk_slots)
            hidden_CH = hidden_MH[chunk if slots_L is None else slots_L[chunk]]
            chunk_CV, size = logits_CV[: len(hidden_CH)], len(hidden_CH)
            products.logits(hidden_CH, out=chunk_CV)
            if fp8 is not None and softmax_CV is not None:
                softmax_into_(softmax_CV[:size], chunk_CV, labels_L[chunk], softmax_L.rows(chunk))
                fp8.pull_back(softmax_CV[:size], out=pulled_LH[chunk])
            else:
                softmax_(chunk_CV, labels_L[chunk], softmax_L.rows(chunk), softcap, want_gradient)
                if want_gradient:
                    torch.mm(chunk_CV, weight_VH, out=pulled_LH[chunk])
        nll_L, hit_L, scale_L, at_label_L = softmax_L
        ctx.save_for_backward(slots_L, labels_L, pulled_LH, weight_VH, scale_L, at_label_L)
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
        slots_L, labels_L, pulled_LH, weight_VH, scale_L, at_label_L = ctx.saved_tensors
        grad_nll_L = grad_nll_M if slots_L is None else grad_nll_M[slots_L]
        gradient_LH = hidden_gradient(pulled_LH, weight_VH, labels_L, scale_L, at_label_L, grad_nll_L, ctx.hidden_dtype)
        grad_hidden_MH = gradient_LH if slots_L is None else gradient_LH.new_zeros(ctx.hidden_shape).index_copy_(0, slots_L, gradient_LH)
        return grad_hidden_MH, None, None, None, None, None, None


class HeadProducts:
    """The logits of hidden states, in the precision that the device multiplies in; what comes of them is in ``statistics``, float32 at least."""

    def __init__(self, hidden_MH: Tensor, head: Tensor | Fp8Head):
        self.fp8 = head if isinstance(head, Fp8Head) else None
        weight_VH = head.weight_VH if isinstance(head, Fp8Head) else head
        if hidden_MH.is_cuda:
            self.dtype = weight_VH.dtype
        else:  # CPUs without bfloat16 instructions multiply it many times slower than float32
            self.dtype = torch.promote_types(torch.promote_types(hidden_MH.dtype, weight_VH.dtype), torch.float32)
        self.statistics = torch.promote_types(self.dtype, torch.float32)
        self.weight_VH = weight_VH.to(self.dtype)

    def logits(self, hidden_CH: Tensor, out: Tensor) -> None:
        """[C, V] into ``out``."""
        if self.fp8 is not None:
            self.fp8.logits(hidden_CH.to(self.dtype), out=out)
        else:
            torch.mm(hidden_CH.to(self.dtype), self.weight_VH.T, out=out)


def softmax_(logits_CV: Tensor, labels_C: Tensor, result: Softmax, softcap: float | None, want_gradient: bool) -> None:
    """One pass over rows of logits; they are overwritten with the exponentials that ``Softmax`` speaks of (or with scratch).

    Args:
        logits_CV: logits before the softcap, any float dtype.
        labels_C: int64; rows with a negative label get loss 0 and no hit, and may hold anything afterwards.
        result: is written; without gradient, its loss and hits alone.
    """
    if logits_CV.is_cuda:
        from dflash_core.objective.softmax_kernel import softmax_triton_  # Triton is not there on every platform

        softmax_triton_(logits_CV, labels_C, result, softcap, want_gradient)
    else:
        _softmax_torch_(logits_CV, labels_C, result, softcap, want_gradient)


def softmax_into_(softmax_CV: Tensor, logits_CV: Tensor, labels_C: Tensor, result: Softmax) -> None:
    """``softmax_`` without softcap, with softmax values over ``SOFTMAX_SCALE`` in ``softmax_CV`` instead of exponentials in the logits."""
    if logits_CV.is_cuda:
        from dflash_core.objective.softmax_kernel import softmax_into_triton

        softmax_into_triton(softmax_CV, logits_CV, labels_C, result, 1 / SOFTMAX_SCALE)
        return
    logits_CV = logits_CV.float()
    _softmax_torch_(logits_CV, labels_C, result, None, True)
    softmax_CV.copy_(logits_CV * (result.scale / SOFTMAX_SCALE)[:, None])
    result.scale.fill_(1.0)


def _softmax_torch_(logits_CV: Tensor, labels_C: Tensor, result: Softmax, softcap: float | None, want_gradient: bool) -> None:
    labelled_C = labels_C >= 0
    index_C1 = labels_C.clamp(min=0)[:, None]
    slope_CV: Tensor | None = None
    if softcap is not None:
        logits_CV.div_(softcap).tanh_()
        slope_CV = 1 - logits_CV.square() if want_gradient else None
        logits_CV.mul_(softcap)
    largest_C, top_C = logits_CV.max(dim=1)
    label_logit_C = logits_CV.gather(1, index_C1).squeeze(1)
    logits_CV.sub_(largest_C[:, None]).exp_().scatter_(1, index_C1, 0.0)
    others_C = logits_CV.sum(dim=1)
    total_C = others_C + (label_logit_C - largest_C).exp()
    at_label_C = -others_C / total_C
    if slope_CV is not None:
        logits_CV.mul_(slope_CV)
        at_label_C = at_label_C * slope_CV.gather(1, index_C1).squeeze(1)
    result.nll.copy_(torch.where(labelled_C, total_C.log() + largest_C - label_logit_C, 0.0))
    result.hit.copy_(labelled_C & (top_C == labels_C))
    result.scale.copy_(1 / total_C)
    result.at_label.copy_(at_label_C)


def hidden_gradient(
    pulled_LH: Tensor, head_VH: Tensor, labels_L: Tensor, scale_L: Tensor, at_label_L: Tensor, grad_nll_L: Tensor, dtype: torch.dtype
) -> Tensor:
    """Gradient of the weighted losses with respect to the hidden states [L, H]: ``grad_nll * (scale * pulled + at_label * head[label])``.

    Args:
        pulled_LH: product of what ``softmax_`` left and the head; rows without a label may hold anything and give 0.
        dtype: of the result; it is rounded once.
    """
    arguments = (pulled_LH, head_VH, labels_L, scale_L, at_label_L, grad_nll_L, dtype)
    if pulled_LH.is_cuda:
        from dflash_core.objective.softmax_kernel import hidden_gradient_triton

        return hidden_gradient_triton(*arguments)
    return _hidden_gradient_torch(*arguments)


def _hidden_gradient_torch(
    pulled_LH: Tensor, head_VH: Tensor, labels_L: Tensor, scale_L: Tensor, at_label_L: Tensor, grad_nll_L: Tensor, dtype: torch.dtype
) -> Tensor:
    statistics = scale_L.dtype
    gradient_LH = pulled_LH.to(statistics) * scale_L[:, None]
    gradient_LH.addcmul_(head_VH[labels_L.clamp(min=0)].to(statistics), at_label_L[:, None]).mul_(grad_nll_L[:, None])
    return gradient_LH.masked_fill_((labels_L < 0)[:, None], 0.0).to(dtype)
