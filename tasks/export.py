"""Stage 'export': the folder that servers load, registered as a version of the target's model."""

from __future__ import annotations

import json
from typing import Any

from prefect.client.schemas.objects import State

from dflash_core.pipeline import StageResult, drafter_folder, evaluation_of
from tasks.origin import git_tags
from tasks.registry import Exported
from tasks.run import Run, resumable
from tasks.tracker import StageRecord, flat_params


@resumable("export")
def export_drafter(run: Run) -> State[dict[str, Any]]:
    """Write the drafter's folder and check it against the trained drafter."""

    def record(stage: StageRecord, result: StageResult) -> None:
        run.version = run.tracker.register_model(exported(run, result))
        if run.version is not None:
            stage.set_tags({"dflash.model_version": run.version})

    return run.do("export", record)


def exported(run: Run, result: StageResult) -> Exported:
    """The drafter as it is registered: what it was made of and what was measured are its tags."""
    config, info = run.plan.config, run.plan.info
    folder = drafter_folder(result.folder)
    measured = run.results["evaluate"].manifest.counts
    served = evaluation_of(run.results["evaluate"].folder).as_served
    samples = json.loads((run.results["samples"].folder / "card.json").read_text(encoding="utf-8"))
    tags = {
        "target": info.name,
        "target.revision": info.revision,
        "target.digest": info.digest,
        "data.digest": samples["digest"],
        "git.commit": git_tags().get("mlflow.source.git.commit"),
        "config.digest": config.digest,
        **{name: measured[name] for name in ("lossless", "acceptance_length", "acceptance_length_pooled", "speedup")},
        "speedup.dtype": served.dtype,
    }
    return Exported(
        target=config.target.model,
        key=result.manifest.key,
        folder=folder,
        params={key: str(value) for key, value in flat_params(config.model_dump(mode="json", include={"drafter", "objective", "training"})).items()},
        tags={key: str(value) for key, value in tags.items() if value is not None},
        card=(folder / "README.md").read_text(encoding="utf-8"),
    )
