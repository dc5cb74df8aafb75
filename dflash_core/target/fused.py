"""Modules of a target whose kernels are fused: found by what they compute, not by what a family calls them.

    fast = fused(module)      # a module that gives the same, or None

A norm or an MLP is only replaced if the fused one gives what it gives, on random input, as near as rounding goes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn


class FusedRMSNorm(nn.Module):
    """RMSNorm in one kernel, with the weight of ``norm``."""

    def __init__(self, norm: Any, offset: float, round_first: bool) -> None:
        super().__init__()
        self.weight = norm.weight
        self.eps = float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)
        self.offset, self.round_first = offset, round_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from dflash_core.target.fused_kernel import rms_norm_triton  # Triton is not there on every platform

        return rms_norm_triton(x, self.weight, self.eps, offset=self.offset, round_first=self.round_first)


class FusedGatedMLP(nn.Module):
    """down(silu(gate(x)) · up(x)) with the gate in one kernel, and the linear layers of ``mlp``."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from dflash_core.target.fused_kernel import silu_product_triton

        return self.down_proj(silu_product_triton(self.gate_proj(x), self.up_proj(x)))


def fused(module: nn.Module) -> nn.Module | None:
    """A fused module that gives what ``module`` gives; None where there is none, or it is not on CUDA, or others have hooks on it."""
    weight = next(module.parameters(), None)
    if weight is None or not weight.is_cuda or find_spec("triton") is None or module._forward_hooks or module._forward_pre_hooks:
        return None
    return fused_norm(module) or fused_mlp(module)


def fused_norm(module: nn.Module) -> nn.Module | None:
    """As ``fused``, of an RMSNorm: with the weight or one more, rounded before the product (Llama) or after it (Gemma, gpt-oss)."""
    if "RMSNorm" not in type(module).__name__ or set(dict(module.named_parameters())) != {"weight"}:
        return None
    candidates = [FusedRMSNorm(module, offset, round_first) for offset, round_first in ((0.0, True), (0.0, False), (1.0, False))]
    return _closest(module, candidates, candidates[0].weight.shape[-1])


def fused_mlp(module: nn.Module) -> nn.Module | None:
    """As ``fused``, of an MLP with a SiLU gate."""
    parts = dict(module.named_children())
    if not {"gate_proj", "up_proj", "down_proj"} <= set(parts) or not all(isinstance(parts[name], nn.Linear) for name in ("gate_proj", "up_proj")):
        return None
    return _closest(module, [FusedGatedMLP(module)], parts["gate_proj"].in_features)  # type: ignore[arg-type]


@torch.no_grad()
def _closest(module: nn.Module, candidates: Sequence[nn.Module], width: int) -> nn.Module | None:
    """The candidate that comes nearest to ``module``, if that is as near as rounding goes."""
    weight = next(module.parameters())
    x = torch.randn(64, width, generator=torch.Generator(weight.device).manual_seed(0), device=weight.device).to(weight.dtype)
    wanted, results = module(x), [candidate(x) for candidate in candidates]
    step = 4 * torch.finfo(wanted.dtype).eps
    near = [found.dtype == wanted.dtype and torch.allclose(found, wanted, rtol=step, atol=step * float(wanted.abs().max())) for found in results]
    apart = [float((found.float() - wanted.float()).abs().mean()) if fits else math.inf for found, fits in zip(results, near, strict=True)]
    return candidates[apart.index(min(apart))] if any(near) else None
