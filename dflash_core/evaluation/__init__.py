"""Measuring a drafter: losslessness, acceptance and speed on held-out prompts. Pictures are in ``plots``, which needs matplotlib."""

from dflash_core.evaluation.evaluate import evaluate_drafter, weights_digest
from dflash_core.evaluation.lossless import Divergence, find_divergence
from dflash_core.evaluation.records import PromptRecord, read_records
from dflash_core.evaluation.result import EvaluationResult, Figures, PromptFigures

__all__ = [
    "Divergence",
    "EvaluationResult",
    "Figures",
    "PromptFigures",
    "PromptRecord",
    "evaluate_drafter",
    "find_divergence",
    "read_records",
    "weights_digest",
]
