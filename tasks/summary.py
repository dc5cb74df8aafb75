"""The end of a run: ``summary.json``, the same for people as a markdown artifact, and all of it as one page of HTML."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect.artifacts import create_markdown_artifact

from dflash_core.config import PipelineConfig
from dflash_core.evaluation import EvaluationResult, served_table, sets_table
from dflash_core.evaluation.plots import write_picture
from dflash_core.evaluation.report import Report, write_report
from dflash_core.pipeline import evaluation_of
from dflash_core.summary import outcome_lines, write_summary
from dflash_core.training import EVALUATIONS, RecentMetrics, bottleneck_in_words, read_metrics
from dflash_core.words import counted, duration
from tasks.registry import Version
from tasks.run import Run, publish
from tasks.tracker import flat_params

logger = logging.getLogger(__name__)

REPORT = "report.html"
_FEED = ("data_wait_share", "source_wait_share", "feed_bottleneck")


def summarise(run: Run) -> Path:
    """Write the summary of a run whose stages are all done; returns its path."""
    links = links_of(run)
    path = write_summary(run.plan, run.results, mlflow_run_id=run.tracker.run_id, mlflow_page=links.get("run"))
    summary = json.loads(path.read_text(encoding="utf-8"))
    metrics, evaluation = read_metrics(run.results["train"].folder / "metrics.jsonl"), evaluation_of(run.results["evaluate"].folder)
    write_picture(path.parent / "plots" / "report.png", metrics, evaluation)
    during = read_metrics(run.results["train"].folder / EVALUATIONS)
    write_report(path.parent / REPORT, report_of(run, summary, [*metrics, *during], evaluation, links))
    for artifact, folder in ((path.parent / "plots", "plots"), (path.parent / REPORT, None), (path, None)):
        run.tracker.log_artifact(artifact, folder)
    run.tracker.log_metrics(training_figures(metrics))
    markdown = in_markdown(summary, evaluation, links, run.version)
    run.tracker.log_text(markdown, "summary.md")
    publish(lambda: create_markdown_artifact(markdown, key="summary", description=f"Run {run.plan.config.run.name}"))
    for line in outcome_lines(path):
        logger.info(line)
    return path


def links_of(run: Run) -> dict[str, str]:
    """Label → address of what MLflow shows of a run; nothing where it is not a server."""
    registry, version = run.tracker.registry, run.version
    pages = {
        "run": run.tracker.page(),
        "report": run.tracker.artifact_page(REPORT),
        "model": registry.page(version) if registry is not None and version is not None else None,
    }
    return {label: page for label, page in pages.items() if page is not None}


def training_figures(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What a table of runs is sorted by: means over the last steps of training, and over all of it."""
    if not metrics:
        return {}
    means = {f"training_{name}": _mean(metrics, name) for name in ("tokens_per_second", *_FEED)}
    last = {f"final_{name}": value for name, value in RecentMetrics.of(metrics).means().items()}
    peak = {f"training_peak_{name}": max(item[name] for item in metrics if name in item) for name in metrics[-1] if name.startswith("memory_")}
    return {**means, **last, **peak}


def report_of(
    run: Run, summary: Mapping[str, Any], metrics: Sequence[Mapping[str, float]], evaluation: EvaluationResult, links: Mapping[str, str]
) -> Report:
    """All that is known of a run, for its page."""
    config, info = run.plan.config, run.plan.info
    counts = {name: result.manifest.counts for name, result in run.results.items()}
    facts = {
        "Drafter": {
            "folder": summary["export_path"],
            "registered as": "not registered" if run.version is None else str(run.version),
            "shape": f"{counted(config.drafter.num_layers, 'layer')}, blocks of {config.drafter.block_size}, {counts['export']['weights']:,} weights",
        },
        "Target": {
            "name": info.name,
            "revision": info.revision or "none",
            "digest": info.digest[:16],
            "layers tapped": str(list(run.plan.tap_layers)),
        },
        "Data": {
            "sources": ", ".join(item.source for item in config.data.sources),
            "conversations": f"{counts['samples']['conversations']:,} ({counts['responses'].get('duplicates', 0):,} repetitions left out)",
            "training": f"{counts['samples']['train']:,} samples, {counts['samples']['train_supervised']:,} response tokens",
            "held out": f"{counts['samples']['heldout']:,} samples",
            **(
                {"in evaluation sets": f"{counts['samples']['in_evaluation_sets']:,} conversations, not trained on"} if config.evaluation.sets else {}
            ),
        },
        "Training": {
            "steps": f"{counts['train']['steps']:,} of {config.rows_per_step} rows of {config.training.row_length} tokens",
            "speed": f"{counts['train']['tokens_per_second']:,.0f} tokens/s",
            "rows from": "shards" if run.plan.extracts else f"targets on {', '.join(config.target_devices)}",
            "feed": bottleneck_in_words({name: _mean(metrics, name) for name in _FEED}) if metrics else "not recorded",
            "weights kept": _kept(config, counts["train"]),
        },
    }
    stages = [(name, duration(stage["seconds"]), "found done" if stage["cached"] else "done") for name, stage in summary["stages"].items()]
    return Report(run.plan.run_id, evaluation, metrics, facts, stages, flat_params(config.model_dump(mode="json")), links)


def _kept(config: PipelineConfig, counts: Mapping[str, Any]) -> str:
    if config.training.keep == "last" or "best_step" not in counts:
        return "those of the last step"
    return f"those of step {counts['best_step']:,}, acceptance length {counts['best_acceptance_length']:.2f} on the prompts of training.evaluation"


def _mean(metrics: Sequence[Mapping[str, float]], name: str) -> float:
    values = [item[name] for item in metrics if name in item]
    return sum(values) / max(len(values), 1)


def in_markdown(summary: Mapping[str, Any], evaluation: EvaluationResult, links: Mapping[str, str], version: Version | None) -> str:
    """A page that says whether the drafter is good, where it lies, and how long each stage took."""
    length, speed = summary["acceptance_length"], summary["tokens_per_second"]
    untrained = summary["acceptance_length_untrained"]
    lines = [
        f"# {summary['run']}",
        "",
        "| | |",
        "|---|---|",
        f"| lossless | {summary['lossless']:.1%} of prompts |",
        f"| acceptance length | {length['mean_of_requests']:.3f} (mean of requests), {length['pooled']:.3f} (pooled) |",
        f"| untrained | {'not measured' if untrained is None else format(untrained, '.3f')} |",
        f"| speed-up | {summary['speedup']:.2f}× in {evaluation.as_served.dtype} |",
        f"| decoding | {speed['decoding']:,.1f} tokens/s, {speed['decoding_without_drafter']:,.1f} without the drafter |",
        f"| training | {speed['training']:,.0f} tokens/s |",
        f"| drafter | `{summary['export_path']}` |",
        f"| registered as | {linked(str(version or 'not registered'), links.get('model'))} |",
        f"| MLflow | {_mlflow(summary['mlflow_run_id'], links)} |",
        "",
        *table_in_markdown(sets_table(evaluation)),
        "",
        *([*table_in_markdown(served), ""] if (served := served_table(evaluation)) else []),
        "| stage | seconds | |",
        "|---|---:|---|",
    ]
    lines += [f"| {name} | {duration(stage['seconds'])} | {'cached' if stage['cached'] else ''} |" for name, stage in summary["stages"].items()]
    return "\n".join(lines) + "\n"


def table_in_markdown(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Rows that have the same keys, as lines of markdown."""
    lines = [list(rows[0]), ["---"] + ["---:"] * (len(rows[0]) - 1), *([*row.values()] for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines]


def _mlflow(run_id: str | None, links: Mapping[str, str]) -> str:
    if run_id is None:
        return "not recorded"
    report = f", [report]({links['report']})" if "report" in links else ""
    return (linked(run_id, links["run"]) if "run" in links else f"run `{run_id}`") + report


def linked(text: str, address: str | None) -> str:
    """Text as a markdown link, where there is an address."""
    return f"[{text}]({address})" if address else text
