"""Two workers extract into one folder, and one of them is killed again and again. Run by ``kill_child``.

Each worker notes the shards that it begins, and stands still in a shard whenever as many have been begun as were allowed: then one is killed.
At last a third one, with a store, is killed, and this process makes what that one has lost.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dflash_core.shards.format import index_part
from dflash_core.shards.writer import ShardWriter
from tests.shards.fakes import FakeSamples, contents, hidden_states, run
from tests.waiting import eventually

SAMPLES = FakeSamples(160)


class Log:
    """``<process> <shard>`` for every shard that is begun, ``<process> killed``; and how many may be begun before everybody stands still."""

    def __init__(self, folder: Path):
        self.path, self._allowed = folder / "log", folder / "allowed"
        self.path.touch()
        self.allow(1)  # so that whoever begins first waits for the other

    def note(self, line: str) -> None:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        os.write(descriptor, f"{line}\n".encode())  # lines of several processes stay whole, and in order
        os.close(descriptor)

    def lines(self) -> list[list[str]]:
        return [line.split() for line in self.path.read_text().splitlines()]

    def begun(self) -> int:
        return sum(what != "killed" for _, what in self.lines())

    def allow(self, count: int) -> None:
        temporary = self._allowed.with_name("allowed.tmp")
        temporary.write_text(str(count))
        temporary.replace(self._allowed)

    def allowed(self) -> int:
        return int(self._allowed.read_text())


def worker(folder: Path, log: Log) -> int:
    """Extract in a forked process; returns its id."""
    child = os.fork()
    if child:
        return child
    torch.set_num_threads(1)
    original = ShardWriter.shard

    def noted(self: ShardWriter, shard: int, *arguments: object) -> object:
        log.note(f"{os.getpid()} {shard}")
        return original(self, shard, *arguments)  # type: ignore[arg-type]

    def target(documents: Sequence[torch.Tensor]) -> torch.Tensor:
        eventually(lambda: log.begun() < log.allowed())
        return hidden_states(documents)

    ShardWriter.shard = noted  # type: ignore[assignment,method-assign]
    run(folder, SAMPLES, target)
    os._exit(0)


def is_sent(part: Path) -> bool:
    """Whether the index rows of a shard are in the store; their file is empty for a moment before."""
    return part.exists() and part.stat().st_size > 0


def killed_with_a_store(workspace: Path, address: str) -> int:
    """Extract into a folder and a store in a forked process that kills itself in its third shard; returns the status it left."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    torch.set_num_threads(1)
    first, seen = index_part(workspace / "store", 0), 0

    def target(documents: Sequence[torch.Tensor]) -> torch.Tensor:
        nonlocal seen
        seen += len(documents)
        if seen > 8:
            eventually(lambda: is_sent(first))  # what is lost is to be told from what was sent
            os.kill(os.getpid(), signal.SIGKILL)
        return hidden_states(documents)

    run(workspace / "first", SAMPLES, target, shared=address)
    os._exit(0)


def taken_over(workspace: Path) -> dict[str, object]:
    """What another machine does about it, which shares nothing with the first one but a store."""
    address, made = f"file://{workspace}/store", 0
    status = killed_with_a_store(workspace, address)
    lost = [shard for shard in range(40) if not is_sent(index_part(workspace / "store", shard))]

    def target(documents: Sequence[torch.Tensor]) -> torch.Tensor:
        nonlocal made
        made += sum(map(len, documents))
        return hidden_states(documents)

    run(workspace / "second", SAMPLES, target, shared=address, lease_s=1.0)
    tokens = sum(int(SAMPLES.lengths[4 * shard : 4 * shard + 4].sum()) for shard in lost)
    return {
        "status": status,
        "lost": len(lost),
        "equal": contents(workspace / "second") == contents(workspace / "undisturbed"),
        "again": made - tokens,
    }


def share(workspace: Path, kills: int) -> dict[str, Any]:
    """Whether the dataset is that of an undisturbed extraction, how many shards were begun, which while a living worker was at them, …"""
    workspace.mkdir()
    draws = random.Random(kills)
    undisturbed, folder, log = workspace / "undisturbed", workspace / "shared", Log(workspace)
    run(undisturbed, SAMPLES)
    workers, killed = [worker(folder, log) for _ in range(2)], 0
    assert eventually(lambda: log.begun() == 2)
    together = len({process for process, _ in log.lines()}) == 2
    for _ in range(kills):
        assert eventually(lambda: log.begun() >= log.allowed())
        victim = workers.pop(draws.randrange(2))
        log.note(f"{victim} killed")
        os.kill(victim, signal.SIGKILL)
        killed += os.WIFSIGNALED(os.waitpid(victim, 0)[1])
        workers.append(worker(folder, log))
        log.allow(log.begun() + draws.randint(1, 2))
    log.allow(10**6)
    statuses = [os.waitpid(child, 0)[1] for child in workers]
    begun: dict[str, str] = {}
    dead, twice = set(), []
    for process, what in log.lines():
        if what == "killed":
            dead.add(process)
            continue
        if begun.get(what, process) not in {process, *dead}:
            twice.append(what)
        begun[what] = process
    return {
        "equal": contents(folder) == contents(undisturbed),
        "statuses": statuses,
        "twice": twice,
        "together": together,
        "killed": killed,
        "begun": log.begun(),
        "shards": len(begun),
        "store": taken_over(workspace),
    }
