"""The thread that evaluates while the workers train. Nobody waits for it but the end of the run.

A snapshot that comes while the one before is still being judged is not taken: that evaluation is skipped, said and counted. The last step is
always evaluated. What fails here ends the run as what fails in a worker does.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from dataclasses import replace

import torch

from dflash_core.training.evaluator import Evaluator
from dflash_core.training.worker import Beacon, Shared

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.2


class EvaluationThread:
    """``run`` is the thread's whole life, ``future`` its outcome; the other methods are called by the worker of replica 0."""

    name = "evaluator"

    def __init__(self, shared: Shared, evaluator: Evaluator):
        self.beacon = Beacon()
        self.future: Future[None] = Future()
        self._shared, self._evaluator = shared, evaluator
        self._every = shared.session.config.training.evaluation.every_steps
        self._changed = threading.Condition()
        self._step: int | None = None  # whose snapshot is being judged, or waits to be
        self._last = shared.session.state.step  # whose snapshot was taken last; warm-up's was the first
        self._waited_for = False
        self._ending = False
        self._skipped = 0

    def offer(self, step: int) -> None:
        """After a step, on the replica's stream: take a snapshot if one is due and the evaluator is free. Waits for nothing."""
        if step % self._every or step == self._shared.session.total_steps:  # the last one is ``finish``'s
            return
        with self._changed:
            if self._step is None:
                self._take(step)
                return
            self._skipped += 1
            logger.warning(
                "Step %d is not evaluated, since the evaluation of step %d is still going on. Raise training.evaluation.every_steps, or lower "
                "training.evaluation.prompts or max_new_tokens, to have fewer or shorter ones.", step, self._step,
            )  # fmt: skip

    def finish(self, step: int) -> None:
        """After the last step: have it evaluated, unless the run was stopped, and let the thread end. Waits for the evaluation before."""
        with self._changed:
            self._waited_for = True
            while self._step is not None and self._goes_on():
                self._changed.wait(_LOOK_EVERY_S)
            if self._goes_on() and self._last != step:
                self._take(step)
            self._ending = True
            self._changed.notify_all()

    def run(self) -> None:
        """Evaluate until the end; never raises."""
        try:
            torch.set_num_threads(self._shared.session.threads_per_replica)
            with self._shared.guard.explained():
                while (step := self._next()) is not None:
                    self._evaluate(step)
            self.beacon("is done")
            self.future.set_result(None)
        except BaseException as error:
            self._shared.fail(error, f"In the evaluator, while it {self.beacon.doing}.")
            self.beacon("has failed")
            self.future.set_exception(error)
        self._shared.wake.set()

    def _take(self, step: int) -> None:
        self._evaluator.snapshot.take()
        self._step = self._last = step
        self._changed.notify_all()

    def _next(self) -> int | None:
        self.beacon("waits for a snapshot")
        with self._changed:
            while self._step is None and not self._ending and not self._shared.aborted.is_set():
                self._changed.wait(_LOOK_EVERY_S)
            return self._step if self._goes_on() else None

    def _evaluate(self, step: int) -> None:
        self.beacon(f"evaluates step {step}")
        evaluation = self._evaluator.evaluate(step, self._go_on)
        if evaluation is not None:
            self._shared.records.append(replace(evaluation, figures={**evaluation.figures, "skipped": float(self._skipped)}))
            self._shared.wake.set()
        with self._changed:
            self._step = None
            self._changed.notify_all()

    def _go_on(self) -> bool:
        """What the judge asks while it works."""
        if self._waited_for:
            self._shared.still_alive()
        return self._goes_on()

    def _goes_on(self) -> bool:
        return not self._shared.stop_requested and not self._shared.aborted.is_set()
