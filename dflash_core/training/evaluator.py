"""Evaluation while training goes on: a copy of the weights is taken between two steps, and somebody else judges it.

    snapshot.take()                      # in the worker of replica 0, in the order of its stream; nothing waits for it
    evaluator.evaluate(step, go_on)      # in warm-up, and then in the evaluator's thread

A ``Judge`` says how good a drafter is, by whatever figures, of which ``acceptance_length`` decides which weights are the best; of equally good ones
the later. The best are in ``best/model.safetensors`` at once, so retention of checkpoints does not concern them, and a resumed run finds them there.
Weights that have not been trained are measured too, and never kept.

All room is made in warm-up: the copy beside the replica, and a drafter where the judge works, which is the copy itself where device and precision
are the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from dflash_core.drafter import DFlashConfig, DFlashDrafter
from dflash_core.training.checkpoints import BestWeights, read_best, save_best
from dflash_core.training.replica import Replica

logger = logging.getLogger(__name__)

GoOn = Callable[[], bool]


class Judge(Protocol):
    """Measures a drafter on ``device``, whose weights are of ``dtype``. Figures of judges with the same ``key`` can be compared."""

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def key(self) -> str: ...

    def measure(self, drafter: DFlashDrafter, go_on: GoOn) -> Mapping[str, float] | None:
        """Figures of the drafter, ``acceptance_length`` among them; None once ``go_on()``, asked every few seconds, says no."""


@dataclass(frozen=True)
class Evaluation:
    """What a judge found in the weights after ``step``, and how long it took. ``best``: no evaluation before was better."""

    step: int
    figures: Mapping[str, float]
    seconds: float
    best: bool

    def metrics(self) -> dict[str, float]:
        """As they are recorded: ``eval/acceptance_length``, …"""
        return {f"eval/{name}": value for name, value in {**self.figures, "seconds": self.seconds}.items()}


class Snapshot:
    """The weights of a replica as they were after one step, and a drafter that has them."""

    def __init__(self, replica: Replica, config: DFlashConfig, device: torch.device, dtype: torch.dtype):
        self._replica = replica
        self._taken_P = torch.empty_like(replica.weights)
        same = device == replica.device and dtype == self._taken_P.dtype
        self._judged_P = self._taken_P if same else torch.empty_like(self._taken_P, device=device, dtype=dtype)
        self.drafter = DFlashDrafter.around(config, replica.layout.views(self._judged_P), device).eval().requires_grad_(False)
        self._taken = torch.cuda.Event(blocking=True) if replica.device.type == "cuda" else None

    def take(self) -> None:
        """Copy the weights. On the replica's stream between two steps, while nobody reads the copy before."""
        self._taken_P.copy_(self._replica.weights)
        if self._taken is not None:
            self._taken.record(torch.cuda.current_stream(self._replica.device))

    def arrive(self) -> None:
        """Wait until the copy has been made, then bring it to the drafter. In the thread and on the stream of whoever judges."""
        if self._taken is not None:
            self._taken.synchronize()
        if self._judged_P is not self._taken_P:
            self._judged_P.copy_(self._taken_P)

    def weights(self) -> dict[str, Tensor]:
        """By name, on the CPU, in the precision that the replica computes with."""
        return {name: view.clone() for name, view in self._replica.layout.views(self._taken_P.cpu()).items()}


class Evaluator:
    """Judges snapshots of one replica's weights and keeps the best."""

    def __init__(self, judge: Judge, replica: Replica, config: DFlashConfig, folder: Path):
        """``folder``: of the training; the best weights of an earlier start are known again if they were measured in the same way."""
        self._judge, self._folder = judge, folder
        self._stream = torch.cuda.Stream(judge.device) if judge.device.type == "cuda" else None
        self._replica, self.device = replica, judge.device
        self.snapshot = Snapshot(replica, config, judge.device, judge.dtype)
        self.best: BestWeights | None = read_best(folder, judge.key)

    def warm_up(self, step: int) -> Evaluation:
        """Judge the weights that training starts from, after ``step``: whatever a later evaluation runs has then run. On the main thread."""
        with self._replica.on_device():
            self.snapshot.take()
        evaluation = self.evaluate(step, lambda: True)
        assert evaluation is not None, "the judge gave up without being asked to"
        return evaluation

    def evaluate(self, step: int, go_on: GoOn) -> Evaluation | None:
        """Judge the snapshot, taken after ``step``, and keep its weights if they are the best; None if the judge was asked to give up."""
        began = time.monotonic()
        with self._on_device():
            self.snapshot.arrive()
            figures = self._judge.measure(self.snapshot.drafter, go_on)
            if figures is None:
                return None
            found = BestWeights(step, figures["acceptance_length"])
            best = step > 0 and (self.best is None or (found.acceptance_length, step) >= (self.best.acceptance_length, self.best.step))
            if best:
                save_best(self._folder, self.snapshot.weights(), found, self._judge.key)
                self.best = found
        seconds = time.monotonic() - began
        logger.info("Acceptance length after step %d: %.3f%s (%.1f s)", step, found.acceptance_length, ", the best so far" if best else "", seconds)
        return Evaluation(step, dict(figures), round(seconds, 3), best)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            yield
            self._stream.synchronize()  # the next snapshot is written over what was read here
