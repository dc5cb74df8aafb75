"""Stage 'responses': read the prompts and let the target answer them."""

from __future__ import annotations

from typing import Any

from prefect.client.schemas.objects import State

from dflash_core.pipeline import StageResult
from tasks.run import Run, resumable
from tasks.tracker import StageRecord


@resumable("responses")
def build_responses(run: Run) -> State[dict[str, Any]]:
    """Answer the prompts; a retry goes on after the last answer."""

    def record(stage: StageRecord, result: StageResult) -> None:
        for item in run.plan.config.data.sources:
            stage.log_dataset(item.source, item.source, result.manifest.key, "prompts", item.model_dump(mode="json"))
        rejected = result.folder / "rejected.jsonl"
        if rejected.is_file():
            stage.log_artifact(rejected)

    return run.do("responses", record)
