"""The end of a run: ``summary.json``, and the same for people as a markdown artifact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prefect.artifacts import create_markdown_artifact

from dflash_core.evaluation.plots import write_plots
from dflash_core.pipeline import evaluation_of, write_summary
from dflash_core.training import read_metrics
from tasks.progress import duration
from tasks.run import Run


def summarise(run: Run) -> Path:
    """Write the summary of a run whose stages are all done; returns its path."""
    path = write_summary(run.plan, run.results, mlflow_run_id=run.tracker.run_id)
    write_plots(path.parent / "plots", read_metrics(run.results["train"].folder / "metrics.jsonl"), evaluation_of(run.results["evaluate"].folder))
    run.tracker.log_artifact(path.parent / "plots", "plots")
    run.tracker.log_artifact(path)
    summary = json.loads(path.read_text(encoding="utf-8"))
    markdown = in_markdown(summary, run.tracker.page())
    run.tracker.log_text(markdown, "summary.md")
    run.publish(lambda: create_markdown_artifact(markdown, key="summary", description=f"Run {run.plan.config.run.name}"))
    return path


def in_markdown(summary: dict[str, Any], mlflow_page: str | None) -> str:
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
        f"| speed-up | {summary['speedup']:.2f}× |",
        f"| decoding | {speed['decoding']:,.1f} tokens/s, {speed['decoding_without_drafter']:,.1f} without the drafter |",
        f"| training | {speed['training']:,.0f} tokens/s |",
        f"| drafter | `{summary['export_path']}` |",
        f"| MLflow | {_mlflow(summary['mlflow_run_id'], mlflow_page)} |",
        "",
        "| stage | seconds | |",
        "|---|---:|---|",
    ]
    lines += [f"| {name} | {duration(stage['seconds'])} | {'cached' if stage['cached'] else ''} |" for name, stage in summary["stages"].items()]
    return "\n".join(lines) + "\n"


def _mlflow(run_id: str | None, page: str | None) -> str:
    if run_id is None:
        return "not recorded"
    return f"[{run_id}]({page})" if page else f"run `{run_id}`"
