"""The one bounded queue between whoever makes rows and the replicas that train on them.

    with Feed(loaders_of(source), replicas=2, rows_per_microstep=1, queue_rows=16, start_ordinal=0, stop_ordinal=4800) as feed:
        rows = feed.take(replica, microstep_index)          # in the replica's own thread

Order is data, not timing: micro-step m of replica r takes rows (m·R + r)·b to (m·R + r)·b + b - 1, whatever loader finishes
first and whichever replica asks first (R replicas, b rows per micro-step; m counts the micro-steps of the whole run,
s·A + m of step s with A accumulation steps). Every wait is on a condition, so whoever waits wakes when something changes.
"""

from __future__ import annotations

import contextvars
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from dflash_core.errors import DFlashError
from dflash_core.feed.row import Row
from dflash_core.feed.source import RowSource

_PATIENCE_S = 1.0  # for loaders in the middle of a row when the feed is closed; they leave after it, and are daemons


class FeedClosedError(DFlashError):
    """Rows were asked for after the feed had been closed."""


_WAITS, _IS_DONE = "waits for room in the queue", "has made its last row"


@dataclass
class Loader:
    """A thread that makes rows of ``source``: its name, and what it does since when. Several may share a source."""

    name: str
    source: RowSource
    doing: str = "starts"
    since: float = field(default_factory=time.monotonic)
    waited: float = 0.0  # seconds that it had nothing to do, before what it does now

    def turns_to(self, doing: str) -> None:
        """Take note of what it does from now on."""
        self.waited, self.doing, self.since = self.waited_until_now, doing, time.monotonic()

    @property
    def waited_until_now(self) -> float:
        """Seconds that it had nothing to do so far, for want of room or of rows to make."""
        return self.waited + (time.monotonic() - self.since if self.doing in (_WAITS, _IS_DONE) else 0.0)


def loaders_of(source: RowSource, count: int | None = None) -> list[Loader]:
    """Loaders that share a source. Default: one for every two cores, from 2 to 8, as one core copies and checks some gigabytes a second."""
    count = count or min(8, max(2, (os.cpu_count() or 2) // 2))
    return [Loader(f"loader {number}", source) for number in range(count)]


class Feed:
    """Loader threads fill it in the order of ordinals, replicas empty it; it never holds more than ``queue_rows`` rows, those being loaded included.

    Replicas may drift apart as far as the queue holds, and no further than a synchronised step lets them: the row that is missing longest is
    always the next to be loaded, so replicas that meet once a step cannot lock each other out.
    """

    def __init__(
        self,
        loaders: Sequence[Loader],
        *,
        replicas: int,
        rows_per_microstep: int,
        queue_rows: int,
        start_ordinal: int,
        stop_ordinal: int,
        only: int | None = None,
        within: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        """Start loading rows ``start_ordinal`` to ``stop_ordinal - 1``. Both are multiples of the rows of one micro-step of all replicas.

        Args:
            only:   the one replica whose rows are loaded, where the others are in other processes
            within: entered by each loader's thread around all it does
        """
        together = replicas * rows_per_microstep
        at_a_time = together if only is None else rows_per_microstep
        if queue_rows < at_a_time:
            raise ValueError(f"queue_rows = {queue_rows} is less than the {at_a_time} rows that the replicas take at a time")
        if start_ordinal % together or stop_ordinal % together:
            raise ValueError(f"start and stop ordinal ({start_ordinal}, {stop_ordinal}) must be multiples of {together}, the rows of one micro-step")
        self.loaders = loaders
        self._within = within
        self._replicas = replicas
        self._rows_per_microstep = rows_per_microstep
        self._queue_rows = queue_rows
        self._stop_ordinal = stop_ordinal
        self._next_microstep = [start_ordinal // together] * replicas
        self._skipped = together - at_a_time  # rows of others, after each micro-step's
        self._next_ordinal = start_ordinal + (only or 0) * rows_per_microstep
        self._held = 0  # rows loaded or being loaded, and not taken
        self._rows: dict[int, Row] = {}
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._row_came = [threading.Condition(self._lock) for _ in range(replicas)]
        self._room_came = threading.Condition(self._lock)
        self._loader_left = threading.Condition(self._lock)
        self._loading = len(loaders)
        for loader in loaders:
            context = contextvars.copy_context()  # torch's configuration is kept in it
            threading.Thread(target=context.run, args=(self._load, loader), name=loader.name, daemon=True).start()

    def take(self, replica: int, microstep_index: int) -> list[Row]:
        """The rows of one replica's micro-step, in order; waits for them. A replica takes its micro-steps one after the other.

        Raises:
            FeedClosedError: the feed is or gets closed.
            BaseException: what a loader raised, with the loader's traceback; every replica gets it, at once.
            ValueError: a micro-step is taken out of turn, or its rows lie beyond ``stop_ordinal``.
        """
        first = (microstep_index * self._replicas + replica) * self._rows_per_microstep
        wanted = range(first, first + self._rows_per_microstep)
        with self._lock:
            if microstep_index != (turn := self._next_microstep[replica]) or wanted.stop > self._stop_ordinal:
                raise ValueError(
                    f"replica {replica} asked for micro-step {microstep_index}: its next is {turn}, and rows end at {self._stop_ordinal}"
                )
            self._row_came[replica].wait_for(lambda: self._ended or all(ordinal in self._rows for ordinal in wanted))
            if self._error is not None:
                raise self._error.with_traceback(self._traceback)
            if self._closed:
                raise FeedClosedError(f"The feed was closed while replica {replica} wanted rows {wanted.start} to {wanted.stop - 1}.")
            self._next_microstep[replica] += 1
            self._held -= len(wanted)
            self._room_came.notify(len(wanted))  # as many loaders as there is room for: whoever is woken takes a turn at Python's lock
            return [self._rows.pop(ordinal) for ordinal in wanted]

    @property
    def depth(self) -> int:
        """Rows that are loaded and wait to be taken."""
        return len(self._rows)

    @property
    def loaders_waited(self) -> float:
        """Seconds that a loader has waited for room in the queue so far, the mean over all."""
        return sum(loader.waited_until_now for loader in self.loaders) / len(self.loaders)

    def close(self) -> None:
        """Wake everyone who waits, drop the rows and end the loaders. May be called from any thread, and again."""
        with self._lock:
            self._closed = True
            self._rows.clear()
            self._wake_all()
            # A condition, not Thread.join: a signal that interrupts a join on the main thread breaks the thread's state before Python 3.13.
            self._loader_left.wait_for(lambda: self._loading == 0, timeout=_PATIENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _ended(self) -> bool:
        return self._closed or self._error is not None

    def _load(self, loader: Loader) -> None:
        try:
            with self._within():
                while (ordinal := self._claim(loader)) is not None:
                    loader.turns_to(f"makes row {ordinal}")
                    self._put(ordinal, loader.source.row(ordinal))
                loader.turns_to(_IS_DONE)
        except BaseException as error:
            error.add_note(f"In {loader.name}, while it {loader.doing}.")
            loader.turns_to("has failed")
            with self._lock:
                if self._error is None:
                    self._error, self._traceback = error, error.__traceback__
                self._wake_all()
        finally:
            with self._lock:
                self._loading -= 1
                self._loader_left.notify_all()

    def _claim(self, loader: Loader) -> int | None:
        """The next ordinal to load, once there is room for it; None when there is nothing more to do."""
        with self._lock:
            loader.turns_to(_WAITS)
            self._room_came.wait_for(lambda: self._ended or self._next_ordinal >= self._stop_ordinal or self._held < self._queue_rows)
            if self._ended or self._next_ordinal >= self._stop_ordinal:
                return None
            self._held += 1
            claimed = self._next_ordinal
            self._next_ordinal += 1
            if self._next_ordinal % self._rows_per_microstep == 0:
                self._next_ordinal += self._skipped
            if self._next_ordinal >= self._stop_ordinal:
                self._room_came.notify_all()  # the other loaders have nothing to wait for any more
            return claimed

    def _put(self, ordinal: int, row: Row) -> None:
        with self._lock:
            if not self._ended:
                self._rows[ordinal] = row
                self._row_came[ordinal // self._rows_per_microstep % self._replicas].notify_all()

    def _wake_all(self) -> None:
        for condition in (*self._row_came, self._room_came):
            condition.notify_all()
