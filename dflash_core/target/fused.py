"""Modules of a target whose kernels are fused: found by what they compute, not by what a family calls them.

    fast = fused(module)      # a module that gives the same, or None

A norm or an MLP is only replaced if the fused one gives what it gives, on random input, as near as rounding goes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from dflash_core.target.attention import Documents, packed_attention
from dflash_core.target.device import on_device

_JOINT = "_joint_projections"

logger = logging.getLogger(__name__)


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


class FusedAttention(nn.Module):
    """Packed attention with norms and rotary positions of queries and keys in one kernel each, and the linear layers of ``attention``.

    ``options`` are what ``attention`` itself tells its attention function: scale, window, cap and sinks.
    """

    def __init__(self, attention: Any, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
        self.q_norm, self.k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self.head_dim, self.options = attention.head_dim, options
        self.joint: tuple[torch.Tensor, torch.Tensor | None] | None = getattr(attention, _JOINT, None)

    def forward(
        self, hidden_states: torch.Tensor, *, position_embeddings: tuple[torch.Tensor, torch.Tensor], documents: Documents, **_: Any
    ) -> tuple[torch.Tensor, None]:
        cos_TD, sin_TD = (angles[0].contiguous() for angles in position_embeddings)
        projections = self.q_proj, self.k_proj, self.v_proj
        if self.joint is None:
            parts = [projection(hidden_states)[0] for projection in projections]
        else:
            parts = functional.linear(hidden_states, *self.joint)[0].split([projection.out_features for projection in projections], dim=-1)
        q_TND, k_TND, v_TND = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        self._turn(q_TND, cos_TD, sin_TD, self.q_norm)
        self._turn(k_TND, cos_TD, sin_TD, self.k_norm)
        q, k, v = (x_TND.transpose(0, 1)[None] for x_TND in (q_TND, k_TND, v_TND))
        output = packed_attention(self, q, k, v, None, documents=documents, **self.options)[0]
        return self.o_proj(output.flatten(2)), None

    @staticmethod
    def _turn(x_TND: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor, norm: FusedRMSNorm | None) -> None:
        from dflash_core.target.fused_kernel import norm_rope_triton_

        if norm is None:
            norm_rope_triton_(x_TND, cos_TD, sin_TD, None)
        else:
            norm_rope_triton_(x_TND, cos_TD, sin_TD, norm.weight, norm.eps, offset=norm.offset, round_first=norm.round_first)


@torch.no_grad()
def join_projections(layers: nn.ModuleList) -> None:
    """Let the weights of queries, keys and values lie side by side in memory, so that one product can stand for three.

    They stay what they are to everybody else: views of the joint one. Done before anybody has taken their addresses, into a CUDA graph for instance.
    """
    for attention in (module for module in layers.modules() if hasattr(module, "q_proj")):
        parts = [getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj")]
        if not all(type(part) is nn.Linear and part.weight.dtype.itemsize > 1 for part in parts):  # a quantised one is of another class
            continue
        weight = _join([part.weight for part in parts])  # type: ignore[union-attr]
        biases = [part.bias for part in parts]  # type: ignore[union-attr]
        if all(bias is None for bias in biases):
            setattr(attention, _JOINT, (weight, None))
        elif all(bias is not None for bias in biases):
            setattr(attention, _JOINT, (weight, _join(biases)))


def _join(parameters: list[nn.Parameter]) -> torch.Tensor:
    joint = torch.cat(list(parameters))
    for parameter, part in zip(parameters, joint.split([len(parameter) for parameter in parameters]), strict=True):
        parameter.data = part
    return joint


def fused(module: nn.Module) -> nn.Module | None:
    """A fused module that gives what ``module`` gives; None where there is none, or it is not on CUDA, or others have hooks on it."""
    return _tried(lambda: fused_norm(module) or fused_mlp(module), module) if _fusible(module) else None


def with_fused_attention(module: nn.Module) -> nn.Module:
    """``module``, a copy that attends by ``packed_attention`` and whose norms are fused already, or in its place a fused one that gives the same."""
    return _tried(lambda: fused_attention(module), module) or module if _fusible(module) else module


def _tried(make: Callable[[], nn.Module | None], module: nn.Module) -> nn.Module | None:
    try:
        with on_device(next(module.parameters()).device):
            return make()
    except Exception as error:  # a compiler that cannot make the kernel: slower is better than not at all
        logger.warning("%s runs as it is, without a fused kernel: %s", type(module).__name__, str(error).partition("\n")[0])
        return None


def _fusible(module: nn.Module) -> bool:
    weight = next(module.parameters(), None)
    plain = weight is not None and weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16, torch.float32)  # and not quantised
    return plain and find_spec("triton") is not None and not module._forward_hooks and not module._forward_pre_hooks


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
def fused_attention(module: Any) -> nn.Module | None:
    """As ``with_fused_attention``; None where there is nothing to fuse: other parts, other rotary positions, heads of no power of two."""
    parts = dict(module.named_children())
    projections = {"q_proj", "k_proj", "v_proj", "o_proj"}
    if not projections <= set(parts) <= {*projections, "q_norm", "k_norm"} or ("q_norm" in parts) != ("k_norm" in parts):
        return None
    size = getattr(module, "head_dim", 0)
    if size < 16 or size & (size - 1) or not all(isinstance(parts[name], FusedRMSNorm) for name in parts.keys() - projections):
        return None
    weight = module.q_proj.weight
    generator = torch.Generator(weight.device).manual_seed(0)
    documents = Documents.of([torch.zeros(length, dtype=torch.int32) for length in (40, 3, 21)], weight.device)
    x = torch.randn(1, 64, module.q_proj.in_features, generator=generator, device=weight.device).to(weight.dtype)
    angles = 7 * torch.rand(1, 64, size // 2, generator=generator, device=weight.device).repeat(1, 1, 2)
    told: dict[str, Any] = {}
    arguments: dict[str, Any] = {"position_embeddings": (angles.cos().to(weight.dtype), angles.sin().to(weight.dtype)), "documents": documents}
    try:
        wanted, _ = module(hidden_states=x, attention_mask=None, told=told, **arguments)
    except (RuntimeError, TypeError):  # its rotary positions are of another shape
        return None
    candidate = FusedAttention(module, told)
    return candidate if _near(candidate(x, **arguments)[0], wanted) else None


@torch.no_grad()
def _closest(module: nn.Module, candidates: Sequence[nn.Module], width: int) -> nn.Module | None:
    """The candidate that comes nearest to ``module``, if that is as near as rounding goes."""
    weight = next(module.parameters())
    x = torch.randn(64, width, generator=torch.Generator(weight.device).manual_seed(0), device=weight.device).to(weight.dtype)
    wanted, results = module(x), [candidate(x) for candidate in candidates]
    near = [_near(found, wanted) for found in results]
    apart = [float((found.float() - wanted.float()).abs().mean()) if fits else math.inf for found, fits in zip(results, near, strict=True)]
    return candidates[apart.index(min(apart))] if any(near) else None


def _near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    step = 4 * torch.finfo(wanted.dtype).eps
    return found.dtype == wanted.dtype and torch.allclose(found, wanted, rtol=step, atol=step * float(wanted.abs().max()))
