"""The learning rate of every step, as a plain function: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from dflash_core.config import TrainingConfig


def learning_rate(training: TrainingConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimiser step ``step`` (0-based) out of ``total_steps``.

    Both schedules rise linearly over ``warmup_fraction`` of the steps and reach the peak with the last of them. ``cosine`` then falls along
    half a cosine; ``wsd`` (warm-up, stable, decay) stays at the peak and falls linearly over the last ``decay_fraction``. Both head for
    ``min_lr_fraction`` of the peak, which step ``total_steps`` would have: the last step still learns something.
    """
    warmup_steps = round(training.warmup_fraction * total_steps)
    if step < warmup_steps:
        return training.learning_rate * (step + 1) / warmup_steps
    if training.schedule == "cosine":
        remaining = 0.5 * (1.0 + math.cos(math.pi * (step - warmup_steps) / (total_steps - warmup_steps)))
    else:
        decay_steps = round(training.decay_fraction * total_steps)
        remaining = min(1.0, (total_steps - step) / decay_steps) if decay_steps else 1.0
    return training.learning_rate * (training.min_lr_fraction + (1.0 - training.min_lr_fraction) * remaining)
