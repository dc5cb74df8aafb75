"""An evaluation, or a comparison of two, in a few rows of text, the same on the console, in a report and as an artifact."""

from __future__ import annotations

from dflash_core.evaluation.compare import Comparison, Paired
from dflash_core.evaluation.intervals import Interval
from dflash_core.evaluation.result import EvaluationResult, Measured, Way, WayFigures

OVERALL = "overall"


def sets_table(result: EvaluationResult) -> list[dict[str, str]]:
    """A row for the held-out prompts and each set, and one over all where there are several; figures with their 95 % intervals."""
    rows = dict(result.sets)
    if len(rows) > 1:
        rows[OVERALL] = result
    return [_row(name, found) for name, found in rows.items()]


def ways_table(result: EvaluationResult) -> list[dict[str, str]]:
    """A row for each way of decoding, the usual one first; empty where there is no other."""
    usual = WayFigures(
        way=Way(batch_size=1, temperature=result.temperature, block_size=result.block_size), diverged=result.diverged, figures=result.trained
    )
    return [_way_row(found) for found in (usual, *result.ways)] if result.ways else []


def comparison_table(comparison: Comparison) -> list[dict[str, str]]:
    """A row for each set, and one over all where there are several: what both accept, and whether the difference is more than chance."""
    rows = dict(comparison.sets)
    if len(rows) > 1:
        rows[OVERALL] = comparison.overall
    return [_compared_row(name, found, comparison) for name, found in rows.items()]


def _compared_row(name: str, found: Paired, comparison: Comparison) -> dict[str, str]:
    interval = f" ({found.interval.low:+.3f} to {found.interval.high:+.3f})" if found.interval else ""
    return {
        "set": name,
        "prompts": str(found.prompts),
        comparison.first_name: f"{found.first:.3f}",
        comparison.second_name: f"{found.second:.3f}",
        "difference": f"{found.difference:+.3f}{interval}",
        "better / worse": f"{found.better} / {found.worse}",
        "p": f"{found.p_value:.2g}",
        "": "more than chance" if found.significant else "may be chance" if found.difference else "the same",
    }


def _way_row(found: WayFigures) -> dict[str, str]:
    figures, of = found.figures, found.figures.intervals
    drafted, accepted = figures.acceptance.drafted, figures.acceptance.accepted
    return {
        "together": str(found.way.batch_size),
        "temperature": f"{found.way.temperature:g}",
        "block": str(found.way.block_size),
        "acceptance length": with_interval(figures.acceptance.mean_of_requests, of.acceptance_length if of else None),
        "pooled": f"{figures.acceptance.pooled:.2f}",
        "drafted": f"{drafted:,}",
        "wasted": f"{drafted - accepted:,}",
        "diverged": "" if found.diverged is None else str(found.diverged),
        "tokens/s": f"{figures.tokens_per_second:,.1f}",
        "without drafter": f"{figures.baseline_tokens_per_second:,.1f}",
        "speed-up": with_interval(figures.speedup, of.speedup if of else None, "×"),
    }


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
