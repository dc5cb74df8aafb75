"""What one thread does: take rows, compute, meet the other replicas, apply, until everybody agrees to stop.

All decisions that must be the same on all replicas (stop, skip, give up) are read from the summed tail of the same step, so they are the
same without any further talk. On CUDA the tail is read one step late, so that the host never waits for the device.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from dflash_core.errors import TrainingError
from dflash_core.feed import Feed
from dflash_core.training.checkpoints import TrainingCheckpoint, TrainingState
from dflash_core.training.evaluator import Evaluation
from dflash_core.training.guard import CompileGuard
from dflash_core.training.meeting import InterruptedByOthers
from dflash_core.training.memory import MemoryWatch
from dflash_core.training.replica import Replica, gather
from dflash_core.training.schedule import learning_rate
from dflash_core.training.session import TrainingSession
from dflash_core.training.span import Span
from dflash_core.training.staging import Batches, BatchesFromFeed, StagedBatches
from dflash_core.training.sync import GradientSync, StepTotals, compare

if TYPE_CHECKING:
    from dflash_core.training.evaluation_thread import EvaluationThread


class Beacon:
    """What a worker is doing now, for whoever wonders why nothing moves."""

    def __init__(self) -> None:
        self.doing = "starts"
        self.since = time.monotonic()

    def __call__(self, doing: str) -> None:
        self.doing, self.since = doing, time.monotonic()


@dataclass(frozen=True)
class StepRecord:
    """A finished step, as replica 0 reports it. ``state`` stands after the step; seconds and waits are of this step.

    data_wait:   seconds that replica 0 waited for rows
    sync:        seconds from its own gradients to the sums of all, and for what of the weights is exchanged: waits for slower replicas are in it
    source_wait: seconds that a loader or target waited for room in the queue, the mean over them
    """

    totals: StepTotals
    learning_rate: float
    state: TrainingState
    seconds: float
    data_wait: float
    sync: float
    source_wait: float
    queue_depth: int


class Shared:
    """What the workers, the evaluator and the main thread have in common. Plain attributes that one side writes; no lock is held while working."""

    def __init__(
        self,
        session: TrainingSession,
        feed: Feed,
        guard: CompileGuard,
        memory: Sequence[Sequence[MemoryWatch]],
        user_stop: threading.Event | None,
        save: Callable[[TrainingCheckpoint], None],
    ):
        self.session = session
        self.feed = feed
        self.guard = guard
        self.memory = memory  # of each replica
        self.stop = threading.Event()
        self.user_stop = user_stop
        self.aborted = threading.Event()
        self.wake = threading.Event()  # there is something for the main thread to look at
        self.failures: list[BaseException] = []
        self.last_progress = time.monotonic()
        self.records: deque[StepRecord | Evaluation | threading.Event] = deque()  # an event is set once everything before it has been recorded
        self.save = save
        self.evaluation: EvaluationThread | None = None

    @property
    def stop_requested(self) -> bool:
        return self.stop.is_set() or (self.user_stop is not None and self.user_stop.is_set())

    def abort(self) -> None:
        """End all workers as soon as they next wait for anything."""
        self.aborted.set()
        self.session.syncs[0].meeting.abort()
        self.feed.close()

    def fail(self, error: BaseException, note: str) -> None:
        """End the run for an error of the calling thread. The first error is the cause; what other threads meet after it is its consequence."""
        if not isinstance(error, InterruptedByOthers) and not self.aborted.is_set():
            error.add_note(note)
            self.failures.append(error)
        self.abort()

    def still_alive(self) -> None:
        """Something has moved: the run has not stalled."""
        self.last_progress = time.monotonic()

    def lose(self, error: BaseException) -> None:
        """End the run because another process of it has gone."""
        self.fail(error, "Noticed between steps.")
        self.wake.set()

    def wait_for_records(self) -> None:
        """Return once the main thread has recorded every step so far, so that a checkpoint never knows of steps that the metrics do not.

        After an abort it records them while the workers end; a step that all replicas have finished is then still worth its checkpoint.
        """
        recorded = threading.Event()
        self.records.append(recorded)
        self.wake.set()
        while not recorded.wait(0.2) and not self.aborted.is_set():
            pass

    def check(self) -> None:
        """Raises ``InterruptedByOthers`` once aborted."""
        if self.aborted.is_set():
            raise InterruptedByOthers


class Worker:
    """The loop of one replica. ``run`` is the thread's whole life; its outcome is in ``future``: the state after the last step."""

    def __init__(self, shared: Shared, replica: Replica, sync: GradientSync):
        self.shared = shared
        self.replica = replica
        self.sync = sync
        self.beacon = Beacon()
        self.future: Future[TrainingState] = Future()
        self._training = shared.session.config.training
        self._memory = shared.memory[shared.session.replicas.index(replica)]
        self._state = shared.session.state
        self._pending: deque[tuple[int, Callable[[], StepTotals], float, float, Sequence[Span]]] = deque()
        self._mark = time.monotonic()  # when the last step had finished, or the first one began
        self._source_mark = shared.feed.loaders_waited  # at the same moment
        self._stopping = False
        self._batches: Batches = BatchesFromFeed(shared.feed, replica.index)

    def run(self) -> None:
        """Train until done, stopped or broken; never raises."""
        try:
            torch.set_num_threads(self.shared.session.threads_per_replica)
            with self.replica.on_device(), self.shared.guard.explained():
                self._train()
                if self.replica.index == 0 and self.shared.evaluation is not None:
                    self.beacon("waits for the evaluator")
                    self.shared.evaluation.finish(self._state.step)
            self.beacon("is done")
            self.future.set_result(self._state)
        except BaseException as error:
            self.shared.fail(error, f"In {self.replica.name}, step {self._state.step + len(self._pending) + 1}, while it {self.beacon.doing}.")
            self.beacon("has failed")
            self.future.set_exception(error)
        self._batches.close()
        self.shared.wake.set()

    def _train(self) -> None:
        session, training = self.shared.session, self._training
        lag = 1 if self.replica.device.type == "cuda" else 0
        saved = session.state.step
        self._begin_count(time.monotonic())
        if self.replica.staging is not None:
            first, stop = (step * training.accumulation_steps for step in (session.state.step, session.total_steps))
            self._batches = StagedBatches(self.shared.feed, self.replica.index, self.replica.staging, first, stop, self.replica.name)
        for step in range(session.state.step, session.total_steps):
            self._step(step)
            finished = step + 1
            if self.replica.index == 0 and self.shared.evaluation is not None:
                self.shared.evaluation.offer(finished)
            due = finished % training.checkpoint_every == 0 or finished == session.total_steps
            comparing = finished % training.compare_replicas_every == 0
            self._read_totals(0 if due or comparing or self._stopping else lag)
            if comparing and self.sync.size > 1:
                self.beacon(f"compares replicas after step {finished}")
                compare(self.sync, self.replica.checksums(), self.replica.describe_checksum, finished)
            if due:
                self._checkpoint()
                saved = finished
            if self._stopping:
                break
        self._read_totals(0)
        if saved != self._state.step:
            self._checkpoint()

    def _step(self, step: int) -> None:
        session, training, replica = self.shared.session, self._training, self.replica
        waited = 0.0
        rate = learning_rate(training, step, session.total_steps)
        replica.begin_step()
        for m in range(training.accumulation_steps):
            self.beacon(f"waits for the rows of micro-step {m} of step {step + 1}")
            asked = time.monotonic()
            batch = self._batches.take(step * training.accumulation_steps + m)
            waited += time.monotonic() - asked
            self.shared.check()
            self.beacon(f"computes micro-step {m} of step {step + 1}")
            replica.micro_step(batch)
            self._batches.release()
        replica.close_step(self.shared.stop_requested)
        self.beacon(f"waits for the other replicas in step {step + 1}")
        with Span(replica.device) as summing:
            self.sync.sum_gradients(replica)
        self.beacon(f"applies step {step + 1}")
        replica.apply(rate)
        with Span(replica.device) as sharing:
            self.sync.share_weights(replica)
        self._pending.append((step, replica.totals_later(), rate, waited, (summing, sharing)))
        for watch in self._memory:
            watch.after_step(step + 1)

    def _read_totals(self, keep: int) -> None:
        """Read finished steps until ``keep`` are left unread, and draw the consequences."""
        while len(self._pending) > keep:
            step, read, rate, waited, syncs = self._pending.popleft()
            totals = read()
            rows_per_step = self.shared.session.config.rows_per_step
            in_row = self._state.skipped_in_row + 1 if totals.skipped else 0
            now = time.monotonic()
            seconds, source_wait = now - self._mark, self.shared.feed.loaders_waited - self._source_mark
            self._begin_count(now)
            self._state = replace(
                self._state, step=step + 1, next_ordinal=(step + 1) * rows_per_step, skipped=self._state.skipped + totals.skipped,
                skipped_in_row=in_row, slots=self._state.slots + sum(totals.labelled), seconds=self._state.seconds + seconds,
            )  # fmt: skip
            self.shared.last_progress = now
            if self.replica.index == 0:
                sync = sum(span.seconds() for span in syncs)
                self.shared.records.append(StepRecord(totals, rate, self._state, seconds, waited, sync, source_wait, self.shared.feed.depth))
            self._stopping |= totals.stop
            if in_row >= self._training.max_nonfinite_steps:
                raise TrainingError(
                    f"The gradients of {in_row} steps in a row, the last of them step {step + 1}, were not finite ({describe_nonfinite(totals)}). "
                    "None was applied. Look for NaN in the features of these rows (`dflashctl shards verify`), lower training.learning_rate, "
                    "or try training.precision = float32. Start again to resume from the last checkpoint."
                )

    def _checkpoint(self) -> None:
        """Replica 0 writes what all have; the others meet it again in the next step."""
        if self.replica.index == 0:
            self.beacon(f"waits for the main thread to record step {self._state.step}")
            self.shared.wait_for_records()
        self.beacon(f"gathers the checkpoint of step {self._state.step}")
        gathered = gather(self.replica, self.sync)
        if gathered is None:
            return
        self.beacon(f"writes the checkpoint of step {self._state.step}")
        self._state = replace(self._state, updates=self.replica.updates)
        self.shared.save(TrainingCheckpoint(self._state, *gathered))
        self.shared.last_progress = time.monotonic()
        self._begin_count(self.shared.last_progress)

    def _begin_count(self, now: float) -> None:
        """Seconds and waits of the step that is read next count from now."""
        self._mark, self._source_mark = now, self.shared.feed.loaders_waited


def describe_nonfinite(totals: StepTotals) -> str:
    """Where the NaN or infinity of a skipped step came from."""
    if totals.nonfinite:
        return f"NaN or infinity on replica {', '.join(map(str, totals.nonfinite))}"
    return "finite on each replica, but not their sum"
