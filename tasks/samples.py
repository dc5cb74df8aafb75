"""Stage 'samples': token ids with loss masks, split into training and held-out samples."""

from __future__ import annotations

import json
from typing import Any

from prefect.client.schemas.objects import State

from dflash_core.pipeline import StageResult
from tasks.run import Run, resumable
from tasks.tracker import StageRecord


@resumable("samples")
def write_samples(run: Run) -> State[dict[str, Any]]:
    """Render and tokenise the conversations."""
    return run.do("samples", _record)


def _record(stage: StageRecord, result: StageResult) -> None:
    card = json.loads((result.folder / "card.json").read_text(encoding="utf-8"))
    stage.log_dataset("samples", result.folder, card["digest"], "training", result.manifest.counts)
    stage.log_artifact(result.folder / "card.json")
    if (result.folder / "rejected.jsonl").is_file():
        stage.log_artifact(result.folder / "rejected.jsonl")
