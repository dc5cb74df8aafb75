"""From bfloat16 to fp8 and back through a product.

A cast divides by one scale for the whole tensor, its largest magnitude over the largest number of the format, so nothing overflows (beyond 448 e4m3
has only NaN). The scale lies on the device and is found anew at every cast: there is no history to keep or to resume. Both formats have exponents
enough for that: e4m3 reaches down to a 230,000th of the largest magnitude, e5m2 to a 3,700,000,000th, which is why gradients are cast to it.

Products want both operands contiguous along the axis they sum over, and the backward pass sums over other axes than the forward pass, so a cast
also yields the transpose. On CUDA that is one kernel; the CPU has a plain twin, for tests.

Shapes: M, N, K rows and columns of products; R, C of what is cast.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Cast(NamedTuple):
    """``values * scale`` is about what was cast: values [R, C], their transpose [C, R] (both contiguous), scale [] float32."""

    values: Tensor
    transposed: Tensor
    scale: Tensor


def cast(x_RC: Tensor, dtype: torch.dtype) -> Cast:
    """To ``dtype`` (``E4M3`` or ``E5M2``) with the scale of the largest magnitude. NaN and infinity become NaN."""
    return Cast(*_cast(x_RC, dtype == E5M2))


def product(a_MK: Tensor, a_scale: Tensor, b_NK: Tensor, b_scale: Tensor, *, exact: bool, out: Tensor | None = None) -> Tensor:
    """``(a * a_scale) @ (b * b_scale).T`` in bfloat16.

    exact: accumulate in float32 throughout. Without it the tensor cores add up in fewer bits, which is good enough for activations, and a few per
        cent faster.
    """
    if not a_MK.is_cuda:
        result = (a_MK.float() @ b_NK.float().T * (a_scale * b_scale)).bfloat16()
        return result if out is None else out.copy_(result)
    options: dict[str, Any] = {"scale_a": a_scale, "scale_b": b_scale, "out_dtype": torch.bfloat16, "use_fast_accum": not exact}
    if out is None:
        return torch._scaled_mm(a_MK, b_NK.T, **options)
    return torch._scaled_mm(a_MK, b_NK.T, **options, out=out)


@torch.library.custom_op("dflash::fp8_cast", mutates_args=())
def _cast(x: Tensor, gradient: bool) -> tuple[Tensor, Tensor, Tensor]:
    dtype = E5M2 if gradient else E4M3
    if x.is_cuda:
        from dflash_core.fp8.cast_kernel import cast_triton  # Triton is not there on every platform

        return cast_triton(x, dtype)
    return cast_torch(x, dtype)


@_cast.register_fake
def _(x: Tensor, gradient: bool) -> tuple[Tensor, Tensor, Tensor]:
    R, C = x.shape
    dtype = E5M2 if gradient else E4M3
    return x.new_empty((R, C), dtype=dtype), x.new_empty((C, R), dtype=dtype), x.new_empty((), dtype=torch.float32)


def cast_torch(x_RC: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The plain twin of the kernel."""
    x_RC, largest = x_RC.float(), torch.finfo(dtype).max
    scale = x_RC.abs().amax().clamp(min=torch.finfo(torch.float32).tiny) / largest
    values = (x_RC / scale).clamp(-largest, largest).to(dtype)
    return values, values.T.contiguous(), scale
