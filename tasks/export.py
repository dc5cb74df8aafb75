"""Stage 'export': the folder that servers load, recorded as a logged model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect.client.schemas.objects import State

from dflash_core.pipeline import StageResult, drafter_folder
from tasks.run import Run, resumable
from tasks.tracker import StageRecord, flat_params


@resumable("export")
def export_drafter(run: Run) -> State[dict[str, Any]]:
    """Write the drafter's folder and check it against the trained drafter."""

    def record(stage: StageRecord, result: StageResult) -> None:
        if stage.run_id is None:
            return  # recorded before
        config, info = run.plan.config, run.plan.info
        tags: dict[str, object] = {
            "target": info.name,
            "target.revision": info.revision,
            "target.digest": info.digest,
            "config_digest": config.digest,
        }
        evaluated = run.results.get("evaluate")
        if evaluated is not None:
            counts = evaluated.manifest.counts
            tags |= {name: counts[name] for name in ("lossless", "acceptance_length", "speedup") if name in counts}
        folder = drafter_folder(result.folder)
        params = flat_params({"drafter": config.drafter.model_dump(mode="json"), "objective": config.objective.model_dump(mode="json")})
        model_id = run.tracker.log_model(folder, name=f"dflash-{Path(info.name).name.lower()}", params=params, tags=tags)
        if model_id is not None:
            stage.set_tags({"dflash.logged_model": model_id})

    return run.do("export", record)
