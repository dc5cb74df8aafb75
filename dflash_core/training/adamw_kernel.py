"""The update on CUDA as two Triton kernels: the norm of the gradients, and AdamW with fp32 masters and moments. Each number moves once.

The first reads the gradients. The second reads gradient, master and moments and writes master and moments: 26 bytes an element with gradients
and weights in bf16, which are one half of the masters (``optimizer.halves``). What depends on the step (gradient scale, learning rate, number of
updates) is read on the device, so nothing waits for it.

Runs on CUDA, and on the CPU in Triton's interpreter (``TRITON_INTERPRET=1``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # of 1024 to 4096 the quickest on an H200 (benchmarks/RESULTS.md)
NORM_BLOCK = 8192


@triton.jit
def _square_sum_kernel(gradient_ptr, partial_ptr, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gradient = tl.load(gradient_ptr + place, mask=place < size, other=0.0).to(tl.float32)
    tl.store(partial_ptr + tl.program_id(0), tl.sum(gradient * gradient, 0))


@triton.jit
def _adamw_kernel(  # type: ignore[no-untyped-def]
    weight_ptr,
    low_ptr,
    gradient_ptr,
    first_ptr,
    second_ptr,
    scale_ptr,
    rate_ptr,
    updates_ptr,
    size,
    beta1,
    beta2,
    eps,
    decay,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    scale = tl.load(scale_ptr)
    if scale * 0 == 0:
        rate = tl.load(rate_ptr)
        updates = tl.load(updates_ptr)
        correction1 = 1 - tl.exp(updates * tl.log(beta1))
        correction2 = 1 - tl.exp(updates * tl.log(beta2))
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = place < size
        gradient = tl.load(gradient_ptr + place, mask=inside, other=0.0).to(tl.float32) * scale
        weight = tl.load(weight_ptr + place, mask=inside, other=0)
        if SPLIT:  # as ``optimizer.joined``
            low = tl.load(low_ptr + place, mask=inside, other=0)
            master = (((weight + (low >> 15)).to(tl.int32) << 16) | (low.to(tl.int32) & 0xFFFF)).to(tl.float32, bitcast=True)
        else:
            master = weight
        first = tl.load(first_ptr + place, mask=inside, other=0.0)
        second = tl.load(second_ptr + place, mask=inside, other=0.0)
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient * gradient
        step = (first / correction1) / (tl.sqrt(second / correction2) + eps)
        master = master * (1 - rate * decay) - rate * step
        tl.store(first_ptr + place, first, mask=inside)
        tl.store(second_ptr + place, second, mask=inside)
        if SPLIT:  # as ``optimizer.halves``
            bits = tl.where(master == master, master.to(tl.int32, bitcast=True), 0x7FC00000)
            low = bits.to(tl.int16)
            tl.store(low_ptr + place, low, mask=inside)
            tl.store(weight_ptr + place, (bits >> 16).to(tl.int16) - (low >> 15), mask=inside)
        else:
            tl.store(weight_ptr + place, master, mask=inside)


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Norm of all elements together, float32 scalar; the same bits for the same gradients. Contiguous tensors of any float dtype."""
    blocks = [triton.cdiv(gradient.numel(), NORM_BLOCK) for gradient in gradients]
    partial = torch.empty(sum(blocks), device=gradients[0].device)
    for gradient, count, part in zip(gradients, blocks, partial.split(blocks), strict=True):
        _square_sum_kernel[(count,)](gradient, part, gradient.numel(), BLOCK=NORM_BLOCK, num_warps=4)
    return partial.sum().sqrt()


def adamw_(
    weight: Tensor,
    low: Tensor | None,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    scale: Tensor,
    learning_rate: Tensor,
    updates: Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One AdamW step in place; all tensors contiguous and of one size.

    Args:
        weight: float32, or with ``low`` bfloat16: the rounded half of the masters.
        low: int16, the other half of the masters.
        gradient: any float dtype.
        first, second: float32.
        scale: float32 scalar that the gradient is multiplied with; not finite: nothing changes.
        learning_rate: float32 scalar.
        updates: float32 scalar, the number of updates including this one.
    """
    size, bits = first.numel(), weight if low is None else weight.view(torch.int16)
    _adamw_kernel[(triton.cdiv(size, BLOCK),)](
        bits, low, gradient, first, second, scale, learning_rate, updates, size, *betas, eps, weight_decay,
        SPLIT=low is not None, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
