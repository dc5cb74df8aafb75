"""Stage 'target': fetch the model that is to be made faster, or find it, and check it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from prefect.client.schemas.objects import State

from dflash_core.pipeline import StageResult
from tasks.run import Run, resumable
from tasks.tracker import StageRecord


@resumable("target")
def fetch_target(run: Run) -> State[dict[str, Any]]:
    """Fetch and check the target; it is cached while its files are the same."""

    def record(stage: StageRecord, result: StageResult) -> None:
        info = asdict(run.plan.info)
        stage.set_tags({f"target.{name}": info[name] for name in ("name", "revision", "digest", "tokenizer_digest", "template_digest")})

    return run.do("target", record)
