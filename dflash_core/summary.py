"""``summary.json`` of a run: what it was made for, in one small file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_core.config import annotated_yaml
from dflash_core.evaluation import Figures
from dflash_core.pipeline import StageResult
from dflash_core.plan import Plan
from dflash_core.runners import drafter_folder, evaluation_of
from dflash_core.stages import atomic_write, write_json_atomic


def write_summary(plan: Plan, results: Mapping[str, StageResult], *, mlflow_run_id: str | None = None) -> Path:
    """Write ``summary.json`` and the resolved configuration into the run's folder; returns the path of the summary."""
    figures = evaluation_of(results["evaluate"].folder)
    trained, served = figures.trained, figures.as_served
    summary = {
        "run": plan.run_id,
        "lossless": figures.lossless,
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
        "export_path": str(drafter_folder(results["export"].folder).resolve()),
        "config_digest": plan.config.digest,
    }
    with atomic_write(plan.run_folder / "config.yaml") as temporary:
        temporary.write_text(annotated_yaml(plan.config), encoding="utf-8")
    write_json_atomic(plan.run_folder / "summary.json", summary)
    return plan.run_folder / "summary.json"


def _intervals(trained: Figures, served: Figures) -> dict[str, Any] | None:
    if trained.intervals is None:
        return None
    speedup = {"speedup": served.intervals.speedup.model_dump(mode="json") if served.intervals else None}
    return trained.intervals.model_dump(mode="json") | speedup
