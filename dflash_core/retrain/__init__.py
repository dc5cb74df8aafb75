"""Retraining from prompts as they arrive: what is new, what is kept of the old, and whether the new drafter is better.

Only the settings are here; what needs torch is in ``rounds``, ``watermark`` and ``decision``.
"""

from dflash_core.retrain.config import RetrainConfig, load_any_config, load_retrain_config

__all__ = ["RetrainConfig", "load_any_config", "load_retrain_config"]
