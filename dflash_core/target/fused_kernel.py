"""Triton kernels for what a layer of the target does between its matrix products: RMSNorm, and the gate of its MLP.

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


def silu_product_triton(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, rounded after each, in the dtype of both."""
    gate, up = gate.contiguous(), up.contiguous()
    _silu_product_kernel[(-(-gate.numel() // ELEMENTS),)](gate, up, gate, gate.numel(), BLOCK=ELEMENTS, num_warps=8)
    return gate
