"""Stage 'train': the threaded training of the drafter, on the main thread of the flow's process.

Never retried in place and never submitted to a task runner: replicas of a failed run are in an unknown state. Starting the
same run again warms up afresh and goes on from the last checkpoint.
"""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State

from dflash_core.evaluation.plots import read_metrics
from dflash_core.pipeline import StageResult
from tasks.run import Run
from tasks.tracker import StageRecord


@task(name="train", task_run_name="train", cache_policy=NO_CACHE, retries=0)
def train_drafter(run: Run) -> State[dict[str, Any]]:
    """Train the drafter. Call it directly, after ``warm_up``."""
    return run.do("train", _record)


def _record(stage: StageRecord, result: StageResult) -> None:
    """Curves come from the training's own record too: those of a cached training, and what a killed process had not passed on."""
    for metrics in read_metrics(result.folder / "metrics.jsonl"):
        stage.log_metrics(int(metrics.pop("step")), metrics)
    stage.log_artifact(result.folder / "training.json")
