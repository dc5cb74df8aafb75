"""Stage 'evaluate': real draft-and-verify decoding of held-out prompts. And the same for a drafter from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State

from dflash_core import evaluation as core
from dflash_core import pipeline
from dflash_core.config import PipelineConfig
from dflash_core.drafter import load_checkpoint, target_problems
from dflash_core.drafter.checkpoint import read_drafter_config
from dflash_core.errors import CheckpointError, InputError, Problem
from dflash_core.evaluation import EvaluationResult, digest_of_drafter
from dflash_core.pipeline import StageResult, evaluation_of
from dflash_core.plan import Plan
from dflash_core.stages import Progress, Stopwatch
from dflash_core.words import duration
from tasks.registry import CHAMPION, Registry, fetched
from tasks.run import Run, publish, resumable
from tasks.store import open_client
from tasks.tracker import StageRecord


@resumable("evaluate")
def evaluate_drafter(run: Run) -> State[dict[str, Any]]:
    """Decode the held-out prompts; a retry goes on after the last finished prompt."""

    def record(stage: StageRecord, result: StageResult) -> None:
        _record(run, stage, result.folder)

    return run.do("evaluate", record)


@task(name="measure-drafter", task_run_name="measure-drafter", cache_policy=NO_CACHE, retries=0)
def measure_drafter(run: Run, drafter: str) -> dict[str, float]:
    """Decode the held-out prompts with a drafter of a folder, the champion or a registered version; returns the headline figures."""
    folder = find_drafter(run.plan.config, drafter)
    watch = Stopwatch()
    with run.tracker.stage("evaluate") as stage, run.watched("evaluate") as watched:
        stage.set_tags({"dflash.drafter": drafter, "dflash.folder": folder.resolve()})
        measured = evaluate_folder(run.plan, folder, watched)
        _record(run, stage, measured)
        watched.outcome = f"done in {duration(watch.seconds)}"
    return evaluation_of(measured).headline()


def evaluate_folder(plan: Plan, folder: Path, progress: Progress) -> Path:
    """Measure the drafter of a folder on the held-out prompts of a plan; prompts that were measured before are not again.

    Returns:
        The folder with ``evaluation.json``.

    Raises:
        CheckpointError: the folder holds no drafter, or one for another target.
    """
    require_drafter(plan, folder)
    drafter = load_checkpoint(folder)
    destination = plan.run_folder / "evaluations" / digest_of_drafter(drafter)[:12]
    pipeline.measure_drafter(plan, drafter, destination, progress=progress)
    return destination


def require_drafter(plan: Plan, folder: Path) -> None:
    """Raise ``CheckpointError`` if the folder holds no drafter for the target of a plan; reads its configuration alone."""
    if problems := list(target_problems(read_drafter_config(folder), plan.info)):
        raise CheckpointError("\n  ".join([f"{folder} is not a drafter for {plan.info.name}:", *problems]))


def find_drafter(config: PipelineConfig, drafter: str) -> Path:
    """The folder that is named, or that of a registered version: 'champion', or its number.

    Raises:
        InputError: there is no such folder, or no such version.
        TrackingError: the store cannot be used, or has the version without its files.
    """
    if drafter != CHAMPION and not (drafter.isascii() and drafter.isdecimal()):  # a folder of such a name is ./champion, ./3
        if Path(drafter).is_dir():
            return Path(drafter)
        remedy = f"Name a folder, '{CHAMPION}' or the number of a version"
        raise InputError("drafter", [Problem("drafter", drafter, "there is no such folder", remedy)])
    client, uri = open_client(config)
    registry = Registry(client, uri)
    name = registry.name_of(config.target.model)
    version = registry.champion(name) if drafter == CHAMPION else registry.version(name, drafter)
    if version is None:
        message = f"no version of {name} in {uri} is the champion" if drafter == CHAMPION else f"{name} has no such version in {uri}"
        remedy = "Train one (retrain-drafter promotes it), give a version the alias in MLflow, or name a folder"
        raise InputError("drafter", [Problem("drafter", drafter, message, remedy)])
    return fetched(registry, version, config.run.workspace)


def _record(run: Run, stage: StageRecord, folder: Path) -> None:
    stage.log_artifact(folder / "evaluation.json")
    evaluation = evaluation_of(folder)
    run.tracker.log_metrics(evaluation.metrics())  # of the parent too: it is what runs are compared by
    publish(lambda: create_table_artifact(acceptance_table(evaluation), key="acceptance", description="Acceptance of the drafter"))
    publish(lambda: create_table_artifact(core.sets_table(evaluation), key="evaluation-sets", description="Every set, with 95 % intervals"))
    if served := core.served_table(evaluation):
        publish(lambda: create_table_artifact(served, key="evaluation-served", description="Every set in the precision of serving"))
    if ways := core.ways_table(evaluation):
        publish(lambda: create_table_artifact(ways, key="evaluation-ways", description="Every way of decoding, with 95 % intervals"))


def acceptance_table(evaluation: EvaluationResult) -> list[dict[str, str]]:
    """Acceptance length and the share of blocks whose slot k was accepted, after training and before it."""
    trained = evaluation.trained.acceptance
    untrained = evaluation.untrained.acceptance if evaluation.untrained else None
    rows = [
        ("acceptance length, mean of requests", trained.mean_of_requests, untrained.mean_of_requests if untrained else None),
        ("acceptance length, pooled", trained.pooled, untrained.pooled if untrained else None),
    ]
    for slot, share in enumerate(trained.per_position, start=1):
        rows.append((f"slot {slot} accepted", share, untrained.per_position[slot - 1] if untrained else None))
    return [
        {"": name, "after training": f"{value:.3f}", "before training": "" if before is None else f"{before:.3f}"} for name, value, before in rows
    ]
