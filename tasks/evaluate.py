"""Stage 'evaluate': real draft-and-verify decoding of held-out prompts."""

from __future__ import annotations

from typing import Any

from prefect.artifacts import create_table_artifact
from prefect.client.schemas.objects import State

from dflash_core.evaluation import EvaluationResult
from dflash_core.pipeline import StageResult, evaluation_of
from tasks.run import Run, resumable
from tasks.tracker import StageRecord


@resumable("evaluate")
def evaluate_drafter(run: Run) -> State[dict[str, Any]]:
    """Decode the held-out prompts; a retry goes on after the last finished prompt."""

    def record(stage: StageRecord, result: StageResult) -> None:
        stage.log_artifact(result.folder / "evaluation.json")
        evaluation = evaluation_of(result.folder)
        run.tracker.log_metrics(evaluation.headline())  # of the parent too: it is what runs are compared by
        run.publish(lambda: create_table_artifact(acceptance_table(evaluation), key="acceptance", description="Acceptance of the drafter"))

    return run.do("evaluate", record)


def acceptance_table(evaluation: EvaluationResult) -> list[dict[str, str]]:
    """Acceptance length and the share of blocks whose slot k was accepted, trained and untrained."""
    trained = evaluation.trained.acceptance
    untrained = evaluation.untrained.acceptance if evaluation.untrained else None
    rows = [
        ("acceptance length, mean of requests", trained.mean_of_requests, untrained.mean_of_requests if untrained else None),
        ("acceptance length, pooled", trained.pooled, untrained.pooled if untrained else None),
    ]
    for slot, share in enumerate(trained.per_position, start=1):
        rows.append((f"slot {slot} accepted", share, untrained.per_position[slot - 1] if untrained else None))
    return [{"": name, "trained": f"{value:.3f}", "untrained": "" if before is None else f"{before:.3f}"} for name, value, before in rows]
