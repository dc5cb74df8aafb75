"""Run the pipeline in forked children that kill themselves with SIGKILL in every stage, one after the other in one workspace.

    python -m tests.kill_child FOLDER      # with one replica and with two

The parent only imports and forks, so a child starts in no time. A child is what ``python -m dflash_core run`` is. It leaves
its lines in ``<workspace>/lives/<number>.txt``, among them one for each piece of work it has done, and, once it is dead, the
parent lists the workspace in ``<number>.json``: [inode, time of change in ns] of every file.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from dflash_core import __main__ as core
from dflash_core import runners, summary
from dflash_core.data import driver, samples
from dflash_core.data.cache import Journal
from dflash_core.drafter import export
from dflash_core.evaluation import evaluate
from dflash_core.shards.writer import ShardWriter
from dflash_core.stages import CLAIMS, LOCK, Manifest
from dflash_core.target import TargetModel
from dflash_core.training.replica import Replica
from tests.tiny_run import write_tiny_run


def moments(replicas: int) -> list[tuple[str, int]]:
    """(call, count): a child dies before its ``count``-th call. In every stage, after some of its work; and again once its work is done."""
    within = [
        ("write_json_atomic", 1),  # target: before target.json
        ("append", 20),  # responses: with as many as before this one on disk
        ("write_table", 2),  # samples: one side is written, the other is not
        ("give_back", 2),  # shards: two of four are whole, and the target is at a third
        ("warm_up", replicas),
        ("micro_step", 8 * 2 // replicas),  # train: in step 8, after the checkpoint of step 5
        ("measure", 2),  # evaluate: of 3 prompts
        ("verify_export", 1),
    ]
    return [moment for call in within for moment in ((call,) if call[0] == "warm_up" else (call, ("write", 1)))]


OWNERS: list[tuple[str, Any]] = [
    ("write_json_atomic", runners),
    ("write_json_atomic", summary),
    ("append", Journal),
    ("write_table", samples.pq.ParquetWriter),
    ("packed_hidden_states", TargetModel),
    ("give_back", ShardWriter),
    ("warm_up", Replica),
    ("micro_step", Replica),
    ("measure", evaluate._Bench),
    ("verify_export", export),
    ("write", Manifest),
]


def main(folder: Path) -> None:
    config = write_tiny_run(folder)
    driver._SYNC_SECONDS = 0.0  # every response is written by itself
    pa.table({"numbers": [1]})  # imports pandas where it is installed, once here instead of in every child
    for replicas in (1, 2):
        change = [f"training.devices=[{', '.join(['cpu'] * replicas)}]", f"training.accumulation_steps={2 // replicas}"]
        calm, killed = folder / f"calm-{replicas}", folder / f"killed-{replicas}"
        assert life(config, calm, 0, change, None) == 0, last_words(calm, 0)
        deaths = moments(replicas)
        for number, moment in enumerate(deaths):
            assert os.WIFSIGNALED(life(config, killed, number, change, moment)), f"survived {moment}: {last_words(killed, number)}"
        for number in (len(deaths), len(deaths) + 1):
            assert life(config, killed, number, change, None) == 0, last_words(killed, number)


def last_words(workspace: Path, number: int) -> str:
    return (workspace / "lives" / f"{number}.txt").read_text()[-2000:]


def life(config: Path, workspace: Path, number: int, change: Sequence[str], moment: tuple[str, int] | None) -> int:
    """One run in a forked process; returns its wait status."""
    record = workspace / "lives" / f"{number}.txt"
    record.parent.mkdir(parents=True, exist_ok=True)
    process = os.fork()
    if process == 0:
        try:
            descriptor = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False)
            observe(moment, lambda done: os.write(1, f"did {done}\n".encode()))
            changes = [f"run.workspace={workspace}", *change]
            os._exit(core.main(["run", str(config), *[word for item in changes for word in ("--set", item)]]))
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(1)
    status = os.waitpid(process, 0)[1]
    (record.with_suffix(".json")).write_text(json.dumps(inventory(workspace / "stages")))
    return status


def inventory(folder: Path) -> dict[str, list[int]]:
    """[inode, time of change in ns] of every file below a folder; locks change nothing and are left out."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in (LOCK, CLAIMS)]
    return {path.relative_to(folder).as_posix(): [path.stat().st_ino, path.stat().st_mtime_ns] for path in files}


def observe(moment: tuple[str, int] | None, tell: Callable[[str], object]) -> None:
    """Tell of every call that is done, and die with SIGKILL before the one that ``moment`` names. Micro-steps are those of replica 0 in training."""
    for name, owner in OWNERS:
        _watch(owner, name, moment[1] if moment and moment[0] == name else 0, tell)


def _watch(owner: Any, name: str, fatal: int, tell: Callable[[str], object]) -> None:
    original, seen = getattr(owner, name), 0

    def watched(*arguments: Any, **keywords: Any) -> Any:
        nonlocal seen
        if name == "micro_step" and (arguments[0].index != 0 or threading.current_thread() is threading.main_thread()):
            return original(*arguments, **keywords)
        seen += 1
        if seen == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*arguments, **keywords)
        tell(name)
        return result

    setattr(owner, name, watched)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
