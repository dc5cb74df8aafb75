"""How a stage's progress is seen: on the console, in the log, and as a progress artifact of the flow run.

Stages call ``Progress(done, total, unit)`` as often as they like, from any thread: a call only stores three values.
A thread of its own tells those who watch, at most once a second.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Protocol

from dflash_core.pace import Pace
from dflash_core.words import how_far

logger = logging.getLogger(__name__)

EVERY_S = 1.0
LOG_EVERY_S = 30.0


class Watcher(Protocol):
    """Somebody who is told how a run goes on. Called on the main thread, ``progress`` and ``metrics`` on others too."""

    def begin(self, stage: str) -> None:
        """A stage begins."""

    def progress(self, stage: str, done: int, total: int, unit: str, remaining_s: float | None) -> None:
        """How far it is; ``total`` 0 and ``remaining_s`` None mean unknown. At most once a second."""

    def metrics(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of a training step."""

    def end(self, stage: str, outcome: str | None) -> None:
        """A stage has ended: how, in words, or None for an error."""


class LogWatcher:
    """Tells the log, which travels with the flow run: this is what runs without a terminal show."""

    def __init__(self) -> None:
        self._last = 0.0

    def begin(self, stage: str) -> None:
        self._last = time.monotonic()
        logger.info("%s: begins", stage)

    def progress(self, stage: str, done: int, total: int, unit: str, remaining_s: float | None) -> None:
        if time.monotonic() - self._last >= LOG_EVERY_S:
            self._last = time.monotonic()
            logger.info("%s: %s", stage, how_far(done, total, unit, remaining_s))

    def metrics(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def end(self, stage: str, outcome: str | None) -> None:
        logger.info("%s: %s", stage, outcome or "not finished")


watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)
"""Who watches runs of this context; None for the log. The command line puts its console here."""


class ProgressTeller:
    """Takes a stage's progress and passes it on, throttled: a ``Progress`` while inside its ``with`` block."""

    def __init__(self, stage: str, watcher: Watcher):
        self._stage = stage
        self.outcome: str | None = None
        self._watcher = watcher
        self._latest: tuple[int, int, str] | None = None
        self._artifact: Any = None
        self._pace = Pace()
        self._ended = threading.Event()

    def __call__(self, done: int, total: int, unit: str) -> None:
        self._latest = (done, total, unit)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Tell on a thread of the calling thread's context, to which artifacts and logs then belong."""
        thread = threading.Thread(target=contextvars.copy_context().run, args=(self._tell_repeatedly,), name=f"progress-{self._stage}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join(10)

    def _tell_repeatedly(self) -> None:
        told = None
        ended = False
        while not ended:
            ended = self._ended.wait(EVERY_S)
            if self._latest is not None and self._latest != told:
                told = self._latest
                self._tell(*told)

    def _tell(self, done: int, total: int, unit: str) -> None:
        remaining = self._pace.remaining(done, total, time.monotonic())
        self._watcher.progress(self._stage, done, total, unit, remaining)
        try:
            self._tell_prefect(done, total, unit, remaining)
        except Exception as error:  # the server may be away; progress is not worth a run
            logger.debug("progress artifact: %s", error)

    def _tell_prefect(self, done: int, total: int, unit: str, remaining: float | None) -> None:
        from prefect.artifacts import create_progress_artifact, update_progress_artifact
        from prefect.context import FlowRunContext

        if FlowRunContext.get() is None:
            return
        percent = 100.0 * done / total if total else 0.0
        description = how_far(done, total, unit, remaining)
        if self._artifact is None:
            self._artifact = create_progress_artifact(percent, key=f"{self._stage.replace('_', '-')}-progress", description=description)
        else:
            update_progress_artifact(self._artifact, percent, description)
