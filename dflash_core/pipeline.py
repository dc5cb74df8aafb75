"""The stages of one run: found or run, one process at a time. What they depend on and where they stand is in ``plan``, what each does in ``runners``.

``run_stage`` returns at once when a verified result is there, and otherwise resumes whatever partial work it finds.

    plan = Plan(load_config("configs/demo.yaml"))
    for name in STAGES:
        run_stage(plan, name)                       # but 'warm_up', and 'shards' where plan.extracts is False
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from dflash_core.disk import clear_disk_errors
from dflash_core.errors import ConfigError, DFlashError, Problem
from dflash_core.plan import CODE_VERSIONS, Plan
from dflash_core.runners import RUNNERS, features_of, in_store, judge_of, make_missing_shards, run_train, vocabulary_of
from dflash_core.runners import drafter_folder as drafter_folder
from dflash_core.runners import evaluation_of as evaluation_of
from dflash_core.runners import evaluation_prompts as evaluation_prompts
from dflash_core.runners import measure_drafter as measure_drafter
from dflash_core.runners import planned_steps as planned_steps
from dflash_core.runners import shard_job as shard_job
from dflash_core.stages import (
    Manifest,
    MetricSink,
    Progress,
    Stopwatch,
    is_busy,
    make_ready,
    no_metrics,
    no_progress,
    stage_lock,
)
from dflash_core.target import resolve_target
from dflash_core.training import WarmUpReport
from dflash_core.training import warm_up as warm_up_replicas

# Files that a stage makes anew from the rest of its folder; where others are damaged, it begins from nothing.
_REPAIRABLE = {"shards": ("*",), "train": ("final/*", "training.json"), "evaluate": ("evaluation.json",)}
_LOOK_AGAIN_S = 0.5  # whether another process has finished its stage
_NOT_A_RESULT = {"train": ("checkpoints/*",)}  # may be deleted to save space
_CHECKED_BY_READER = {"shards": ("shard-*.safetensors",)}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StageResult:
    """A stage that is done: its manifest, and whether it was found done."""

    name: str
    folder: Path
    manifest: Manifest
    cached: bool
    seconds: float


def run_stage(
    plan: Plan,
    name: str,
    *,
    progress: Progress = no_progress,
    on_metrics: MetricSink = no_metrics,
    share: bool = False,
) -> StageResult:
    """Run one stage, or find it done; partial work of a killed process is resumed.

    ``share``: where another process runs the stage 'shards', help it.

    Why it is run is told the log: as a warning where a finished stage was damaged since.
    Warm-up has no result on disk: it is ``warm_up`` below, and training calls it where it is missing.

    Raises:
        DFlashError: the stage cannot be done; the message says what to do. What is finished so far is kept.
    """
    if name == "warm_up":
        raise ValueError("warm_up leaves nothing on disk: call pipeline.warm_up")
    if name == "shards" and not plan.extracts:
        raise ConfigError(plan.source, [Problem("training.feed", "online", "there is nothing to extract", "Set training.feed to shards")])
    watch = Stopwatch()
    found = plan.stage(name)
    if found.manifest is not None and found.folder is not None:
        return StageResult(name, found.folder, found.manifest, True, watch.seconds)
    folder, key = plan.folder(name), plan.key(name)
    assert key is not None
    if share and name == "shards" and is_busy(folder):
        return _help_with_shards(plan, folder, progress, watch)
    with clear_disk_errors(folder, 0, "What is finished is kept: free some space and start again.", DFlashError), stage_lock(folder):
        found = plan.stage(name)  # another process may have finished it while this one waited for nothing but the lock
        if found.manifest is not None:
            return StageResult(name, folder, found.manifest, True, watch.seconds)
        damaged = Manifest.read(folder) is not None
        logger.log(logging.WARNING if damaged else logging.INFO, "%s is run: %s", name, found.why_not)
        make_ready(folder, key, _REPAIRABLE.get(name, ()), sweep=name != "shards")  # their writer sweeps before each shard that it claims
        counts = RUNNERS[name](plan, folder, progress, on_metrics)
        manifest = Manifest.write(
            folder, stage=name, key=key, counts=counts, seconds=watch.seconds, code_version=CODE_VERSIONS[name],
            leave_out=_NOT_A_RESULT.get(name, ()), checked_by_reader=_CHECKED_BY_READER.get(name, ()),
        )  # fmt: skip
    return StageResult(name, folder, manifest, False, manifest.seconds)  # as it will be told of it when it is found


def _help_with_shards(plan: Plan, folder: Path, progress: Progress, watch: Stopwatch) -> StageResult:
    """Extract beside the process that holds the stage, until it says that the stage is done. Takes its place should it die.

    A dataset that is finished in the store is for the other one to fetch.
    """
    if not in_store(plan, folder):
        make_missing_shards(plan, folder, progress)
    while (found := plan.stage("shards").manifest) is None:
        if not is_busy(folder):
            return run_stage(plan, "shards", progress=progress)
        time.sleep(_LOOK_AGAIN_S)
    return StageResult("shards", folder, found, False, watch.seconds)


def warm_up(plan: Plan) -> WarmUpReport | None:
    """Warm up the replicas of a plan for the training that follows in this process; None if training is done already.

    Raises:
        WarmUpError: not called on the main thread.
        DFlashError: the stage 'shards' has not run.
    """
    if plan.stage("train").cached:
        return None
    planned_steps(plan)
    return warm_up_replicas(
        plan.config, run_id=plan.run_id, dataset=features_of(plan), info=plan.info, vocabulary=vocabulary_of(plan), folder=plan.folder("train"),
        judge=judge_of(plan),
    )  # fmt: skip


def train_beside(plan: Plan) -> None:
    """The part of a rank other than 0 in the stage 'train' of a run under torchrun. Rank 0 runs the stage, and writes all there is to write.

    Raises:
        DFlashError: as ``run_stage`` does, or because another process has gone.
    """
    if not plan.knows_target:
        plan.learn_target(resolve_target(plan.config.target))
    run_train(plan, plan.folder("train"), no_progress, no_metrics)
