"""Triton kernels that cast a matrix to fp8: one finds the largest magnitude, the other casts and writes the transpose with it.

Two reads and two writes of half the size; the scale never leaves the device. Twin: ``cast.cast_torch``.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, NUM_WARPS = 64, 128, 4  # measured: tiles from 64 x 64 to 128 x 128 are equally fast
SPAN = 16_384  # elements that one program looks through for the largest magnitude


@triton.jit
def _largest_kernel(x_ptr, bits_ptr, columns, stride, count, SPAN: tl.constexpr, PIECE: tl.constexpr, DENSE: tl.constexpr):
    largest = tl.zeros([PIECE], tl.float32)
    for piece in range(0, SPAN, PIECE):
        i = tl.program_id(0).to(tl.int64) * SPAN + piece + tl.arange(0, PIECE)
        pointers = x_ptr + i if DENSE else x_ptr + i // columns * stride + i % columns
        x = tl.load(pointers, mask=i < count, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x), propagate_nan=tl.PropagateNan.ALL)
    # the bits of numbers that are not negative are ordered as they are, with infinity and NaN at the end
    tl.atomic_max(bits_ptr, tl.max(largest.to(tl.int32, bitcast=True), 0), sem="relaxed")


@triton.jit
def _cast_kernel(
    x_ptr, largest_ptr, out_ptr, transposed_ptr, scale_ptr, rows, columns, stride, limit, tiny,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (r[:, None] < rows) & (c[None, :] < columns)
    pointers = x_ptr + r[:, None] * stride + c[None, :]
    x = tl.load(pointers) if EVEN else tl.load(pointers, mask=inside, other=0.0)
    scale = tl.maximum(tl.load(largest_ptr), tiny, propagate_nan=tl.PropagateNan.ALL) / limit
    x = tl.clamp(x.to(tl.float32) / scale, -limit, limit, propagate_nan=tl.PropagateNan.ALL).to(out_ptr.dtype.element_ty)
    if EVEN:
        tl.store(out_ptr + r[:, None] * columns + c[None, :], x)
        tl.store(transposed_ptr + c[:, None] * rows + r[None, :], tl.trans(x))
    else:
        tl.store(out_ptr + r[:, None] * columns + c[None, :], x, mask=inside)
        tl.store(transposed_ptr + c[:, None] * rows + r[None, :], tl.trans(x), mask=tl.trans(inside))
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_ptr, scale)


def cast_triton(x_RC: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Values [R, C], transpose [C, R] and scale []; rows of ``x_RC`` are contiguous, or it is copied."""
    x_RC = x_RC if x_RC.stride(1) == 1 else x_RC.contiguous()
    R, C = x_RC.shape
    largest = torch.zeros((), dtype=torch.float32, device=x_RC.device)
    scale = torch.empty_like(largest)
    out_RC, out_CR = (torch.empty(shape, dtype=dtype, device=x_RC.device) for shape in ((R, C), (C, R)))
    _largest_kernel[(-(-x_RC.numel() // SPAN),)](
        x_RC, largest.view(torch.int32), C, x_RC.stride(0), x_RC.numel(), SPAN=SPAN, PIECE=4096, DENSE=x_RC.stride(0) == C, num_warps=8
    )  # fmt: skip
    _cast_kernel[(-(-R // ROWS), -(-C // COLUMNS))](
        x_RC, largest, out_RC, out_CR, scale, R, C, x_RC.stride(0), torch.finfo(dtype).max, torch.finfo(torch.float32).tiny,
        ROWS=ROWS, COLUMNS=COLUMNS, EVEN=R % ROWS == 0 and C % COLUMNS == 0, num_warps=NUM_WARPS,
    )  # fmt: skip
    return out_RC, out_CR, scale
