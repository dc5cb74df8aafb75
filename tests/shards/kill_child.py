"""Run by ``test_kill.py`` as a process of its own: extract again and again, killed with SIGKILL wherever the disk is touched, and from outside.

For each n, a forked child begins in a fresh folder and is killed just before its n-th call that writes, syncs, renames or
removes; a second child finishes the work. One line of JSON tells how many moments were tried and which ended in other bytes.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.shards.fakes import FakeSamples, contents, hidden_states, run
from tests.shards.share_child import share
from tests.waiting import eventually

SAMPLES = FakeSamples(7)  # two shards
CALLS = ("pwrite", "fsync", "rename", "replace", "unlink", "posix_fallocate", "open", "mkdir")


def die_before(call: int) -> None:
    """Send SIGKILL to this process at its ``call``-th call into the disk."""
    seen = itertools.count(1)  # of several threads

    def watched(original):  # type: ignore[no-untyped-def]
        def wrapper(*arguments, **named):  # type: ignore[no-untyped-def]
            if next(seen) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **named)

        return wrapper

    os.fsync = lambda descriptor: None  # a killed process loses nothing that it wrote, so the wait for the disk shows nothing here
    for name in CALLS:
        setattr(os, name, watched(getattr(os, name)))


def in_child(folder: Path, call: int) -> int:
    """Extract in a forked process; returns its wait status."""
    child = os.fork()
    if child == 0:
        die_before(call)
        run(folder, SAMPLES)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def killed_from_outside(folder: Path) -> bool:
    """Kill a process that has its first shard and stands in the middle of the second. Whether it was so."""
    of_second = {tuple(SAMPLES.tokens(i).tolist()) for i in range(4, 7)}

    def target(documents: Sequence[torch.Tensor]) -> torch.Tensor:
        if any(tuple(ids.tolist()) in of_second for ids in documents):
            time.sleep(3600)
        return hidden_states(documents)

    child = os.fork()
    if child == 0:
        run(folder, SAMPLES, target)
        os._exit(0)
    there = eventually((folder / "index" / "shard-00000.arrow").exists)
    os.kill(child, signal.SIGKILL)
    return there and os.WIFSIGNALED(os.waitpid(child, 0)[1]) and not (folder / "index.arrow").exists()


def main(workspace: Path, kills: int) -> None:
    undisturbed = workspace / "undisturbed"
    run(undisturbed, SAMPLES)  # in this process: what is imported at first use is then here before the forks
    wanted = contents(undisturbed)
    tried, different = 0, []
    once_killed = workspace / "killed-over-and-over"
    while os.WIFSIGNALED(in_child(workspace / f"killed-{tried}", tried + 1)):
        assert in_child(workspace / f"killed-{tried}", -1) == 0
        if contents(workspace / f"killed-{tried}") != wanted:
            different.append(tried)
        in_child(once_killed, tried + 1)  # the same folder, killed a little later every time
        tried += 1
    assert in_child(once_killed, -1) == 0
    assert killed_from_outside(workspace / "outside")
    assert in_child(workspace / "outside", -1) == 0
    equal = [contents(folder) == wanted for folder in (once_killed, workspace / "outside")]
    print(json.dumps({"tried": tried, "different": different, "equal": equal, "shared": share(workspace / "shared", kills)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
