"""Cross-entropy mixed with the divergence from the target's whole distribution, through the target's frozen head, a chunk of logits at a time.

    loss = (1 - share) * -log p(label)  +  share * t² * KL(teacher at temperature t || drafter at temperature t)

The teacher's logits are made of the target's last hidden states by the same head, chunk by chunk beside the drafter's, and dropped with them. Or
its likeliest tokens are given with their probabilities, which are then taken to be all there are. As in ``cross_entropy`` the gradient of each
slot's loss is formed in the forward pass and its weight comes in the backward pass, so it may depend on the probabilities found here. t² keeps
the gradient's size at any temperature (Hinton et al., arXiv 1503.02531, section 2).

Shapes: M slots, L slots that are computed, C slots of a chunk, H hidden, V vocabulary, K likeliest tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dflash_core.fp8 import Fp8Head
from dflash_core.objective.cross_entropy import HeadProducts, labelled_slots


class DistilledLosses(NamedTuple):
    """What one pass over the vocabulary tells about each slot; all zero for slots without a label.

    loss:        [M] float32 (float64 for float64 input), the mixture; differentiable with respect to the drafter's hidden states
    nll:         [M] same dtype, -log p(label), without gradient
    probability: [M] same dtype, p(label), without gradient
    hit:         [M] bool, the label is the most likely token
    divergence:  [M] same dtype, KL at the temperature, without gradient
    """

    loss: Tensor
    nll: Tensor
    probability: Tensor
    hit: Tensor
    divergence: Tensor


class TopK(NamedTuple):
    """The target's likeliest tokens at each slot: ids, integers [M, K] without repetition, and log-probabilities [M, K]."""

    ids: Tensor
    logprobs: Tensor


class Rows(NamedTuple):
    """What is known of C rows of logits after a pass over them. ``divergence``: with a ``TopK``, the log-sum-exp at the temperature instead."""

    nll: Tensor
    hit: Tensor
    divergence: Tensor

    def part(self, chunk: slice) -> Rows:
        """Views of some rows."""
        return Rows(*(values[chunk] for values in self))


def distilled_cross_entropy(
    hidden_MH: Tensor,
    head: Tensor | Fp8Head,
    labels_M: Tensor,
    teacher: Tensor | TopK,
    *,
    share: float,
    temperature: float,
    chunk_slots: int,
    softcap: float | None = None,
    max_labelled: int | None = None,
) -> DistilledLosses:
    """Per-slot mixture of cross-entropy and divergence; neither head nor teacher gets a gradient. Precision as in ``linear_cross_entropy``.

    Args:
        hidden_MH: the drafter's hidden states after its final norm.
        head: the target's head [V, H], frozen. As an ``Fp8Head`` the logits are fp8 products; the gradient, which has two signs, is multiplied back
            in the head's own precision.
        labels_M: int64, negative where a slot has no label.
        teacher: the target's hidden states [M, H] after its final norm, of the positions before the labels, or its likeliest tokens there. Rows
            without a label may hold anything, ids of tokens apart.
        share: of the divergence in the loss, 0 to 1.
        temperature: above 0.
        chunk_slots: most rows of each of the two kinds of logits alive at a time.
        softcap: the target's final logit softcap, if it has one; both logits get it.
        max_labelled: as in ``linear_cross_entropy``: shapes are fixed with it, and nothing waits for the device.
    Raises:
        ValueError: shapes that do not fit together, or a chunk or bound below 1.
    """
    weight_VH = head.weight_VH if isinstance(head, Fp8Head) else head
    M, H = len(labels_M), weight_VH.shape[1]
    given = tuple(teacher) if isinstance(teacher, TopK) else (teacher,)
    fits = all(values.ndim == 2 and len(values) == M for values in given) and (len(given) == 2 or given[0].shape[1] == H)
    if hidden_MH.shape != (M, H) or labels_M.ndim != 1 or not fits:
        found = [list(tensor.shape) for tensor in (hidden_MH, weight_VH, labels_M, *given)]
        expected = "hidden [M, H], weight [V, H], labels [M] and teacher [M, H], or two of [M, K]"
        raise ValueError(f"expected {expected}, found {', '.join(map(str, found))}")
    if chunk_slots < 1 or (max_labelled is not None and max_labelled < 1):
        raise ValueError(f"chunk_slots and max_labelled must be at least 1, found {chunk_slots} and {max_labelled}")
    want_gradient = hidden_MH.requires_grad and torch.is_grad_enabled()
    slots = labelled_slots(labels_M, max_labelled)
    with torch.autocast(hidden_MH.device.type, enabled=False):
        return DistilledLosses(
            *_DistilledCrossEntropy.apply(
                hidden_MH, weight_VH.detach() if head is weight_VH else head, labels_M, given, slots,
                (share, temperature, softcap), chunk_slots, want_gradient,
            )
        )  # fmt: skip


class _DistilledCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MH: Tensor,
        head: Tensor | Fp8Head,
        labels_M: Tensor,
        teacher: tuple[Tensor, ...],
        slots_L: Tensor | None,
        mixture: tuple[float, float, float | None],
        chunk_slots: int,
        want_gradient: bool,
    ) -> tuple[Tensor, ...]:
        products = HeadProducts(hidden_MH, head)
        weight_VH, dtype, statistics = products.weight_VH, products.dtype, products.statistics
        labels_L = labels_M if slots_L is None else labels_M[slots_L]
        slots = len(labels_L)
        nll_L, divergence_L = (torch.empty_like(labels_L, dtype=statistics) for _ in range(2))
        rows_L = Rows(nll_L, torch.empty_like(labels_L, dtype=torch.bool), divergence_L)
        gradient_LH = hidden_MH.new_empty((slots if want_gradient else 0, hidden_MH.shape[1]), dtype=dtype)
        sources = (hidden_MH, *teacher[:1]) if len(teacher) == 1 else (hidden_MH,)
        buffers = [weight_VH.new_empty((min(chunk_slots, slots), weight_VH.shape[0])) for _ in sources]
        for start in range(0, slots, chunk_slots):
            chunk = slice(start, start + chunk_slots)
            chosen = chunk if slots_L is None else slots_L[chunk]
            logits = [buffer_CV[: len(labels_L[chunk])] for buffer_CV in buffers]
            for out_CV, states_MH in zip(logits, sources, strict=True):
                products.logits(states_MH[chosen], out=out_CV)
            if len(teacher) == 1:
                mixture_(logits[0], logits[1], labels_L[chunk], rows_L.part(chunk), *mixture, want_gradient)
            else:
                likeliest = TopK(*(values[chosen] for values in teacher))
                _mix_likeliest_(logits[0], likeliest, labels_L[chunk], rows_L.part(chunk), *mixture, want_gradient)
            if want_gradient:
                torch.mm(logits[0], weight_VH, out=gradient_LH[chunk])
        ctx.save_for_backward(slots_L, labels_L, gradient_LH)
        ctx.hidden_shape, ctx.hidden_dtype = hidden_MH.shape, hidden_MH.dtype
        labelled_M = labels_M >= 0
        nll_M, hit_M, divergence_M = rows_L
        if slots_L is not None:  # a labelled slot beyond the bound keeps NaN, so that it cannot go unnoticed
            unknown_M = torch.zeros_like(labels_M, dtype=statistics).masked_fill_(labelled_M, torch.nan)
            nll_M, divergence_M = unknown_M.index_copy(0, slots_L, nll_L), unknown_M.index_copy(0, slots_L, divergence_L)
            hit_M = torch.zeros_like(labelled_M).index_copy_(0, slots_L, rows_L.hit)
        share, temperature, _ = mixture
        loss_M = (1 - share) * nll_M + share * temperature**2 * divergence_M
        probability_M = torch.exp(-nll_M).masked_fill_(~labelled_M, 0.0)
        ctx.mark_non_differentiable(nll_M, probability_M, hit_M, divergence_M)
        return loss_M, nll_M, probability_M, hit_M, divergence_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss_M: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        slots_L, labels_L, gradient_LH = ctx.saved_tensors
        grad_loss_L = grad_loss_M if slots_L is None else grad_loss_M[slots_L]
        scaled_LH = torch.empty_like(gradient_LH, dtype=ctx.hidden_dtype)
        torch.mul(gradient_LH, grad_loss_L[:, None], out=scaled_LH)  # in float32, rounded once
        scaled_LH.masked_fill_((labels_L < 0)[:, None], 0.0)  # with a bound, rows of slots without a label are there and may hold anything
        grad_hidden_MH = scaled_LH if slots_L is None else scaled_LH.new_zeros(ctx.hidden_shape).index_copy_(0, slots_L, scaled_LH)
        return grad_hidden_MH, None, None, None, None, None, None, None


def _mix_likeliest_(
    logits_CV: Tensor, teacher: TopK, labels_C: Tensor, result: Rows,
    share: float, temperature: float, softcap: float | None, want_gradient: bool,
) -> None:  # fmt: skip
    """``mixture_`` with the likeliest tokens: the pass over the row leaves them out, and their part is added at their places."""
    ids_CK = teacher.ids.long()
    drafter_CK = logits_CV.gather(1, ids_CK).to(result.nll.dtype)
    if softcap is not None:
        drafter_CK = softcap * torch.tanh(drafter_CK / softcap)
    target_CK = (teacher.logprobs.to(drafter_CK.dtype) / temperature).log_softmax(1)
    mixture_(logits_CV, None, labels_C, result, share, temperature, softcap, want_gradient)
    log_sum_C = result.divergence.clone()
    divergence_C = (target_CK.exp() * (target_CK - drafter_CK / temperature + log_sum_C[:, None])).sum(1)
    result.divergence.copy_(divergence_C.masked_fill_(labels_C < 0, 0.0))
    if want_gradient:
        slope_CK = 1 - (drafter_CK / softcap).square() if softcap is not None else 1.0
        logits_CV.scatter_add_(1, ids_CK, (-share * temperature * target_CK.exp() * slope_CK).to(logits_CV.dtype))


def mixture_(
    logits_CV: Tensor, teacher_CV: Tensor | None, labels_C: Tensor, result: Rows,
    share: float, temperature: float, softcap: float | None, want_gradient: bool,
) -> None:  # fmt: skip
    """Loss, hit and divergence of each row; the drafter's logits are overwritten with the gradient of the mixture (or with scratch).

    Args:
        logits_CV, teacher_CV: logits before the softcap, of one float dtype; the teacher's may be overwritten too. Without a teacher the gradient
            lacks its part, and the divergence is the log-sum-exp of the drafter's logits at the temperature.
        labels_C: int64; rows with a negative label get 0 and no hit, and may hold anything afterwards.
        result: is written.
    """
    arguments = (logits_CV, teacher_CV, labels_C, result, share, temperature, softcap, want_gradient)
    if logits_CV.is_cuda:
        from dflash_core.objective.distillation_kernel import mixture_triton_  # Triton is not there on every platform

        mixture_triton_(*arguments)
    else:
        _mixture_torch_(*arguments)


def _mixture_torch_(
    logits_CV: Tensor, teacher_CV: Tensor | None, labels_C: Tensor, result: Rows,
    share: float, temperature: float, softcap: float | None, want_gradient: bool,
) -> None:  # fmt: skip
    labelled_C, index_C1 = labels_C >= 0, labels_C.clamp(min=0)[:, None]
    for values_CV in (logits_CV, teacher_CV):
        if softcap is not None and values_CV is not None:
            values_CV.div_(softcap).tanh_().mul_(softcap)
    result.hit.copy_(labelled_C & (logits_CV.argmax(dim=1) == labels_C))
    log_CV = logits_CV.log_softmax(dim=1)
    result.nll.copy_(torch.where(labelled_C, -log_CV.gather(1, index_C1).squeeze(1), 0.0))
    warm_log_CV = log_CV if temperature == 1.0 else (logits_CV / temperature).log_softmax(dim=1)
    teacher_p_CV: Tensor | float = 0.0
    if teacher_CV is None:
        result.divergence.copy_((logits_CV / temperature).logsumexp(dim=1))
    else:
        teacher_log_CV = teacher_CV.div_(temperature).log_softmax(dim=1)
        teacher_p_CV = teacher_log_CV.exp()
        divergence_C = (teacher_p_CV * (teacher_log_CV - warm_log_CV)).sum(dim=1)
        result.divergence.copy_(torch.where(labelled_C, divergence_C, 0.0))
    if want_gradient:
        slope_CV = 1 - (logits_CV / softcap).square() if softcap is not None else 1.0
        hard_CV = log_CV.exp().scatter_add_(1, index_C1, log_CV.new_full(index_C1.shape, -1.0))
        logits_CV.copy_(((1 - share) * hard_CV + share * temperature * (warm_log_CV.exp() - teacher_p_CV)) * slope_CV)
