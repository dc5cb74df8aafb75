"""Run by ``test_kill.py`` as a process of its own: extract again and again, killed with SIGKILL at every step that touches the disk.

For each n, a forked child begins in a fresh folder and is killed just before its n-th call that writes, syncs, renames or
removes; a second child finishes the work. One line of JSON tells how many moments were tried and which ended in other bytes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from tests.shards.fakes import FakeSamples, contents, run

CALLS = ("pwrite", "fsync", "rename", "replace", "unlink", "posix_fallocate", "open", "mkdir")


def die_before(call: int) -> None:
    """Send SIGKILL to this process at its ``call``-th call into the disk."""
    seen = 0

    def watched(original):  # type: ignore[no-untyped-def]
        def wrapper(*arguments, **named):  # type: ignore[no-untyped-def]
            nonlocal seen
            seen += 1
            if seen == call:
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
        run(folder, FakeSamples(7))
        os._exit(0)
    return os.waitpid(child, 0)[1]


def main(workspace: Path) -> None:
    undisturbed = workspace / "undisturbed"
    run(undisturbed, FakeSamples(7))  # in this process: what is imported at first use is then here before the forks
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
    print(json.dumps({"tried": tried, "different": different, "over_and_over": contents(once_killed) == wanted}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
