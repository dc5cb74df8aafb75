"""Stage 'train': the threaded training of the drafter, on the main thread of the flow's process.

Never retried in place and never submitted to a task runner: replicas of a failed run are in an unknown state. Starting the
same run again warms up afresh and goes on from the last checkpoint.
"""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State

from dflash_core.pipeline import StageResult
from dflash_core.training import EVALUATIONS, read_metrics
from tasks.run import Run
from tasks.tracker import StageRecord


@task(name="train", task_run_name="train", cache_policy=NO_CACHE, retries=0)
def train_drafter(run: Run) -> State[dict[str, Any]]:
    """Train the drafter. Call it directly, after ``warm_up``."""

    def tell_earlier_steps(stage: StageRecord) -> None:
        """Training's own records hold what a cached training did, and what an interrupted one did last."""
        for name in ("metrics.jsonl", EVALUATIONS):
            for metrics in read_metrics(run.plan.folder("train") / name):
                stage.log_metrics(int(metrics.pop("step")), metrics)

    def record(stage: StageRecord, result: StageResult) -> None:
        stage.log_artifact(result.folder / "training.json")

    return run.do("train", record, before=tell_earlier_steps)
