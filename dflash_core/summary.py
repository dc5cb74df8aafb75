"""``summary.json`` of a run: what it was made for, in one small file, and in a few lines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_core.config import annotated_yaml
from dflash_core.evaluation import Figures
from dflash_core.pipeline import StageResult
from dflash_core.plan import Plan
from dflash_core.runners import drafter_folder, evaluation_of
from dflash_core.stages import atomic_write, write_json_atomic
from dflash_core.words import counted


def write_summary(plan: Plan, results: Mapping[str, StageResult], *, mlflow_run_id: str | None = None, mlflow_page: str | None = None) -> Path:
    """Write ``summary.json`` and the resolved configuration into the run's folder; returns the path of the summary.

    ``mlflow_page``: address of the MLflow run's page, where a server shows it.
    """
    figures = evaluation_of(results["evaluate"].folder)
    trained, served = figures.trained, figures.as_served
    summary = {
        "run": plan.run_id,
        "lossless": figures.lossless,
        "lossless_dtype": figures.dtype,
        "prompts": figures.prompts,
        "diverged": figures.diverged,
        "acceptance_length": {"mean_of_requests": trained.acceptance.mean_of_requests, "pooled": trained.acceptance.pooled},
        "intervals": _intervals(trained, served.trained),
        "sets": {name: figures.headline_of(name) for name in figures.sets},
        "acceptance_length_untrained": figures.untrained.acceptance.mean_of_requests if figures.untrained else None,
        "acceptance_per_position": list(trained.acceptance.per_position),
        "target_passes_saved_per_token": trained.target_passes_saved_per_token,
        "speedup": served.trained.speedup,
        "speed_dtype": served.dtype,
        "served": figures.served.headline() | {"prompts": figures.served.prompts} if figures.served else None,
        "tokens_per_second": {
            "training": results["train"].manifest.counts["tokens_per_second"],
            "decoding": served.trained.tokens_per_second,
            "decoding_without_drafter": served.trained.baseline_tokens_per_second,
        },
        "stages": {name: {"seconds": round(result.seconds, 3), "cached": result.cached} for name, result in results.items()},
        "mlflow_run_id": mlflow_run_id,
        "mlflow_page": mlflow_page,
        "export_path": str(drafter_folder(results["export"].folder).resolve()),
        "config_digest": plan.config.digest,
    }
    with atomic_write(plan.run_folder / "config.yaml") as temporary:
        temporary.write_text(annotated_yaml(plan.config), encoding="utf-8")
    write_json_atomic(plan.run_folder / "summary.json", summary)
    return plan.run_folder / "summary.json"


def outcome_lines(path: Path) -> list[str]:
    """What a ``summary.json`` says, for people: losslessness, acceptance length, speed, and the folder to serve."""
    summary = json.loads(path.read_text(encoding="utf-8"))
    length, untrained, rates = summary["acceptance_length"], summary["acceptance_length_untrained"], summary["tokens_per_second"]
    sets = {name: found["acceptance_length"] for name, found in summary["sets"].items()}
    each = ", ".join(f"{name} {value:.2f}" for name, value in sets.items())
    with_and_without = f"{rates['decoding']:,.1f} tokens/s with it, {rates['decoding_without_drafter']:,.1f} without"
    return [
        f"lossless: {_lossless(summary)}",
        f"acceptance length: {length['mean_of_requests']:.2f} tokens a target pass (mean of requests; {length['pooled']:.2f} pooled)"
        + (f": {each}" if len(sets) > 1 else "")
        + (f"; {untrained:.2f} before training" if untrained is not None else ""),
        f"speed: {summary['speedup']:.2f} times that of the target alone, in {summary['speed_dtype']} ({with_and_without})",
        f"to serve: {summary['export_path']} (its README.md has the commands of the servers)",
    ]


def _lossless(summary: Mapping[str, Any]) -> str:
    prompts, lossless = summary["prompts"], round(summary["lossless"] * summary["prompts"])
    explained = lossless - (prompts - summary["diverged"])
    rounding = f", {explained} of them but for the rounding of {summary['lossless_dtype']}" if explained else f", in {summary['lossless_dtype']}"
    return f"{lossless:,} of {counted(prompts, 'answer')} are the target's own, token for token{rounding}"


def _intervals(trained: Figures, served: Figures) -> dict[str, Any] | None:
    if trained.intervals is None:
        return None
    speedup = {"speedup": served.intervals.speedup.model_dump(mode="json") if served.intervals else None}
    return trained.intervals.model_dump(mode="json") | speedup
