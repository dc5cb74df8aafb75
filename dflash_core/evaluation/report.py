"""A run on one page of HTML that needs nothing else: no network, no script; light and dark as the reader's system is.

    write_report(folder / "report.html", Report(...))

Needs matplotlib (the extra ``pipeline``), which the rest of the core does without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from dflash_core.evaluation.panels import Metrics
from dflash_core.evaluation.plots import inline_charts
from dflash_core.evaluation.result import EvaluationResult, InPrecision
from dflash_core.evaluation.tables import served_table, sets_table, ways_table
from dflash_core.stages import atomic_write


@dataclass(frozen=True)
class Report:
    """What the page tells.

    metrics:  records of training, none if it was not recorded
    facts:    tables of label and value, by heading, in order
    stages:   (name, time in words, state)
    settings: dotted name → value, all of them
    links:    label → address
    """

    title: str
    evaluation: EvaluationResult
    metrics: Metrics
    facts: Mapping[str, Mapping[str, str]]
    stages: Sequence[tuple[str, str, str]]
    settings: Mapping[str, object]
    links: Mapping[str, str] = field(default_factory=dict)


def write_report(path: Path, report: Report) -> Path:
    """Write the page; returns its path."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.globals["range_of"] = lambda interval: f"{interval.low:.2f}–{interval.high:.2f}"
    environment.filters["percent"] = lambda share: f"{100 * share:.1f} %"
    template = environment.from_string(resources.files("dflash_core.evaluation").joinpath("report.html").read_text(encoding="utf-8"))
    evaluation = report.evaluation
    page = template.render(
        report=report, evaluation=evaluation, trained=evaluation.trained, before=evaluation.untrained, served=evaluation.as_served,
        sets=sets_table(evaluation), of_serving=served_table(evaluation), ways=ways_table(evaluation), speeds=_speeds(evaluation),
        charts=inline_charts(report.metrics, evaluation),
    )  # fmt: skip
    with atomic_write(path) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return path


def _speeds(evaluation: EvaluationResult) -> dict[str, dict[tuple[str, str], float]]:
    """Speed-up of each prompt by set and id, for each precision."""
    measured: list[InPrecision] = [evaluation] if evaluation.served is None else [evaluation.served, evaluation]
    return {found.dtype: {(row.set, row.id): row.speedup for row in found.rows} for found in measured}
