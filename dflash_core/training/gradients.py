"""Where the gradients of a step are between the backward pass and the update.

    P parameters (flat)

On the CPU they add up in one fp32 buffer, with the tail behind it. On CUDA moving them costs as much as a tenth of the step, so nothing is
zeroed, added or copied that need not be: the backward pass hands its own tensors over, and

- one replica without accumulation updates straight from those;
- several replicas without accumulation pack them into one buffer, in the precision of the computation, which is what NCCL sums;
- with accumulation they are added up in fp32, the first micro-step being a copy.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from dflash_core.drafter import DFlashDrafter
from dflash_core.training.flat import FlatLayout, Shard
from dflash_core.training.optimizer import Part


class AddedGradients:
    """fp32, in one buffer with the tail; ``.grad`` is always there, so accumulating and not accumulating are the same."""

    def __init__(
        self, layout: FlatLayout, drafter: DFlashDrafter, precision: torch.dtype, tail_size: int, device: torch.device, *, shard: Shard
    ):  # fmt: skip
        P, self._shard = layout.size, shard
        self.buffer = torch.zeros(P + tail_size, device=device)
        self.flat_P, self.tail = self.buffer[:P], self.buffer[P:]
        self.summed = [self.buffer]
        self._compute_P = self.flat_P if precision == torch.float32 else torch.zeros(P, dtype=precision, device=device)
        views = layout.views(self._compute_P)
        for name, parameter in drafter.named_parameters():
            parameter.grad = views[name]

    def begin(self) -> None:
        """Forget the step before."""
        self.buffer.zero_()

    def collect(self) -> None:
        """After each backward pass."""
        if self._compute_P is not self.flat_P:
            self.flat_P.add_(self._compute_P)
            self._compute_P.zero_()

    def parts(self) -> list[Part]:
        """The gradients of the shard for the update, summed over the replicas by then, with their places in the shard."""
        return [(0, self.flat_P[self._shard.slice])]


class HandedGradients:
    """The tensors of the backward pass; packed into one buffer of ``dtype`` if ``packed``, else left where they are."""

    def __init__(
        self, layout: FlatLayout, drafter: DFlashDrafter, dtype: torch.dtype, tail_size: int, device: torch.device, *, packed: bool, shard: Shard
    ):  # fmt: skip
        self._shard = shard
        parameters = dict(drafter.named_parameters())
        self._layout, self._parameters = layout, [(start, parameters[name]) for name, start in layout.offsets.items()]
        self.tail = torch.zeros(tail_size, device=device)
        self.flat_P = torch.zeros(layout.size, dtype=dtype, device=device) if packed else None
        self.summed = [self.tail] if self.flat_P is None else [self.flat_P, self.tail]
        self._fresh = True

    def begin(self) -> None:
        """Forget the step before."""
        self.tail.zero_()
        self._drop()
        self._fresh = True

    def collect(self) -> None:
        """After each backward pass."""
        if self.flat_P is None:
            return
        views = list(self._layout.views(self.flat_P).values())
        handed = [cast(Tensor, parameter.grad) for _, parameter in self._parameters]
        if self._fresh:
            torch._foreach_copy_(views, handed)
        else:
            for view, gradient in zip(views, handed, strict=True):
                view.add_(gradient)
        self._fresh = False
        self._drop()

    def parts(self) -> list[Part]:
        """The gradients of the shard for the update, summed over the replicas by then, with their places in the shard."""
        if self.flat_P is None:
            return [(start, cast(Tensor, parameter.grad)) for start, parameter in self._parameters]
        mine, cut = self.flat_P[self._shard.slice], self._shard.num_decayed
        return [(start, piece) for start, piece in ((0, mine[:cut]), (cut, mine[cut:])) if piece.numel()]

    def _drop(self) -> None:
        for _, parameter in self._parameters:
            parameter.grad = None  # the next backward pass then hands its tensors over instead of adding to these
