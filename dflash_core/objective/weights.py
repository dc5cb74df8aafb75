"""Weights of the slots of a block, and the denominator that belongs to them.

The loss of one optimiser step is  sum(weights * nll) / sum(denominators), both sums over every row, every accumulation
step and every replica. Shapes: B rows, N blocks of a row, S slots of a block (slot 0 is the anchor and has no loss).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dflash_core.config import ObjectiveConfig


def default_gamma(block_size: int) -> float:
    """Decay length for a block size: 7, 5, 4 for 16, 10, 8 (DFlash paper, arXiv 2602.06036), block_size / 2.25 otherwise."""
    return {16: 7.0, 10: 5.0, 8: 4.0}.get(block_size, block_size / 2.25)


def decay_weights(block_size: int, gamma: float, device: torch.device | str | None = None) -> Tensor:
    """Weight exp(-(k - 1) / gamma) of slot k, 0 for the anchor slot (arXiv 2602.06036).

    Returns: [S] float32.
    """
    slots_S = torch.arange(block_size, dtype=torch.float32, device=device)
    return torch.exp((1 - slots_S) / gamma).masked_fill_(slots_S == 0, 0.0)  # torch.where copies its scalar to the device, and waits


def dpace_weights(probability_BNS: Tensor, labels_BNS: Tensor, alpha: float = 0.5) -> Tensor:
    """D-PACE (arXiv 2605.18810): slot j weighs the smoothed chance that drafting gets as far as each slot m >= j.

    weight_j = sum_{m >= j} prod_{1 <= i <= m} ((1 - alpha) * q_i + alpha), where q_i is the drafter's own probability of
    the label of slot i. Only labelled slots count as m; labels of a block are one run from slot 1. Not divided by its sum.

    Args:
        probability_BNS: probability of the label, any float dtype; no gradient flows through it.
        labels_BNS: int64, negative where a slot has no label.
    Returns: [..., S] float32, 0 for slots without a label.
    """
    labelled_BNS = labels_BNS >= 0
    smoothed_BNS = (1 - alpha) * probability_BNS.detach().float() + alpha
    reach_BNS = smoothed_BNS.masked_fill(~labelled_BNS, 1.0).cumprod(-1) * labelled_BNS
    return reach_BNS.flip(-1).cumsum(-1).flip(-1) * labelled_BNS


def slot_weights(objective: ObjectiveConfig, labels_BNS: Tensor, probability_BNS: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Weights of all slots and the share of the step's denominator that these rows contribute.

    Args:
        objective: settings ``weighting`` (decay, dpace or uniform), ``gamma`` and ``dpace_alpha``.
        labels_BNS: int64, negative where a slot has no label.
        probability_BNS: probability of the label; needed by dpace alone.
    Returns: weights [B, N, S] float32, 0 for slots without a label; denominator, float32 scalar: the sum of the weights
        for decay and uniform, the number of labelled slots for dpace. Nothing waits for the device.
    Raises:
        ValueError: dpace without probabilities.
    """
    labelled_BNS = labels_BNS >= 0
    if objective.weighting == "dpace":
        if probability_BNS is None:
            raise ValueError("objective.weighting = 'dpace' needs the probability of each label; pass SlotLosses.probability")
        return dpace_weights(probability_BNS, labels_BNS, objective.dpace_alpha), labelled_BNS.sum().float()
    if objective.weighting == "decay":
        block_size = labels_BNS.shape[-1]
        gamma = objective.gamma if objective.gamma is not None else default_gamma(block_size)
        weights_BNS = decay_weights(block_size, gamma, labels_BNS.device) * labelled_BNS
    else:
        weights_BNS = labelled_BNS.float()
    return weights_BNS, weights_BNS.sum()
