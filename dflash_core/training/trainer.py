"""Threaded training: one worker per replica, and the main thread that watches over them.

    result = DrafterTrainer(TrainingSession.get(run_id, config)).run(on_metrics)
    result = train(config, run_id=..., dataset=..., info=..., vocabulary=..., folder=...)    # warms up first if nobody has

The main thread never joins a thread (before Python 3.13 a signal during a join loses the thread); it waits on an event, a moment at a time,
and in between passes metrics on and looks for stalls. Whatever reaches it from outside (Ctrl-C, Prefect's TerminationSignal) becomes a stop
vote: the workers agree to stop after the same step, replica 0 writes a checkpoint, and then the signal goes on its way.

Files in the training folder: ``checkpoints/`` while it runs, ``metrics.jsonl``, and in the end ``final/model.safetensors`` (fp32 masters
under the names that serving expects) and ``training.json``; with ``training.evaluation`` also ``evaluations.jsonl`` and ``best/model.safetensors``.
"""

from __future__ import annotations

import contextvars
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfile
from typing import Any

import torch

from dflash_core.config import PipelineConfig
from dflash_core.errors import TrainingError
from dflash_core.feed import Feed, LiveSamples, TargetRows
from dflash_core.shards import ShardDataset
from dflash_core.stages import MetricSink, Progress, atomic_write, no_metrics, no_progress, write_json_atomic
from dflash_core.target import TargetInfo, TargetVocabulary
from dflash_core.training.checkpoints import (
    FINAL,
    MODEL,
    BestWeights,
    TrainingCheckpoint,
    TrainingState,
    folder_of_step,
    kept_weights,
    save_training_checkpoint,
)
from dflash_core.training.evaluation_thread import EvaluationThread
from dflash_core.training.evaluator import Evaluation, Judge
from dflash_core.training.guard import CompileGuard
from dflash_core.training.memory import watches
from dflash_core.training.metrics import MetricLog, NoLog, bottleneck_in_words
from dflash_core.training.session import TrainingSession, intra_op_threads, require_main_thread
from dflash_core.training.warming import warm_up
from dflash_core.training.worker import Shared, Worker, describe_nonfinite

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.2
_GRACE_S = 25.0  # to finish a step and write a checkpoint; Prefect leaves 30 s
_ABORT_GRACE_S = 5.0


@dataclass(frozen=True)
class TrainingResult:
    """What a run has come to.

    finished: all steps are done; False if a stop was asked for, and the same call resumes
    weights:  those to go on with, by ``training.keep``: the last ones in fp32, or the best ones; None unless finished
    metrics:  of the last record
    best:     of the steps that were evaluated; None if none was
    """

    finished: bool
    steps: int
    total_steps: int
    skipped_steps: int
    slots: int
    seconds: float
    metrics: Mapping[str, float]
    weights: Path | None
    best: BestWeights | None = None


class DrafterTrainer:
    """Runs a warmed session to its end, once."""

    def __init__(self, session: TrainingSession):
        self.session = session

    def run(
        self,
        on_metrics: MetricSink = no_metrics,
        stop: threading.Event | None = None,
        *,
        progress: Progress = no_progress,
    ) -> TrainingResult:
        """Train until all steps are done or ``stop`` is set.

        Args:
            on_metrics: called on the main thread with (step, metrics) for every record
            stop:       set it from any thread to end after the current step, with a checkpoint
            progress:   called on the main thread with finished steps, all steps, "steps"

        Raises:
            WarmUpError: not on the main thread, or the session has been used.
            LateCompilationError: something compiled after warm-up.
            TrainingError: replicas differ, gradients stay non-finite, or nothing moves.
            Exception: whatever a worker or the feed raised, with its own traceback and a note of replica and step.
        """
        require_main_thread("Training")
        session, training = self.session, self.session.config.training
        session.take()
        session.folder.mkdir(parents=True, exist_ok=True)
        targets = {loader.source.device for loader in session.loaders if isinstance(loader.source, TargetRows)}
        memory = watches([replica.device for replica in session.replicas], targets, training.strict_memory)
        log = NoLog() if not session.writes else MetricLog(
            session.folder / "metrics.jsonl", on_metrics, log_every=training.log_every,
            tokens_per_step=session.config.rows_per_step * training.row_length,
            memory=memory, resumed_step=session.state.step,
        )  # fmt: skip
        with intra_op_threads(session.threads_per_replica), CompileGuard() as guard, self._feed(guard) as feed:
            shared = Shared(session, feed, guard, memory, stop, self._save)
            if session.ranks is not None:
                session.ranks.agree("first step", str(session.state.step))  # the first rank may have had an evaluator to warm up
                session.ranks.on_loss = shared.lose
                session.ranks.check()  # whoever was lost before somebody listened
            state = _Supervisor(shared, log, progress).run()
        return self._finish(state, log)

    def _feed(self, guard: CompileGuard) -> Feed:
        session, training = self.session, self.session.config.training

        @contextmanager
        def within() -> Iterator[None]:
            torch.set_num_threads(session.threads_per_replica)
            with guard.explained():
                yield

        return Feed(
            session.loaders, replicas=len(training.devices), rows_per_microstep=training.rows_per_microstep, queue_rows=training.queue_rows,
            start_ordinal=session.state.next_ordinal, stop_ordinal=session.total_steps * session.config.rows_per_step,
            only=None if session.ranks is None else session.ranks.rank, within=within,
        )  # fmt: skip

    def _save(self, checkpoint: TrainingCheckpoint) -> None:
        session = self.session
        folder = save_training_checkpoint(session.folder / "checkpoints", checkpoint, session.settings, session.config.training.keep_checkpoints)
        logger.info("Checkpoint of step %d: %s", checkpoint.state.step, folder)

    def _finish(self, state: TrainingState, log: MetricLog | NoLog) -> TrainingResult:
        session = self.session
        finished = state.step == session.total_steps
        if finished and session.writes:
            with atomic_write(session.folder / FINAL) as temporary:
                copyfile(folder_of_step(session.folder / "checkpoints", state.step) / MODEL, temporary)
        best = session.evaluator.best if session.evaluator is not None else None
        kept = session.folder / kept_weights(session.config.training.keep, has_best=best is not None)
        if log.last:
            logger.info("Feed: %s", bottleneck_in_words(log.last))
        result = TrainingResult(
            finished, state.step, session.total_steps, state.skipped, state.slots, round(state.seconds, 3),
            dict(log.last), kept if finished else None, best,
        )  # fmt: skip
        if finished and session.writes:
            facts = dataclasses.asdict(result) | {"weights": FINAL}
            write_json_atomic(session.folder / "training.json", facts)
        return result


def train(
    config: PipelineConfig, *, run_id: str, dataset: ShardDataset | LiveSamples, info: TargetInfo, vocabulary: TargetVocabulary, folder: Path,
    judge: Callable[[], Judge] | None = None, on_metrics: MetricSink = no_metrics, progress: Progress = no_progress,
) -> TrainingResult:  # fmt: skip
    """Train with the session that ``warm_up`` left in this process, or warm up first if there is none. Arguments and errors: those two's."""
    session = TrainingSession.get(run_id, config)
    if session is None:
        warm_up(config, run_id=run_id, dataset=dataset, info=info, vocabulary=vocabulary, folder=folder, judge=judge)
        session = TrainingSession.get(run_id, config)
        assert session is not None
    return DrafterTrainer(session).run(on_metrics, progress=progress)


class _Supervisor:
    """Starts the workers and the evaluator and waits for them, on the main thread."""

    def __init__(self, shared: Shared, log: MetricLog | NoLog, progress: Progress):
        self._shared = shared
        self._log = log
        self._progress = progress
        self._stall_timeout_s = shared.session.config.training.stall_timeout_s
        self._workers = [Worker(shared, replica, sync) for replica, sync in zip(shared.session.replicas, shared.session.syncs, strict=True)]
        self._threads: dict[str, Worker | EvaluationThread] = {worker.replica.name: worker for worker in self._workers}
        if shared.session.evaluator is not None:
            shared.evaluation = EvaluationThread(shared, shared.session.evaluator)
            self._threads[shared.evaluation.name] = shared.evaluation

    def run(self) -> TrainingState:
        self._shared.still_alive()
        if self._shared.session.first_evaluation is not None:
            self._shared.records.append(self._shared.session.first_evaluation)
        for name, thread in self._threads.items():
            context = contextvars.copy_context()  # Prefect's run context and torch's configuration are kept in it
            threading.Thread(target=context.run, args=(thread.run,), name=name, daemon=True).start()
        try:
            self._wait_and_record(None)
        except BaseException:
            self._shared.stop.set()
            self._log.mute()  # whoever listens may be what failed; the file still gets the last steps
            if not self._wait_and_record(_GRACE_S):
                logger.warning("Stopping without a checkpoint of the last steps, since %s.", self._who_waits_for_what())
                self._shared.abort()
                self._wait(_ABORT_GRACE_S)
            elif self._shared.failures:
                logger.warning("Stopping without a checkpoint of the last steps: %s", self._shared.failures[0])
            raise
        if self._shared.failures:
            raise self._shared.failures[0]
        return self._workers[0].future.result()

    def _wait_and_record(self, seconds: float | None) -> bool:
        """Record steps until all workers have ended (True) or the time is up (False). Without a time limit, a stall is an error."""
        deadline = time.monotonic() + (seconds or 0.0)
        while not self._wait(min(_LOOK_EVERY_S, self._stall_timeout_s / 4)):
            self._pass_on_records()
            if seconds is None:
                self._check_progress()
            elif time.monotonic() > deadline:
                return False
        self._pass_on_records()
        self._log.flush()
        return True

    def _wait(self, seconds: float) -> bool:
        """True once all workers have ended. After a failure the rest ends within ``_ABORT_GRACE_S`` or is left behind."""
        self._shared.wake.wait(seconds)
        self._shared.wake.clear()
        # whoever is to stop has the workers' checkpoint to wait for, and no evaluation
        threads = self._workers if self._shared.stop.is_set() else self._threads.values()
        futures: list[Future[Any]] = [thread.future for thread in threads]
        if self._shared.failures:
            if wait(futures, timeout=_ABORT_GRACE_S).not_done:
                logger.warning("Left behind after a failure: %s.", self._who_waits_for_what())
            return True
        return all(future.done() for future in futures)

    def _pass_on_records(self) -> None:
        while self._shared.records:
            record = self._shared.records.popleft()
            if isinstance(record, threading.Event):
                try:
                    self._log.flush()
                finally:
                    record.set()
                continue
            if isinstance(record, Evaluation):
                self._log.add_evaluation(record)
                continue
            if record.totals.skipped:
                logger.warning("Step %d was skipped on all replicas: %s.", record.state.step, describe_nonfinite(record.totals))
            self._progress(record.state.step, self._shared.session.total_steps, "steps")
            self._log.add(record)

    def _check_progress(self) -> None:
        if time.monotonic() - self._shared.last_progress < self._stall_timeout_s:
            return
        error = TrainingError(
            f"No step has finished for training.stall_timeout_s = {self._stall_timeout_s:g} seconds: {self._who_waits_for_what()}. Look at whoever "
            "does not wait for others. If a step may take that long, raise the timeout. Start again to resume from the last checkpoint."
        )
        self._shared.failures.append(error)
        self._shared.abort()
        raise error

    def _who_waits_for_what(self) -> str:
        now = time.monotonic()
        busy = [(name, thread.beacon) for name, thread in self._threads.items()] + [(loader.name, loader) for loader in self._shared.feed.loaders]
        return "; ".join(f"{name} {what.doing}, since {now - what.since:.1f} s" for name, what in busy)
