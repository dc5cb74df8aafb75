"""Linear layers that read the same input, in fp8: the three products of each, forward and backward, with the input cast once for all of them.

    M rows   K inputs   N outputs

Activations and weights are e4m3, gradients e5m2. What is kept for the backward pass is the input's transpose in fp8, half of what bfloat16 keeps.
The products of the backward pass accumulate exactly: they sum over thousands of rows.
"""

from __future__ import annotations

from typing import Any
from typing import cast as as_type

import torch
from torch import Tensor

from dflash_core.fp8.cast import E4M3, E5M2, Cast, cast, product


def fp8_linears(x: Tensor, *weights_NK: Tensor) -> tuple[Tensor, ...]:
    """``x @ weight.T`` [..., N] for each weight [N, K]; ``x`` is [..., K] in bfloat16. Rows, K and each N are multiples of 16."""
    results = as_type("tuple[Tensor, ...]", _Linears.apply(x.flatten(0, -2), *weights_NK))
    return tuple(result.view(*x.shape[:-1], -1) for result in results)


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, *weights_NK: Tensor) -> tuple[Tensor, ...]:
        x = cast(x_MK, E4M3)
        weights = [cast(weight, E4M3) for weight in weights_NK]
        ctx.save_for_backward(x.transposed, x.scale, *(part for weight in weights for part in (weight.transposed, weight.scale)))
        return tuple(product(x.values, x.scale, weight.values, weight.scale, exact=False) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *gradients_MN: Tensor) -> tuple[Tensor, ...]:
        x_KM, x_scale, *saved = ctx.saved_tensors
        dx: Tensor | None = None
        dweights = []
        for i, gradient_MN in enumerate(gradients_MN):
            weight_KN, weight_scale = saved[2 * i], saved[2 * i + 1]
            gradient: Cast = cast(gradient_MN, E5M2)
            share = product(gradient.values, gradient.scale, weight_KN, weight_scale, exact=True)
            dx = share if dx is None else dx + share
            dweights.append(product(gradient.transposed, gradient.scale, x_KM, x_scale, exact=True))
        return as_type(Tensor, dx), *dweights
