"""Stage 'shards': the target's hidden states at the tapped layers, on disk."""

from __future__ import annotations

from typing import Any

from prefect.client.schemas.objects import State

from dflash_core.pipeline import StageResult
from tasks.run import Run, resumable
from tasks.tracker import StageRecord


@resumable("shards")
def extract_shards(run: Run) -> State[dict[str, Any]]:
    """Extract hidden states; a retry goes on after the last whole shard."""
    return run.do("shards", _record)


def _record(stage: StageRecord, result: StageResult) -> None:
    stage.log_dataset("shards", result.folder, result.manifest.key, "training", result.manifest.counts)
    stage.log_artifact(result.folder / "card.json")
