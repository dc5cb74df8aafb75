"""Run by ``test_share.py`` as a process of its own: two workers extract into one folder, and one of them is killed again and again.

Each worker notes the shards that it begins. Then a third one, with a store, is killed, and this process makes what that one has lost. One line of
JSON tells whether the datasets are those of an undisturbed extraction, how many shards were begun by whom, and which were begun while a living worker
was at them.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from dflash_core.shards.format import index_part
from dflash_core.shards.writer import ShardWriter
from tests.shards.fakes import FakeSamples, contents, hidden_states, run

SAMPLES = FakeSamples(160)


def slow(documents: Sequence[torch.Tensor]) -> torch.Tensor:
    time.sleep(0.004)
    return hidden_states(documents)


def worker(folder: Path, log: Path) -> int:
    """Extract in a forked process; returns its id."""
    child = os.fork()
    if child:
        return child
    torch.set_num_threads(1)
    original = ShardWriter.shard

    def noted(self: ShardWriter, shard: int, *arguments: object) -> object:
        note(log, f"{os.getpid()} {shard}")
        return original(self, shard, *arguments)  # type: ignore[arg-type]

    ShardWriter.shard = noted  # type: ignore[assignment,method-assign]
    run(folder, SAMPLES, slow)
    os._exit(0)


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
            while not first.exists():  # what is lost is to be told from what was sent
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return hidden_states(documents)

    run(workspace / "first", SAMPLES, target, shared=address)
    os._exit(0)


def taken_over(workspace: Path) -> dict[str, object]:
    """What another machine does about it, which shares nothing with the first one but a store."""
    address, made = f"file://{workspace}/store", 0
    status = killed_with_a_store(workspace, address)
    lost = [shard for shard in range(40) if not index_part(workspace / "store", shard).exists()]

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


def note(log: Path, line: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{line}\n".encode())  # lines of several processes stay whole, and in order
    os.close(descriptor)


def main(workspace: Path, kills: int) -> None:
    draws = random.Random(kills)
    undisturbed, folder, log = workspace / "undisturbed", workspace / "shared", workspace / "log"
    run(undisturbed, SAMPLES)
    workers = [worker(folder, log) for _ in range(2)]
    for _ in range(kills):
        time.sleep(draws.uniform(0.02, 0.15))
        victim = workers.pop(draws.randrange(2))
        note(log, f"{victim} killed")
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)
        workers.append(worker(folder, log))
    statuses = [os.waitpid(child, 0)[1] for child in workers]
    begun: dict[str, str] = {}
    dead, twice = set(), []
    lines = [line.split() for line in log.read_text().splitlines()]
    for process, what in lines:
        if what == "killed":
            dead.add(process)
            continue
        if begun.get(what, process) not in {process, *dead}:
            twice.append(what)
        begun[what] = process
    answer = {
        "equal": contents(folder) == contents(undisturbed),
        "statuses": statuses,
        "twice": twice,
        "begun": sum(what != "killed" for _, what in lines),
    }
    print(json.dumps({**answer, "store": taken_over(workspace), "shards": len(begun), "workers": len(set(begun.values()))}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
