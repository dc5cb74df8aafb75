"""AdamW with fp32 masters over the flat layout: torch's on the CPU, two Triton kernels on CUDA. Both clip, and neither waits for the device.

    P parameters (flat)

    optimizer.update(gradients, denominator, learning_rate) → norm of the averaged gradient

Gradients are of the *sum* of losses, and are averaged, clipped and applied in one go. A norm that is not finite changes nothing.

Where the Triton kernel updates bf16 weights, a master takes two bytes beside its weight instead of four: the weights are the upper halves of the
masters, rounded, and only the lower ones are kept beside them (``halves``). Together they are the fp32 masters to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from dflash_core.config import TrainingConfig
from dflash_core.training.flat import FlatLayout, Shard

NAN_BITS = 0x7FC00000  # the fp32 NaN whose upper half is one, and whose lower half is zero
Part = tuple[int, Tensor]
"""A contiguous piece of the gradient and where in the shard it starts."""


class Optimizer(Protocol):
    """What a replica needs of an optimiser; ``counters`` are float32 scalars, each the number of steps that changed the weights."""

    @property
    def counters(self) -> Sequence[Tensor]: ...

    def update(self, gradients: Sequence[Part], denominator: Tensor, learning_rate: Tensor) -> Tensor: ...


def halves(master: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 numbers rounded to the nearest bf16, ties away from zero, and the lower 16 bits of them as int16; both of the same shape.

    Rounded so, the highest of the lower bits says whether a number was rounded up, and ``joined`` gives it back exactly. Of a NaN it gives back
    one: rounded up, some of them (a GPU's own too) would be zeros, which nobody would notice in the weights.
    """
    bits = master.view(torch.int32).masked_fill(master.isnan(), NAN_BITS)
    low = (bits << 16 >> 16).to(torch.int16)  # in range, since what a cast does beyond it depends on the processor
    return ((bits >> 16).to(torch.int16) - (low >> 15)).view(torch.bfloat16), low


def joined(weight: Tensor, low: Tensor) -> Tensor:
    """The fp32 numbers whose ``halves`` these are, of the same shape."""
    return torch.stack([low, weight.view(torch.int16) + (low >> 15)], dim=-1).flatten(-2).view(torch.float32)


class Moments:
    """fp32 masters and two moments, [P] each, and the weights that the drafter computes with (the masters themselves, or rounded).

    Of a shard there are masters, moments and ``compute_P`` of that part alone; ``weights_P`` are all weights, and ``compute_P`` lies in them.
    Muon keeps no second moment of matrices: there ``exp_avg_sq_P`` is of the vectors alone.
    """

    def __init__(self, layout: FlatLayout, precision: torch.dtype, device: torch.device, *, shard: Shard, muon: bool = False, split: bool = False):
        """``split``: of bf16 weights keep the lower halves of the masters alone. ``kept_P`` is what is kept of them, or the weights themselves."""
        self._layout = layout
        self.split = split and precision == torch.bfloat16
        self.weights_P = torch.zeros(layout.size, dtype=precision, device=device)
        self.compute_P = self.weights_P[shard.slice]
        if precision == torch.float32:
            self.kept_P = self.compute_P
        else:
            self.kept_P = torch.zeros(shard.size, dtype=torch.int16 if self.split else torch.float32, device=device)
        self.exp_avg_P = torch.zeros(shard.size, device=device)
        self.exp_avg_sq_P = torch.zeros(shard.size - shard.num_decayed if muon else shard.size, device=device)

    @property
    def masters_P(self) -> Tensor:  # noqa: N802
        """The masters, where they are kept whole."""
        assert not self.split, "these masters are kept in halves"
        return self.kept_P

    @property
    def buffers(self) -> dict[str, Tensor]:
        """What a checkpoint is made of, and what all replicas must agree on."""
        masters = {"weights": self.compute_P, "lower halves of weights": self.kept_P} if self.split else {"weights": self.masters_P}
        return masters | {"first moment": self.exp_avg_P, "second moment": self.exp_avg_sq_P}

    def by_name(self, buffers: Sequence[Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """fp32 masters, first and second moment of each parameter, from whole ``buffers`` in their order, wherever they lie: views or copies."""
        *masters, first, second = (self._layout.views(buffer) for buffer in buffers)
        if self.split:
            weights, low = masters
            return {name: joined(weight, low[name]) for name, weight in weights.items()}, first, second
        return masters[0], first, second

    def parted(self, masters: Tensor) -> tuple[Tensor, Tensor]:
        """What these fp32 masters are in the weights, and what is kept of them; either may be ``masters`` itself."""
        return halves(masters) if self.split else (masters, masters)

    def refresh(self) -> None:
        """Round the masters into the weights, where they are kept whole."""
        if self.compute_P is not self.masters_P:
            self.compute_P.copy_(self.masters_P)


def splits_masters(training: TrainingConfig, kind: str) -> bool:
    """Whether a replica on a device of this kind, 'cpu' or 'cuda', keeps the masters of bf16 weights in halves."""
    return kind == "cuda" and training.optimizer == "adamw"


class TorchAdamW:
    """torch's fused AdamW over two flat parts, with decay and without; it takes its learning rate and whether to skip from tensors.

    The gradients are a buffer of fp32 that lives as long as the optimiser, and are scaled in place.
    """

    def __init__(
        self, shard: Shard, training: TrainingConfig, moments: Moments, gradients_P: Tensor, square_sum: Tensor | None = None
    ):  # fmt: skip
        """``square_sum``: of the whole summed gradient, float32 scalar, where this is a shard of it."""
        self._moments, self._max_norm, self._gradients_P, self._square_sum = moments, training.max_grad_norm, gradients_P, square_sum
        self._learning_rate = torch.zeros((), device=gradients_P.device)
        parts = [(slice(0, shard.num_decayed), training.weight_decay), (slice(shard.num_decayed, shard.size), 0.0)]
        parts = [(part, decay) for part, decay in parts if part.start < part.stop]
        groups = []
        for part, weight_decay in parts:
            parameter = nn.Parameter(moments.masters_P[part])
            parameter.grad = gradients_P[part]
            groups.append({"params": [parameter], "weight_decay": weight_decay})
        self._adamw = torch.optim.AdamW(groups, lr=self._learning_rate, betas=training.betas, fused=True)
        for group, (part, _) in zip(self._adamw.param_groups, parts, strict=True):
            self._adamw.state[group["params"][0]] = {
                "step": torch.zeros((), device=gradients_P.device),
                "exp_avg": moments.exp_avg_P[part],
                "exp_avg_sq": moments.exp_avg_sq_P[part],
            }

    @property
    def counters(self) -> Sequence[Tensor]:
        """One for each part."""
        return [state["step"] for state in self._adamw.state.values()]

    def update(self, gradients: Sequence[Part], denominator: Tensor, learning_rate: Tensor) -> Tensor:
        """See ``FusedAdamW.update``; the gradients are the buffer that the optimiser was made with."""
        norm = (torch.linalg.vector_norm(self._gradients_P) if self._square_sum is None else self._square_sum.sqrt()) / denominator
        self._gradients_P.mul_((self._max_norm / (norm + 1e-6)).clamp_max(1.0) / denominator)
        self._learning_rate.copy_(learning_rate)
        self._adamw.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
        self._adamw.step()
        self._moments.refresh()
        return norm


class FusedAdamW:
    """``adamw_kernel`` over whatever pieces the gradient comes in; of float32 weights, or of bf16 ones whose masters are kept in halves."""

    def __init__(self, shard: Shard, training: TrainingConfig, moments: Moments, square_sum: Tensor | None = None):
        """``square_sum``: of the whole summed gradient, float32 scalar, where this is a shard of it."""
        assert moments.split or moments.compute_P.dtype == torch.float32, "the kernel takes masters of bf16 weights in halves"
        self._shard, self._training, self._moments, self._square_sum = shard, training, moments, square_sum
        self._updates = torch.zeros((), device=moments.exp_avg_P.device)

    @property
    def counters(self) -> Sequence[Tensor]:
        """One for all."""
        return [self._updates]

    def update(self, gradients: Sequence[Part], denominator: Tensor, learning_rate: Tensor) -> Tensor:
        """Average, clip by the global norm, one AdamW step; the drafter's weights are up to date afterwards.

        Args:
            gradients:     every parameter once; a piece has decay entirely or not at all
            denominator:   float32 scalar > 0 that the gradients are divided by
            learning_rate: of this step, float32 scalar on the device

        Returns:
            The norm of the averaged gradient before clipping, float32 scalar on the device.
        """
        from dflash_core.training.adamw_kernel import adamw_, gradient_norm  # Triton is not there on every platform

        norm = (gradient_norm([gradient for _, gradient in gradients]) if self._square_sum is None else self._square_sum.sqrt()) / denominator
        finite = torch.isfinite(norm)
        scale = ((self._training.max_grad_norm / (norm + 1e-6)).clamp_max(1.0) / denominator).masked_fill_(~finite, torch.nan)
        self._updates += finite
        moments = self._moments
        for start, gradient in gradients:
            piece = slice(start, start + gradient.numel())
            adamw_(
                moments.compute_P[piece], moments.kept_P[piece] if moments.split else None, gradient,
                moments.exp_avg_P[piece], moments.exp_avg_sq_P[piece],
                scale=scale, learning_rate=learning_rate, updates=self._updates, betas=self._training.betas, eps=1e-8,
                weight_decay=self._training.weight_decay if start < self._shard.num_decayed else 0.0,
            )  # fmt: skip
        return norm
