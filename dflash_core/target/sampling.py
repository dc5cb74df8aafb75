"""The next token of each row: the likeliest, or drawn with one number in [0, 1) a row by the inverse of the cumulative distribution.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_core.config import GenerationConfig


def pick_tokens(logits_RV: Tensor, settings: GenerationConfig, uniforms_R: Tensor) -> Tensor:
    """Next token ids [R]: the likeliest at temperature 0, else drawn with one uniform number in [0, 1) per row.

    Temperature first, then top_k, then top_p of what is left, as servers do it. Ties of greedy decoding go to the lowest id. Waits for no device.
    """
    if settings.temperature == 0.0:
        return logits_RV.argmax(-1)
    logits_RV = logits_RV.float() / settings.temperature
    ids_RV = None
    if 0 < settings.top_k < logits_RV.shape[-1]:
        logits_RV, ids_RV = logits_RV.topk(settings.top_k, dim=-1)
    elif settings.top_p < 1.0:
        logits_RV, ids_RV = logits_RV.sort(dim=-1, descending=True, stable=True)
    cumulative_RV = logits_RV.softmax(-1, dtype=torch.float64).cumsum(-1)
    # The nucleus is the shortest head of the sorted distribution that reaches top_p: it ends with the token that gets there.
    last_R1 = (cumulative_RV < settings.top_p).sum(-1, keepdim=True).clamp(max=logits_RV.shape[-1] - 1) if settings.top_p < 1.0 else None
    total_R1 = cumulative_RV[:, -1:] if last_R1 is None else cumulative_RV.gather(-1, last_R1)
    picked_R1 = torch.searchsorted(cumulative_RV, uniforms_R[:, None] * total_R1, right=True)
    picked_R1 = picked_R1.clamp(max=logits_RV.shape[-1] - 1) if last_R1 is None else torch.minimum(picked_R1, last_R1)
    return (picked_R1 if ids_RV is None else ids_RV.gather(-1, picked_R1)).squeeze(-1)
