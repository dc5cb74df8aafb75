"""Metrics go to a local file first and to the tracking store from there.

A training step must never wait for a metrics server, and a metric must not be lost because the server is away or the
process is killed. So ``append`` writes one line to a journal (some microseconds, safe from SIGKILL once written) and a thread sends
what has not been sent, in batches, until the store takes it. Memory stays flat however long the store is away. How far
the sending has come lies beside the journal, and a journal that is opened again goes on from there:

    journal = MetricJournal(folder / "train.jsonl", send)
    journal.append(step, {"loss": 2.5})
    journal.close(patience_s=60)        # False: the rest is kept for the next start

Steps that are already in the journal are dropped, so a training that is resumed from a checkpoint repeats none. A batch
that was delivered but not noted is sent again with its old times; MLflow keeps equal records once.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

BATCH = 1000  # the most metrics that MLflow takes in one call
INTERVAL_S = 3.0
LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True)
class Record:
    """One value of one metric. ``milliseconds`` is the time since the epoch at which it was reported."""

    key: str
    value: float
    step: int
    milliseconds: int


Send = Callable[[Sequence[Record]], None]
"""Delivers at most ``BATCH`` records or raises. Called on the journal's thread alone; may be given records twice."""


class MetricJournal:
    """An append-only file of metrics, and the thread that delivers them."""

    def __init__(self, path: Path, send: Send, *, interval_s: float = INTERVAL_S):
        """Open or create the journal; what an earlier process left unsent is sent first.

        Args:
            path: the journal, JSON lines. ``<path>.sent`` holds the number of bytes that were delivered.
            send: delivers records to the store.
            interval_s: pause between two deliveries.
        """
        self._path = path
        self._sent_path = path.with_name(path.name + ".sent")
        self._send = send
        self._interval_s = interval_s
        path.parent.mkdir(parents=True, exist_ok=True)
        self._last_steps = self._recover()
        self._file = path.open("a", encoding="utf-8")
        self._sent = self._read_sent()
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._hurry = False
        self._closing = False
        self._failure: Exception | None = None
        # Progress and logs of the thread belong to the flow run that opened the journal.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._deliver_all,), name=f"metrics-{path.stem}", daemon=True)
        self._thread.start()

    def append(self, step: int | None, metrics: Mapping[str, float]) -> None:
        """Record metrics of a step; values of steps that are already recorded are dropped. Never waits for the store.

        Args:
            step: None for the one after the last that these metrics have.
        """
        with self._lock:
            if self._file.closed:
                return
            if step is None:
                step = 1 + max((self._last_steps.get(key, -1) for key in metrics), default=-1)
            fresh = {key: float(value) for key, value in metrics.items() if step > self._last_steps.get(key, -1)}
            if not fresh:
                return
            self._last_steps.update(dict.fromkeys(fresh, step))
            self._file.write(json.dumps([step, time.time_ns() // 1_000_000, fresh]) + "\n")
            self._file.flush()

    def flush(self, patience_s: float) -> bool:
        """Wait until everything recorded so far is delivered. False if the store did not take it in time."""
        deadline = time.monotonic() + patience_s
        with self._wake:
            goal = self._size()
            while self._sent < goal and self._thread.is_alive():
                self._hurry = True
                self._wake.notify_all()
                if not self._wake.wait(min(1.0, max(0.0, deadline - time.monotonic()))) and time.monotonic() >= deadline:
                    break
            return self._sent >= goal

    def close(self, patience_s: float) -> bool:
        """Deliver what is left and end the thread. False if some is left, which the next opening delivers."""
        delivered = self.flush(patience_s)
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if delivered:
            self._thread.join()
        else:
            logger.warning(
                "%d bytes of metrics are not in the tracking store (%s); the next start sends them.", self._size() - self._sent, self._failure
            )
        with self._lock:
            self._file.close()
        return delivered

    def delete(self) -> None:
        """Remove the files of a closed journal whose run is over."""
        self._path.unlink(missing_ok=True)
        self._sent_path.unlink(missing_ok=True)

    def _deliver_all(self) -> None:
        pause = self._interval_s
        while True:
            with self._wake:
                if not self._hurry and not self._closing:
                    self._wake.wait(pause)
                if self._closing:
                    return
                self._hurry = False
                goal = self._size()
            try:
                self._deliver(goal)
                pause, self._failure = self._interval_s, None
            except Exception as error:  # the store is away: whatever it raises, the records stay in the journal
                if self._failure is None:
                    logger.warning("The tracking store does not take metrics (%s); they are kept in %s and sent later.", error, self._path)
                pause, self._failure = min(LONGEST_PAUSE_S, max(1.0, pause * 2)), error
                with self._wake:
                    self._wake.wait(1.0)  # also when hurried: not more than one attempt a second

    def _deliver(self, goal: int) -> None:
        with self._path.open("rb") as file:
            file.seek(self._sent)
            while file.tell() < goal:
                records: list[Record] = []
                while file.tell() < goal and len(records) < BATCH // 2:
                    records += _records(file.readline())
                for start in range(0, len(records), BATCH):
                    self._send(records[start : start + BATCH])
                self._sent_path.write_text(str(file.tell()), encoding="utf-8")
                with self._wake:  # held for no input or output: a training step may be waiting for it
                    self._sent = file.tell()
                    self._wake.notify_all()

    def _recover(self) -> dict[str, int]:
        """Last step of each metric; a line that a killed process left half written is cut off."""
        if not self._path.exists():
            return {}
        content = self._path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            with self._path.open("r+b") as file:
                file.truncate(len(whole))
        return {record.key: record.step for line in whole.splitlines() for record in _records(line)}

    def _read_sent(self) -> int:
        with contextlib.suppress(OSError, ValueError):
            return min(int(self._sent_path.read_text(encoding="utf-8")), self._size())
        return 0

    def _size(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0


def _records(line: bytes) -> list[Record]:
    step, milliseconds, metrics = json.loads(line)
    return [Record(key, value, step, milliseconds) for key, value in metrics.items()]
