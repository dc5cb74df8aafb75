"""AdamW over bf16 weights and gradients with fp32 masters and moments, one Triton launch a tensor: 28 bytes an element, once.

A candidate for the trainer, measured by ``benchmarks/step.py`` against torch's fused AdamW with copies around it. Learning rate, gradient scale
and the number of updates are read on the device, so nothing waits for it; a scale that is not finite leaves everything as it was.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _adamw_kernel(  # type: ignore[no-untyped-def]
    weight_ptr,
    gradient_ptr,
    master_ptr,
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
        master = tl.load(master_ptr + place, mask=inside, other=0.0)
        first = tl.load(first_ptr + place, mask=inside, other=0.0)
        second = tl.load(second_ptr + place, mask=inside, other=0.0)
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient * gradient
        step = (first / correction1) / (tl.sqrt(second / correction2) + eps)
        master = master * (1 - rate * decay) - rate * step
        tl.store(first_ptr + place, first, mask=inside)
        tl.store(second_ptr + place, second, mask=inside)
        tl.store(master_ptr + place, master, mask=inside)
        tl.store(weight_ptr + place, master.to(weight_ptr.dtype.element_ty), mask=inside)


def adamw_(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    masters: Sequence[Tensor],
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    *,
    scale: Tensor,
    learning_rate: Tensor,
    updates: Tensor,
    betas: tuple[float, float],
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> None:
    """One AdamW step in place; all tensors contiguous.

    Args:
        weights, gradients: the model's, any float dtype; weights receive the rounded masters.
        masters, first, second: float32.
        scale: float32 scalar that gradients are multiplied with; not finite: no step.
        learning_rate: float32 scalar.
        updates: float32 scalar, the number of updates including this one.
    """
    for weight, gradient, master, m, v in zip(weights, gradients, masters, first, second, strict=True):
        size = weight.numel()
        _adamw_kernel[(triton.cdiv(size, BLOCK),)](
            weight, gradient, master, m, v, scale, learning_rate, updates, size, *betas, eps, weight_decay, BLOCK=BLOCK, num_warps=4
        )  # fmt: skip
