"""An evaluation in a few rows of text, the same on the console, in a report and as an artifact."""

from __future__ import annotations

from dflash_core.evaluation.intervals import Interval
from dflash_core.evaluation.result import EvaluationResult, Measured

OVERALL = "overall"


def sets_table(result: EvaluationResult) -> list[dict[str, str]]:
    """A row for the held-out prompts and each set, and one over all where there are several; figures with their 95 % intervals."""
    rows = dict(result.sets)
    if len(rows) > 1:
        rows[OVERALL] = result
    return [_row(name, found) for name, found in rows.items()]


def with_interval(value: float, interval: Interval | None, unit: str = "") -> str:
    """``2.31 (2.10–2.55)``."""
    return f"{value:.2f}{unit}" + (f" ({interval.low:.2f}–{interval.high:.2f})" if interval else "")


def _row(name: str, found: Measured) -> dict[str, str]:
    trained, before, of = found.trained, found.untrained, found.trained.intervals
    return {
        "set": name,
        "prompts": str(found.prompts),
        "lossless": f"{100 * found.lossless:.1f} %",
        "acceptance length": with_interval(trained.acceptance.mean_of_requests, of.acceptance_length if of else None),
        "pooled": with_interval(trained.acceptance.pooled, of.acceptance_length_pooled if of else None),
        "before training": "" if before is None else f"{before.acceptance.mean_of_requests:.2f}",
        "speed-up": with_interval(trained.speedup, of.speedup if of else None, "×"),
    }
