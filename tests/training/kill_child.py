"""Train in forked children that kill themselves with SIGKILL at chosen moments, over and over in one folder, until one finishes.

    python -m tests.training.kill_child WORKSPACE REPLICAS

The parent only imports and forks, so a child starts in no time. Prints one line per child: where it was killed and how it ended.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dflash_core.drafter import DFlashDrafter
from dflash_core.shards import ShardDataset
from dflash_core.training import evaluator, train, trainer
from dflash_core.training.evaluation_thread import EvaluationThread
from dflash_core.training.replica import Replica
from tests.training.small import INFO, config, make_shards, vocabulary
from tests.waiting import eventually

STEPS = 8


def main(workspace: Path, replicas: int) -> None:
    child(lambda: make_shards(workspace / "shards") and None)
    assert in_child(workspace, "calm", replicas, None) == 0
    # A checkpoint is 5 syncs; 2 come before the first, of the metrics file. Micro-steps are counted on the last replica. The last two moments
    # are before and after the final weights are written.
    moments = [("micro_step", 2), ("fsync", 4), ("micro_step", 4), ("fsync", 9), ("micro_step", 1), ("copyfile", 1), ("write_json_atomic", 1)]
    for moment in moments:
        status = in_child(workspace, "killed", replicas, moment)
        print(moment, "killed" if os.WIFSIGNALED(status) else "ended")
    assert in_child(workspace, "killed", replicas, None) == 0
    # Evaluated while it goes on: before the first of the best weights is written, once it is and has not been told, and before the last.
    for moment in [("save_best", 1), ("add_evaluation", 2), ("save_best", 2)]:
        status = in_child(workspace, "evaluated", replicas, moment, evaluate=True)
        print(moment, "killed" if os.WIFSIGNALED(status) else "ended")
    assert in_child(workspace, "evaluated", replicas, None, evaluate=True) == 0


def in_child(workspace: Path, name: str, replicas: int, moment: tuple[str, int] | None, *, evaluate: bool = False) -> int:
    def work() -> None:
        wait_for_the_evaluator()
        if moment is not None:
            kill_at(*moment, replicas - 1)
        dataset = ShardDataset(workspace / "shards")
        settings = config(replicas, accumulation_steps=2 // replicas, max_steps=STEPS, evaluation={"every_steps": 2 if evaluate else 0})
        train(settings, run_id="killed", dataset=dataset, info=INFO, vocabulary=vocabulary(), folder=workspace / name, judge=NormJudge)

    return child(work)


class NormJudge:
    """Says how far the drafter is from nothing."""

    device, dtype, key = torch.device("cpu"), torch.float32, "norm"

    def measure(self, drafter: DFlashDrafter, go_on: Callable[[], bool]) -> dict[str, float]:
        return {"acceptance_length": float(torch.cat([weight.flatten() for weight in drafter.state_dict().values()]).norm())}


def child(work: Any) -> int:
    """Do ``work`` in a forked process; returns its wait status."""
    process = os.fork()
    if process == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    return os.waitpid(process, 0)[1]


def wait_for_the_evaluator() -> None:
    """From here on the trainer goes no step further while something is being judged, so that which steps are evaluated does not depend on time."""
    original = EvaluationThread.offer

    def offer(self: EvaluationThread, step: int) -> None:
        original(self, step)
        assert eventually(lambda: self._step is None or not self._goes_on())

    EvaluationThread.offer = offer  # type: ignore[method-assign]


def kill_at(what: str, count: int, replica: int, first: Callable[[], object] = lambda: None) -> None:
    """SIGKILL this process at the ``count``-th micro-step of a replica's worker, or at the ``count``-th call of another function, after ``first``."""
    seen = 0
    owner: Any = {"micro_step": Replica, "fsync": os, "save_best": evaluator, "add_evaluation": trainer.MetricLog}.get(what, trainer)
    original = getattr(owner, what)

    def watched(*arguments: Any) -> Any:
        nonlocal seen
        if what != "micro_step" or (arguments[0].index == replica and threading.current_thread() is not threading.main_thread()):
            seen += 1
            if seen == count:
                first()
                os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)

    setattr(owner, what, watched)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
