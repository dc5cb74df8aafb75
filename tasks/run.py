"""What the tasks of one run share, and what every stage's task does around ``pipeline.run_stage``.

A ``Run`` lives in the flow's process and is handed to its tasks, which are called directly on the main thread: the plan
holds the loaded target, and warm-up and training share live models.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.states import Completed

from dflash_core import pipeline
from dflash_core.config import PipelineConfig
from dflash_core.errors import ConfigError, Problem
from dflash_core.pipeline import StageResult
from dflash_core.plan import Plan
from dflash_core.stages import stage_lock
from dflash_core.training import check_launcher, under_torchrun
from dflash_core.words import duration
from tasks.logs import flow_run_logs
from tasks.progress import LogWatcher, ProgressTeller, Watcher, watcher
from tasks.registry import Version
from tasks.system import system_metrics
from tasks.tracker import StageRecord, Tracker

logger = logging.getLogger(__name__)

Record = Callable[[StageRecord, StageResult], None]
"""What a stage adds to its MLflow run once it is done."""


class Run:
    """One run of the pipeline: plan, tracker, results so far."""

    def __init__(self, plan: Plan, tracker: Tracker, watched_by: Watcher):
        self.plan = plan
        self.tracker = tracker
        self.watcher = watched_by
        self.results: dict[str, StageResult] = {}
        self.version: Version | None = None
        """The registered drafter, once it is exported; None where nothing is recorded."""

    @classmethod
    @contextlib.contextmanager
    def open(cls, config: PipelineConfig) -> Iterator[Run]:
        """The run of a configuration, its folder held for this process and its MLflow run ended with the block.

        Raises:
            ConfigError: the configuration does not fit this machine or the target.
            StageBusyError: the same run is going on in another process.
            TrackingError: the MLflow store cannot be used.
        """
        if under_torchrun():
            remedy = "Train with `torchrun … -m dflash_core train CONFIG`, and then start this without torchrun"
            raise ConfigError("config", [Problem("training.launcher", config.training.launcher, "flows are not started by torchrun", remedy)])
        plan = Plan(config)
        if not plan.stage("train").cached:
            check_launcher(config)
        with stage_lock(plan.run_folder), flow_run_logs(), Tracker.open(config, plan.run_folder) as tracker:
            yield cls(plan, tracker, watcher.get() or LogWatcher())

    def do(self, name: str, record: Record | None = None, before: Callable[[StageRecord], None] | None = None) -> State[dict[str, Any]]:
        """Run a stage or find it done, tell those who watch, and record it in MLflow.

        Args:
            record: adds to the stage's MLflow run once the stage is done.
            before: adds to it before the stage begins.

        Returns:
            A Completed state, named "Cached" where the results were found and verified, with the stage's counts.
        """
        with self.tracker.stage(name) as stage_record, system_metrics(stage_record), self.watched(name) as watched:

            def on_metrics(step: int, metrics: Mapping[str, float]) -> None:
                stage_record.log_metrics(step, metrics)
                self.watcher.metrics(name, step, metrics)

            if before is not None:
                before(stage_record)
            result = pipeline.run_stage(self.plan, name, progress=watched, on_metrics=on_metrics)
            _record_result(stage_record, result)
            if record is not None:
                record(stage_record, result)
            watched.outcome = f"cached (took {duration(result.manifest.seconds)})" if result.cached else f"done in {duration(result.seconds)}"
        self.results[name] = result
        return as_state(result)

    @contextlib.contextmanager
    def watched(self, name: str) -> Iterator[ProgressTeller]:
        """Tell those who watch that a stage begins, how it goes on, and its ``outcome``."""
        self.watcher.begin(name)
        teller = ProgressTeller(name, self.watcher)
        try:
            with teller.running():
                yield teller
        finally:
            self.watcher.end(name, teller.outcome)


def publish(artifact: Callable[[], object]) -> None:
    """Create a Prefect artifact; a server that is away costs the artifact, not the run."""
    try:
        artifact()
    except Exception as error:
        logger.warning("An artifact was not published: %s", error)


def as_state(result: StageResult) -> State[dict[str, Any]]:
    """How a stage's end looks in Prefect."""
    facts = {"folder": str(result.folder), "key": result.manifest.key, "seconds": round(result.seconds, 3), **result.manifest.counts}
    if result.cached:
        return Completed(name="Cached", message=f"found in {result.folder} and verified", data=facts)
    return Completed(message=f"done in {result.seconds:.1f} s", data=facts)


def resumable(name: str) -> Callable[[Callable[[Run], State[dict[str, Any]]]], Task[[Run], State[dict[str, Any]]]]:
    """Decorator of the task of a stage that may be tried again in place. Stages go on from their own partial work.

    Nothing is cached by Prefect, here and in all tasks: a stage's manifest is its cache, and is believed after a look at the files.
    """
    return task(name=name, task_run_name=name, cache_policy=NO_CACHE, retries=2, retry_delay_seconds=[5.0, 30.0], retry_condition_fn=_worth_retrying)


def _worth_retrying(task: Task[Any, Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Trying again may help a network or a disk, not wrong input or a bug."""
    try:
        state.result()
    except OSError:
        return True
    except BaseException:
        return False
    return False


def _record_result(record: StageRecord, result: StageResult) -> None:
    manifest = result.manifest
    record.set_tags({"dflash.cached": str(result.cached).lower(), "dflash.stage_key": manifest.key, "dflash.folder": result.folder.resolve()})
    record.log_params({name: value for name, value in manifest.counts.items() if isinstance(value, str | int | bool)})
    numbers = {name: float(value) for name, value in manifest.counts.items() if isinstance(value, int | float)}
    record.log_results({**numbers, "seconds": manifest.seconds})
