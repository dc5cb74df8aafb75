"""Metrics of training: averages over the steps since the last record, to ``metrics.jsonl`` and to whoever listens.

Evaluations during training have a file of their own, ``evaluations.jsonl``: their steps come late, and are others.
"""

from __future__ import annotations

import contextlib
import json
import types
from collections.abc import Mapping, Sequence
from pathlib import Path

from dflash_core.disk import clear_disk_errors
from dflash_core.errors import TrainingError
from dflash_core.stages import MetricSink, atomic_write, no_metrics
from dflash_core.training.checkpoints import CHECKPOINTS_KEPT
from dflash_core.training.evaluator import Evaluation
from dflash_core.training.memory import MemoryWatch, resident
from dflash_core.training.worker import StepRecord

EVALUATIONS = "evaluations.jsonl"


class MetricLog:
    """Collects step records on the main thread and writes one line per ``log_every`` steps."""

    def __init__(
        self, path: Path, sink: MetricSink, *, log_every: int, tokens_per_step: int, memory: Sequence[Sequence[MemoryWatch]], resumed_step: int
    ):
        self._path = path
        self._sink = sink
        self._log_every = log_every
        self._tokens_per_step = tokens_per_step
        self._memory = [watch for of_replica in memory for watch in of_replica]
        self._window: list[StepRecord] = []
        self.last: Mapping[str, float] = _forget_after(path, resumed_step)
        self._evaluations = path.with_name(EVALUATIONS)
        if self._evaluations.is_file():
            _forget_after(self._evaluations, resumed_step)

    def add(self, record: StepRecord) -> None:
        """Take in a step; records and reports when ``log_every`` steps have come together, or at a checkpoint (``flush``)."""
        self._window.append(record)
        if record.state.step % self._log_every == 0:
            self.flush()

    def flush(self) -> None:
        """Record and report whatever is in the window."""
        if not self._window:
            return
        step = self._window[-1].state.step
        memory = {"memory_rss": float(resident())}
        for watch in self._memory:
            memory |= watch.metrics()
        self.last = summarise(self._window, self._tokens_per_step) | memory
        self._window.clear()
        self._append(self._path, {"step": step, **self.last})
        self._sink(step, self.last)

    def mute(self) -> None:
        """Write to the file alone from now on."""
        self._sink = no_metrics

    def add_evaluation(self, evaluation: Evaluation) -> None:
        """Record and report an evaluation, unless one of its step has been recorded: a resumed run begins with that of its checkpoint."""
        if any(record["step"] == evaluation.step for record in read_metrics(self._evaluations)):
            return
        metrics = evaluation.metrics()
        self._append(self._evaluations, {"step": evaluation.step, **metrics})
        self._sink(evaluation.step, metrics)

    @staticmethod
    def _append(path: Path, record: Mapping[str, float]) -> None:
        with clear_disk_errors(path.parent, 0, CHECKPOINTS_KEPT, TrainingError), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


class NoLog:
    """In the place of a ``MetricLog`` where another process records; no records come here."""

    last: Mapping[str, float] = types.MappingProxyType({})

    def add(self, record: StepRecord) -> None:
        """See ``MetricLog``."""

    def add_evaluation(self, evaluation: Evaluation) -> None:
        """See ``MetricLog``."""

    def flush(self) -> None:
        """See ``MetricLog``."""

    def mute(self) -> None:
        """See ``MetricLog``."""


def _forget_after(path: Path, step: int) -> dict[str, float]:
    """Drop lines of steps that an interrupted run took after its last checkpoint, which are taken again now; and a torn last line.

    Returns: the metrics of the last line that stays.
    """
    kept = [record for record in read_metrics(path) if record["step"] <= step]
    with atomic_write(path) as temporary:
        temporary.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    return {name: value for name, value in kept[-1].items() if name != "step"} if kept else {}


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The records of a ``metrics.jsonl`` or ``evaluations.jsonl`` in order, none if there is no file; a torn or damaged line is left out."""
    records = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and "step" in record:
                records.append(record)
    return records


def bottleneck_in_words(metrics: Mapping[str, float]) -> str:
    """Which side of the queue the other waits for, from the metrics of some steps."""
    number, drafter, source = (metrics[name] for name in ("feed_bottleneck", "data_wait_share", "source_wait_share"))
    slower = "rows come too slowly" if number > 0 else "rows wait to be taken"
    return f"{slower} (feed_bottleneck {number:+.2f}: replicas waited {drafter:.0%} of the time, whoever makes rows {source:.0%})"


def summarise(records: list[StepRecord], tokens_per_step: int) -> dict[str, float]:
    """Metrics of a window of steps.

    loss: weighted loss over the window, skipped steps left out. token_accuracy: share of labels that are the most likely token;
    accuracy_slot_k: of slot k. tokens_per_second: tokens of rows, padding included. slots_per_second: labels. nonfinite_steps: skipped over the
    whole run. grad_norm (before clipping), learning_rate and queue_depth: of the last step.
    data_wait_share: share of the time that replica 0 waited for rows; source_wait_share: that loaders or targets waited for room in the queue.
    feed_bottleneck: the first less the second, from 1, where rows come too slowly, to -1, where they wait for the replicas.
    sync_share: share of the time that replica 0 took to exchange gradients and weights, waits for slower replicas included.
    """
    last = records[-1]
    applied = [record.totals for record in records if not record.totals.skipped]
    seconds = sum(record.seconds for record in records)
    denominator = sum(totals.denominator for totals in applied)
    labelled = [sum(counts) for counts in zip(*(record.totals.labelled for record in records), strict=True)]
    hits = [sum(counts) for counts in zip(*(record.totals.hits for record in records), strict=True)]
    data_wait, source_wait = (sum(getattr(record, name) for record in records) / seconds for name in ("data_wait", "source_wait"))
    metrics = {
        "learning_rate": last.learning_rate,
        "tokens_per_second": len(records) * tokens_per_step / seconds,
        "slots_per_second": sum(labelled) / seconds,
        "supervised_slots": float(sum(labelled)) / len(records),
        "step_seconds": seconds / len(records),
        "data_wait_share": data_wait,
        "source_wait_share": source_wait,
        "sync_share": sum(record.sync for record in records) / seconds,
        "feed_bottleneck": data_wait - source_wait,
        "queue_depth": float(last.queue_depth),
        "nonfinite_steps": float(last.state.skipped),
    }
    if applied:
        metrics["grad_norm"] = applied[-1].grad_norm
    if denominator > 0:
        metrics["loss"] = sum(totals.loss * totals.denominator for totals in applied) / denominator
    if sum(labelled):
        metrics["token_accuracy"] = sum(hits) / sum(labelled)
    metrics.update({f"accuracy_slot_{k}": hit / count for k, (hit, count) in enumerate(zip(hits, labelled, strict=True)) if count})
    return metrics
