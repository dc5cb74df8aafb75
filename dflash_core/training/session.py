"""The live handles that warm-up leaves for training in the same process.

    report = warm_up(config, run_id=..., ...)             # main thread, see ``warming``
    session = TrainingSession.get(run_id, config)         # None if there was no warm-up here
    DrafterTrainer(session).run()

A session is good for one run. Replicas that a failed or interrupted run leaves behind are in an unknown state, so whoever tries again warms up
again and resumes from the checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from dflash_core.config import PipelineConfig
from dflash_core.errors import WarmUpError
from dflash_core.feed import Loader
from dflash_core.training.checkpoints import TrainingState
from dflash_core.training.evaluator import Evaluation, Evaluator
from dflash_core.training.ranks import Ranks
from dflash_core.training.replica import Replica
from dflash_core.training.sync import GradientSync


@dataclass(eq=False)
class TrainingSession:
    """Warmed replicas, connected to each other, and the rows they will take. Lives in the process that made it; good for one run.

    loaders:  who makes the rows: of shards, or with warmed targets
    settings: what a checkpoint must have in common with the run that resumes from it
    state:    where the run stands before its first step here
    replicas: of this process: all, or under torchrun the one of its rank
    """

    config: PipelineConfig
    run_id: str
    folder: Path
    loaders: list[Loader]
    settings: Mapping[str, Any]
    state: TrainingState
    replicas: list[Replica]
    syncs: list[GradientSync]
    total_steps: int
    threads_per_replica: int
    ranks: Ranks | None = None
    evaluator: Evaluator | None = None
    first_evaluation: Evaluation | None = None  # of the weights that training goes on from
    spent: bool = False

    _sessions: ClassVar[dict[tuple[str, str], TrainingSession]] = {}  # process-local by design

    @property
    def writes(self) -> bool:
        """Whether this process holds replica 0, and so writes checkpoints, metrics and results."""
        return self.replicas[0].index == 0

    @classmethod
    def get(cls, run_id: str, config: PipelineConfig) -> TrainingSession | None:
        """The session that a warm-up of this process left for this run and these settings; None if there is none, or it has been used."""
        return cls._sessions.get((run_id, config.digest))

    def register(self) -> None:
        """Let ``get`` find this session. Sessions of other runs are dropped: their replicas would only take up memory."""
        self._sessions.clear()
        self._sessions[self.run_id, self.config.digest] = self

    def take(self) -> None:
        """Use the session up. Raises ``WarmUpError`` the second time."""
        if self.spent:
            raise WarmUpError(
                f"The training session of run '{self.run_id}' has been used. Call warm_up again; training then resumes from the last checkpoint."
            )
        self.spent = True
        self._sessions.pop((self.run_id, self.config.digest), None)


def require_main_thread(what: str) -> None:
    """Raises ``WarmUpError`` off the main thread: a cancellation reaches the main thread alone, and compiling is safe there alone."""
    if threading.current_thread() is not threading.main_thread():
        raise WarmUpError(
            f"{what} was called in the thread '{threading.current_thread().name}', and must be called on the main thread of its process. "
            "In a flow, call the task directly instead of submitting it to a task runner."
        )


@contextmanager
def intra_op_threads(number: int) -> Iterator[None]:
    """Torch's threads per operation, put back afterwards. Compiled code is guarded on the number, so warm-up and workers use the same."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
