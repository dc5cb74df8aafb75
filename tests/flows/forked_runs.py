"""Runs of ``dflashctl run`` in forked children that are sent a signal in the middle of training: what is imported is imported once.

    python -m tests.flows.forked_runs CONFIG '[{"arguments": ["run", …], "signal": 2, "step": 7, "server": null}, …]'

Prints a JSON list: exit status (minus the number of the signal that ended it), what it wrote to stderr, how many processes it had
started, which of them were left behind, and how MLflow's runs stand. A child is the command itself: it has its own session,
output and signal handlers.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import mlflow
import mlflow.entities
import prefect.artifacts
import prefect.client.orchestration
import psutil
import transformers

import flows.cli
import flows.console
import flows.train_drafter
from dflash_core import __main__ as core
from dflash_core.training.worker import Worker
from tests.waiting import eventually

# What children use, imported once for all of them.
SHARED = (mlflow.MlflowClient, prefect.artifacts, transformers.AutoTokenizer, transformers.LlamaForCausalLM, flows.console, flows.train_drafter)


def main(config: Path, runs: list[dict[str, Any]]) -> None:
    print(json.dumps([life(config, **run) for run in runs]))


def life(config: Path, arguments: list[str], signal: int | None = None, step: int = 0, server: str | None = None) -> dict[str, Any]:
    """One run to its end; with a signal once training has recorded ``step``, after which it would not go on by itself."""
    with tempfile.TemporaryFile() as errors:
        process = os.fork()
        if process == 0:
            if signal is not None:
                _stand_still_after(step)
            _be_the_command(arguments, server, errors.fileno())
        started: list[psutil.Process] = []
        if signal is not None:
            _wait_for_step(config.parent / "workspace" / "stages", process, step)
            started = psutil.Process(process).children(recursive=True)
            os.kill(process, signal)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        eventually(lambda: not any(map(_lives, started)), 0.1)
        left = [item.pid for item in started if _lives(item)]
        errors.seek(0)
        recorded = _mlflow_states(config.parent / "workspace" / "mlflow.db")
        return {"status": status, "errors": errors.read().decode(), "started": len(started), "left": left, "mlflow": recorded}


def _be_the_command(arguments: list[str], server: str | None, errors: int) -> None:
    """``core …`` is ``python -m dflash_core …``, everything else ``dflashctl …``."""
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(errors, 2)
        if server is not None:
            os.environ["PREFECT_API_URL"] = server
        if arguments[0] == "core":
            os._exit(core.main(arguments[1:]))
        sys.argv = ["dflashctl", *arguments]
        try:
            flows.cli.main()
        except SystemExit as end:
            sys.stderr.flush()
            os._exit(int(end.code or 0))
    except BaseException as error:
        os.write(2, repr(error).encode())
    os._exit(70)


def _stand_still_after(step: int) -> None:
    """Let workers begin no step after ``step`` unless they are to stop: the signal comes in time, however late it is sent."""
    original = Worker._step

    def held(self: Worker, index: int) -> None:
        while index >= step and not self.shared.stop_requested:
            self.shared.still_alive()
            threading.Event().wait(0.05)
        original(self, index)

    Worker._step = held  # type: ignore[method-assign]


def _wait_for_step(stages: Path, process: int, step: int) -> None:
    def ended() -> bool:
        return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def recorded() -> bool:
        return any(path.read_bytes().count(b"\n") >= step for path in stages.glob("train-*/metrics.jsonl"))

    assert eventually(lambda: recorded() or ended(), 0.02)
    assert not ended(), "the run ended before the signal could be sent"


def _mlflow_states(database: Path) -> dict[str, str]:
    """Status of MLflow's run of each stage, the parent as ``parent``."""
    query = "select coalesce(tags.value, 'parent'), status from runs left join tags on tags.run_uuid = runs.run_uuid and tags.key = 'dflash.stage'"
    with contextlib.closing(sqlite3.connect(database)) as connection:
        return dict(connection.execute(query).fetchall())


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what a shell has put into the background
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
