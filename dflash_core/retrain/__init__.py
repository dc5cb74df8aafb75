"""Retraining from prompts as they arrive: what is new, what is kept of the old, and whether the new drafter is better."""

from dflash_core.retrain.config import RetrainConfig, load_any_config, load_retrain_config
from dflash_core.retrain.decision import Decision, decide
from dflash_core.retrain.rounds import Round, Rounds
from dflash_core.retrain.watermark import SeenFile, Watermark

__all__ = ["Decision", "RetrainConfig", "Round", "Rounds", "SeenFile", "Watermark", "decide", "load_any_config", "load_retrain_config"]
