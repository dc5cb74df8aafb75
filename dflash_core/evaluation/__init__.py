"""Measuring a drafter: losslessness, acceptance and speed on held-out prompts and on sets. Pictures are in ``plots``, which needs matplotlib."""

from dflash_core.evaluation.compare import Comparison, Pair, Paired, compare, compare_with_untrained, paired
from dflash_core.evaluation.during import HeldoutJudge
from dflash_core.evaluation.evaluate import digest_of_drafter, evaluate_drafter, measure_served
from dflash_core.evaluation.lossless import Divergence, find_divergence
from dflash_core.evaluation.prompts import EvaluationPrompt, heldout_prompts, set_prompts
from dflash_core.evaluation.records import PromptRecord, read_records
from dflash_core.evaluation.result import EvaluationResult, Figures, InPrecision, Measured, PromptFigures
from dflash_core.evaluation.tables import comparison_table, served_table, sets_table, ways_table

__all__ = [
    "Comparison",
    "Divergence",
    "EvaluationPrompt",
    "EvaluationResult",
    "Figures",
    "HeldoutJudge",
    "InPrecision",
    "Measured",
    "Pair",
    "Paired",
    "PromptFigures",
    "PromptRecord",
    "compare",
    "compare_with_untrained",
    "comparison_table",
    "digest_of_drafter",
    "evaluate_drafter",
    "find_divergence",
    "heldout_prompts",
    "measure_served",
    "paired",
    "read_records",
    "served_table",
    "set_prompts",
    "sets_table",
    "ways_table",
]
