"""Plain twins of the fast paths: all logits at once, loops in place of scans. Slow, obvious, and what tests compare with."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_core.objective.cross_entropy import SlotLosses
from dflash_core.objective.distillation import DistilledLosses, TopK


def reference_linear_cross_entropy(hidden_MH: Tensor, weight_VH: Tensor, labels_M: Tensor, *, softcap: float | None = None) -> SlotLosses:
    """``linear_cross_entropy`` with [M, V] logits in memory, differentiable by autograd alone; float32 or float64."""
    dtype = torch.promote_types(torch.promote_types(hidden_MH.dtype, weight_VH.dtype), torch.float32)
    logits_MV = hidden_MH.to(dtype) @ weight_VH.to(dtype).T
    if softcap is not None:
        logits_MV = softcap * torch.tanh(logits_MV / softcap)
    nll_M = torch.nn.functional.cross_entropy(logits_MV, labels_M, reduction="none")  # 0 for the label -100
    labelled_M = labels_M >= 0
    probability_M = torch.where(labelled_M, torch.exp(-nll_M.detach()), 0.0)
    return SlotLosses(nll_M, probability_M, labelled_M & (logits_MV.argmax(1) == labels_M))


def reference_dpace_weights(probability_S: Tensor, labels_S: Tensor, alpha: float) -> Tensor:
    """``dpace_weights`` of one block, by the formula."""
    weights = torch.zeros(len(labels_S))
    labelled = [k for k in range(len(labels_S)) if labels_S[k] >= 0]
    for j in labelled:
        for m in (slot for slot in labelled if slot >= j):
            reach = 1.0
            for i in (slot for slot in labelled if slot <= m):
                reach *= (1 - alpha) * float(probability_S[i]) + alpha
            weights[j] += reach
    return weights


def reference_distilled_cross_entropy(
    hidden_MH: Tensor, weight_VH: Tensor, labels_M: Tensor, teacher: Tensor | TopK, *, share: float, temperature: float, softcap: float | None = None
) -> DistilledLosses:
    """``distilled_cross_entropy`` with both [M, V] logits in memory, differentiable by autograd alone; float32 or float64."""
    hard = reference_linear_cross_entropy(hidden_MH, weight_VH, labels_M, softcap=softcap)
    dtype = hard.nll.dtype

    def logits(states: Tensor) -> Tensor:
        logits_MV = states.to(dtype) @ weight_VH.to(dtype).T
        return logits_MV if softcap is None else softcap * torch.tanh(logits_MV / softcap)

    if isinstance(teacher, TopK):
        nowhere_MV = torch.full((len(labels_M), len(weight_VH)), -torch.inf, dtype=dtype)
        target_MV = nowhere_MV.scatter(1, teacher.ids.long(), teacher.logprobs.to(dtype))
    else:
        target_MV = logits(teacher)
    warm, target = (logits(hidden_MH) / temperature).log_softmax(1), (target_MV / temperature).softmax(1)
    divergence_M = torch.nn.functional.kl_div(warm, target, reduction="none").sum(1) * (labels_M >= 0)
    return DistilledLosses((1 - share) * hard.nll + share * temperature**2 * divergence_M, hard.nll, hard.probability, hard.hit, divergence_M)
