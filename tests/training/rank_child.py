"""One rank of a training, started by torchrun or by ``start``: the core's command line, which kills itself, fails or is told to stop in some step.

torchrun --nproc-per-node 2 -m tests.training.rank_child kill 7 train CONFIG --set training.launcher=torchrun
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from dflash_core import __main__ as core
from dflash_core.training.replica import Replica
from dflash_core.training.worker import Worker
from tests.training.kill_child import kill_at
from tests.waiting import eventually


def run(how: str, count: int, words: list[str]) -> int:
    """The core's exit status. ``how``: whether rank 1 is to 'kill' its process, to 'fail', to be told to 'stop' or neither, and ``count`` when."""
    stages = Path(words[-1].removeprefix("run.workspace=")) / "stages"
    if how == "kill" and os.environ["RANK"] == "1":
        kill_at("micro_step", count, 1, first=lambda: eventually(lambda: list(stages.glob("train-*/checkpoints/step-*"))))
    if how == "fail" and os.environ["RANK"] == "1":
        original, left = Replica.micro_step, iter(range(count + 2, 0, -1))  # warm-up takes two

        def failing(self: Replica, batch: Any) -> None:
            if next(left) == 1:
                raise OSError("the host is on fire")
            original(self, batch)

        Replica.micro_step = failing  # type: ignore[method-assign]
    if how == "stop" and os.environ["RANK"] == "1":
        step_of = Worker._step

        def told(self: Worker, step: int) -> None:
            if step == count:
                self.shared.wake.set()
                assert eventually(lambda: not self.shared.wake.is_set())  # the main thread is there to be told
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
                assert eventually(self.shared.stop.is_set)
            step_of(self, step)

        Worker._step = told  # type: ignore[method-assign]
    return core.main(words)


def start_all(cases: list[tuple[str, str, int, list[str]]]) -> None:
    """Two ranks for each case: a folder for what they say, ``how`` and ``count`` of ``run``, and the words of the command line."""
    for folder, how, count, words in cases:
        outputs = Path(folder)
        outputs.mkdir(exist_ok=True)
        (outputs / "statuses.json").write_text(json.dumps(start(2, outputs, how, count, words)))


def start(size: int, outputs: Path, how: str, count: int, words: list[str]) -> list[int]:
    """Fork as many ranks as torchrun would start, and wait for them: their exit statuses. What they say is in ``outputs/<rank>.txt``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = [_fork(rank, size, port, outputs, how, count, words) for rank in range(size)]
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def _fork(rank: int, size: int, port: int, outputs: Path, how: str, count: int, words: list[str]) -> int:
    child = os.fork()
    if child:
        return child
    status = 70
    try:
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
            TORCHELASTIC_RUN_ID="test",
        )  # fmt: skip
        sys.stdout = sys.stderr = (outputs / f"{rank}.txt").open("w", buffering=1)
        status = run(how, count, words)
    finally:
        sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    exit_status = run(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_status)
