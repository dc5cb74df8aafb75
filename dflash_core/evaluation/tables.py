"""An evaluation, or a comparison of two, in a few rows of text, the same on the console, in a report and as an artifact."""

from __future__ import annotations

from dflash_core.evaluation.compare import Comparison, Paired
from dflash_core.evaluation.intervals import Interval
from dflash_core.evaluation.result import EvaluationResult, Figures, InPrecision, Measured, Way, WayFigures

OVERALL = "overall"


def sets_table(result: EvaluationResult) -> list[dict[str, str]]:
    """A row for the held-out prompts and each set, and one over all where there are several; figures with their 95 % intervals.

    The speed-up is that of serving, and its heading names the precision.
    """
    served = _sets(result.as_served)
    return [_row(name, found) | _speed(served[name].trained, result.as_served.dtype) for name, found in _sets(result).items()]


def served_table(result: EvaluationResult) -> list[dict[str, str]]:
    """The same rows in the precision of serving; empty where that was not measured."""
    return [_served_row(name, found, result.served.dtype) for name, found in _sets(result.served).items()] if result.served else []


def ways_table(result: EvaluationResult) -> list[dict[str, str]]:
    """A row for each way of decoding, the usual one first; empty where there is no other."""
    served = result.as_served
    usual = WayFigures(
        way=Way(batch_size=1, temperature=result.temperature, block_size=result.block_size), diverged=served.diverged, figures=served.trained
    )
    return [_way_row(found, served.dtype) for found in (usual, *served.ways)] if served.ways else []


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


def _sets(found: InPrecision) -> dict[str, Measured]:
    return found.sets | ({OVERALL: found} if len(found.sets) > 1 else {})


def _way_row(found: WayFigures, dtype: str) -> dict[str, str]:
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
        **_rates(figures, dtype),
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
    }


def _served_row(name: str, found: Measured, dtype: str) -> dict[str, str]:
    row = _row(name, found)
    return {
        **{column: row[column] for column in ("set", "prompts", "acceptance length", "pooled")},
        "diverged": str(found.diverged),
        "beyond noise": str(found.diverged_beyond_noise),
        **_rates(found.trained, dtype),
    }


def _rates(figures: Figures, dtype: str) -> dict[str, str]:
    return {
        "tokens/s": f"{figures.tokens_per_second:,.1f}",
        "without drafter": f"{figures.baseline_tokens_per_second:,.1f}",
        **_speed(figures, dtype),
    }


def _speed(figures: Figures, dtype: str) -> dict[str, str]:
    return {f"speed-up, {dtype}": with_interval(figures.speedup, figures.intervals.speedup if figures.intervals else None, "×")}
