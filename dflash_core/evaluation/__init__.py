"""Measuring a drafter: losslessness, acceptance and speed on held-out prompts and on sets. Pictures are in ``plots``, which needs matplotlib."""

from dflash_core.evaluation.evaluate import evaluate_drafter, weights_digest
from dflash_core.evaluation.lossless import Divergence, find_divergence
from dflash_core.evaluation.prompts import EvaluationPrompt, heldout_prompts, set_prompts
from dflash_core.evaluation.records import PromptRecord, read_records
from dflash_core.evaluation.result import EvaluationResult, Figures, Measured, PromptFigures
from dflash_core.evaluation.tables import sets_table

__all__ = [
    "Divergence",
    "EvaluationPrompt",
    "EvaluationResult",
    "Figures",
    "Measured",
    "PromptFigures",
    "PromptRecord",
    "evaluate_drafter",
    "find_divergence",
    "heldout_prompts",
    "read_records",
    "set_prompts",
    "sets_table",
    "weights_digest",
]
