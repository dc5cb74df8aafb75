"""Triton kernels for what a layer of the target does between its matrix products: RMSNorm, rotary positions, and the gate of its MLP.

Written out in PyTorch they move each number a dozen times, a quarter of a layer's time on a GPU. They round where Transformers rounds, so
features are those that the target is served with. Twins: the modules of the target themselves (``fused.py``).
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 4096  # that one program works on at a time


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, rows, width, eps, offset,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, ROUND_FIRST: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, WIDTH)
    inside = (r[:, None] < rows) & (c[None, :] < width)
    place = r[:, None] * width + c[None, :]
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + c, mask=c < width, other=0.0).to(tl.float32) + offset
    x = x * tl.rsqrt(tl.sum(x * x, 1) / width + eps)[:, None]
    if ROUND_FIRST:
        x = x.to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + place, (x * weight[None, :]).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _norm_rope_kernel(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, rows, heads, stride, eps, offset,
    ROWS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, ROUND_FIRST: tl.constexpr,
):  # fmt: skip
    dtype = x_ptr.dtype.element_ty
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (r < rows)[:, None]
    c = tl.arange(0, HALF)
    low = (r // heads * stride + r % heads * (2 * HALF))[:, None] + c[None, :]
    angle = (r // heads)[:, None] * (2 * HALF) + c[None, :]
    x = tl.load(x_ptr + low, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(x_ptr + low + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / (2 * HALF) + eps)[:, None]
        x, y = x * scale, y * scale
        if ROUND_FIRST:
            x, y = x.to(dtype).to(tl.float32), y.to(dtype).to(tl.float32)
        x = (x * (tl.load(weight_ptr + c).to(tl.float32) + offset)[None, :]).to(dtype).to(tl.float32)
        y = (y * (tl.load(weight_ptr + HALF + c).to(tl.float32) + offset)[None, :]).to(dtype).to(tl.float32)
    cos_x = tl.load(cos_ptr + angle, mask=inside, other=0.0).to(tl.float32)
    cos_y = tl.load(cos_ptr + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    sin_x = tl.load(sin_ptr + angle, mask=inside, other=0.0).to(tl.float32)
    sin_y = tl.load(sin_ptr + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    turned_x = (x * cos_x).to(dtype).to(tl.float32) - (y * sin_x).to(dtype).to(tl.float32)
    turned_y = (y * cos_y).to(dtype).to(tl.float32) + (x * sin_y).to(dtype).to(tl.float32)
    tl.store(x_ptr + low, turned_x.to(dtype), mask=inside)
    tl.store(x_ptr + low + HALF, turned_y.to(dtype), mask=inside)


@triton.jit
def _silu_product_kernel(gate_ptr, up_ptr, out_ptr, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + place, mask=place < size, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + place, mask=place < size, other=0.0).to(tl.float32)
    gate = (gate / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + place, (gate * up).to(out_ptr.dtype.element_ty), mask=place < size)


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float, *, offset: float, round_first: bool) -> Tensor:
    """x / rms(x) · (weight + offset) over the last axis, in the dtype of ``x``; ``round_first``: the quotient is rounded to it before the product."""
    x = x.contiguous()
    width = x.shape[-1]
    rows, block = x.numel() // width, triton.next_power_of_2(width)
    rows_each = max(1, ELEMENTS // block)
    out = torch.empty_like(x)
    _rms_norm_kernel[(-(-rows // rows_each),)](
        x, weight, out, rows, width, eps, offset, ROWS=rows_each, WIDTH=block, ROUND_FIRST=round_first, num_warps=8
    )  # fmt: skip
    return out


def norm_rope_triton_(
    x_TND: Tensor, cos_TD: Tensor, sin_TD: Tensor, weight: Tensor | None, eps: float = 0.0, *, offset: float = 0.0, round_first: bool = True
) -> Tensor:
    """Turn heads [T, N, D] by the angles of their tokens, in place, after an RMSNorm over D as ``rms_norm_triton`` does it if there is a weight.

    The heads of a token lie side by side; tokens may lie further apart.
    """
    tokens, heads, size = x_TND.shape
    rows, rows_each = tokens * heads, max(1, ELEMENTS // size)
    _norm_rope_kernel[(-(-rows // rows_each),)](
        x_TND, cos_TD if weight is None else weight, cos_TD, sin_TD, rows, heads, x_TND.stride(0), eps, offset,
        ROWS=rows_each, HALF=size // 2, NORM=weight is not None, ROUND_FIRST=round_first, num_warps=4,
    )  # fmt: skip
    return x_TND


def silu_product_triton(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, rounded after each, in the dtype of both."""
    gate, up = gate.contiguous(), up.contiguous()
    _silu_product_kernel[(-(-gate.numel() // ELEMENTS),)](gate, up, gate, gate.numel(), BLOCK=ELEMENTS, num_warps=8)
    return gate
