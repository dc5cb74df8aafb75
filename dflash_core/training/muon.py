"""Muon for the matrices and AdamW for the norms, over the flat layout: fp32 masters, one way for CPU and CUDA, nothing waits for the device.

    M, N sides of a matrix

The momentum of a matrix is made orthogonal and scaled to the root mean square that AdamW's updates have, so learning rate and weight decay are
AdamW's own (Muon: https://kellerjordan.github.io/posts/muon/; the scale 0.2 * sqrt(max(M, N)): arXiv 2502.16982, section 2.2). As
``torch.optim.Muon`` with ``adjust_lr_fn="match_rms_adamw"``, but clipped, skippable and without a host round trip.

Orthogonalising costs as much as a training step of a few thousand tokens (for the drafter of an 8B model about 100 TFLOP), so it is for large steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dflash_core.config import TrainingConfig
from dflash_core.training.flat import FlatLayout
from dflash_core.training.optimizer import Moments, Part

MOMENTUM = 0.95
RMS_OF_ADAMW = 0.2
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # steepest at zero: singular values end between 0.7 and 1.2, which is as good as one
NEWTON_SCHULZ_STEPS = 5
_EPS = 1e-8


class Muon:
    """``moments`` are made for it: ``exp_avg_P`` holds the momentum of matrices, and there is no second moment of theirs."""

    def __init__(self, layout: FlatLayout, training: TrainingConfig, moments: Moments):
        self._layout, self._training, self._moments = layout, training, moments
        self._updates = torch.zeros((), device=moments.masters_P.device)
        self._masters, self._first, self._second = (layout.views(buffer) for buffer in moments.buffers.values())

    @property
    def counters(self) -> Sequence[Tensor]:
        """One for all."""
        return [self._updates]

    def update(self, gradients: Sequence[Part], denominator: Tensor, learning_rate: Tensor) -> Tensor:
        """See ``FusedAdamW.update``."""
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for _, gradient in gradients]
        norm = torch.linalg.vector_norm(torch.stack(norms)) / denominator
        finite = torch.isfinite(norm)
        scale = (self._training.max_grad_norm / (norm + 1e-6)).clamp_max(1.0) / denominator
        self._updates += finite
        rate = learning_rate * finite  # a step that is skipped is one of rate 0, with moments that stay
        for name, gradient in self._by_name(gradients):
            scaled = (gradient.float() * scale).masked_fill_(~finite, 0.0)
            if scaled.dim() == 2:
                self._update_matrix(self._masters[name], scaled, self._first[name], rate, finite)
            else:
                self._update_vector(self._masters[name], scaled, self._first[name], self._second[name], rate, finite)
        self._moments.refresh()
        return norm

    def _update_matrix(self, master_MN: Tensor, gradient_MN: Tensor, momentum_MN: Tensor, rate: Tensor, finite: Tensor) -> None:
        momentum_MN.lerp_(gradient_MN, (1 - MOMENTUM) * finite)
        nesterov_MN = gradient_MN.lerp(momentum_MN, MOMENTUM)
        update_MN = orthogonal(nesterov_MN, torch.bfloat16 if master_MN.is_cuda else torch.float32)
        master_MN.mul_(1 - rate * self._training.weight_decay)
        master_MN.addcmul_(update_MN, -rate * RMS_OF_ADAMW * math.sqrt(max(master_MN.shape)))

    def _update_vector(self, master: Tensor, gradient: Tensor, first: Tensor, second: Tensor, rate: Tensor, finite: Tensor) -> None:
        beta1, beta2 = self._training.betas
        first.lerp_(gradient, (1 - beta1) * finite)
        second.lerp_(gradient.square(), (1 - beta2) * finite)
        updates = self._updates.clamp_min(1.0)
        master.sub_(rate * (first / (1 - beta1**updates)) / ((second / (1 - beta2**updates)).sqrt() + _EPS))

    def _by_name(self, gradients: Sequence[Part]) -> Iterator[tuple[str, Tensor]]:
        for begin, piece in gradients:
            flat = piece.reshape(-1)
            for name, start in self._layout.offsets.items():
                if begin <= start < begin + len(flat):
                    shape = self._layout.shapes[name]
                    yield name, flat[start - begin : start - begin + math.prod(shape)].view(shape)


def orthogonal(matrix_MN: Tensor, dtype: torch.dtype) -> Tensor:
    """[M, N] in ``dtype``: nearly the orthogonal factor U V' of the matrix U S V', by five quintic Newton-Schulz steps in ``dtype``.

    CPUs without bfloat16 instructions want float32. Zero stays zero.
    """
    a, b, c = NEWTON_SCHULZ
    x = matrix_MN.to(dtype)
    if x.shape[0] > x.shape[1]:
        x = x.T
    x = x / x.norm().clamp_min(1e-7)  # the spectral norm is at most this one
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if matrix_MN.shape[0] <= matrix_MN.shape[1] else x.T
