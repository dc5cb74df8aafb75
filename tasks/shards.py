"""Stage 'shards': the target's hidden states at the tapped layers, on disk."""

from __future__ import annotations

from typing import Any

from prefect.client.schemas.objects import State
from prefect.states import Completed

from dflash_core.pipeline import StageResult
from dflash_core.plan import ONLINE
from tasks.run import Run, resumable
from tasks.tracker import StageRecord


@resumable("shards")
def extract_shards(run: Run) -> State[dict[str, Any]]:
    """Extract hidden states; a retry goes on after the last whole shard. Nothing where targets feed the training."""
    if not run.plan.extracts:
        with run.tracker.stage("shards") as record, run.watched("shards") as watched:
            watched.outcome = ONLINE
            record.set_tags({"dflash.cached": "true"})
        return Completed(name="Cached", message=ONLINE, data={})
    return run.do("shards", _record)


def _record(stage: StageRecord, result: StageResult) -> None:
    stage.log_dataset("shards", result.folder, result.manifest.key, "training", result.manifest.counts)
    stage.log_artifact(result.folder / "card.json")
