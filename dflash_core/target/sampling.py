"""The next token of each row: the likeliest, or drawn with one number in [0, 1) a row by the inverse of the cumulative distribution.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_core.config import GenerationConfig
from dflash_core.target.device import on_device

_LOG2_E = 1.4426950408889634


def pick_tokens(logits_RV: Tensor, settings: GenerationConfig, uniforms_R: Tensor) -> Tensor:
    """Next token ids [R]: the likeliest at temperature 0, else drawn with one uniform number (float64) in [0, 1) per row.

    Temperature first, then top_k, then top_p of what is left, as servers do it: the nucleus is the shortest head of the tokens by falling probability
    that reaches top_p. What is kept is summed in the order of ids. Ties go to the lowest id. Waits for no device.
    """
    if settings.temperature == 0.0:
        return logits_RV.argmax(-1)
    draw = launch_draw if logits_RV.is_cuda else draw_plain
    return draw(logits_RV, settings, uniforms_R)


def draw_plain(logits_RV: Tensor, settings: GenerationConfig, uniforms_R: Tensor) -> Tensor:
    """``pick_tokens`` above temperature 0, in plain PyTorch."""
    probability_RV = (logits_RV.double() / settings.temperature).softmax(-1)
    restricted = 0 < settings.top_k < logits_RV.shape[-1] or settings.top_p < 1.0
    if restricted:
        sorted_RV, ids_RV = probability_RV.sort(dim=-1, descending=True, stable=True)
        if settings.top_k > 0:
            sorted_RV[:, settings.top_k :] = 0.0
        before_RV = sorted_RV.cumsum(-1) - sorted_RV
        if settings.top_p < 1.0:
            sorted_RV = sorted_RV * (before_RV < settings.top_p * sorted_RV.sum(-1, keepdim=True))
        probability_RV = torch.zeros_like(probability_RV).scatter_(-1, ids_RV, sorted_RV)
    cumulative_RV = probability_RV.cumsum(-1)
    picked_R1 = torch.searchsorted(cumulative_RV, uniforms_R[:, None] * cumulative_RV[:, -1:], right=True)
    last_R1 = torch.searchsorted(cumulative_RV, cumulative_RV[:, -1:].contiguous())  # of those that are possible
    return torch.minimum(picked_R1, last_R1).squeeze(-1)


def launch_draw(logits_RV: Tensor, settings: GenerationConfig, uniforms_R: Tensor) -> Tensor:
    """``pick_tokens`` above temperature 0, by the kernel."""
    import triton

    from dflash_core.target.sampling_kernel import draw_kernel

    logits_RV = logits_RV if logits_RV.stride(-1) == 1 else logits_RV.contiguous()
    rows, vocabulary = logits_RV.shape
    picked_R = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    with on_device(logits_RV.device):
        draw_kernel[(rows,)](
            logits_RV, uniforms_R.contiguous(), picked_R, logits_RV.stride(0), vocabulary, _LOG2_E / settings.temperature,
            settings.top_k, settings.top_p, TOP_K=0 < settings.top_k < vocabulary, TOP_P=settings.top_p < 1.0,
            SHIFT=16 if logits_RV.dtype == torch.bfloat16 else 0,
            BLOCK=min(2048, triton.next_power_of_2(vocabulary)), num_warps=8,
        )  # fmt: skip
    return picked_R
