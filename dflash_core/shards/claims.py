"""Who makes which shard, where several processes extract into one folder.

A claim is a lock on one byte of a file: byte n for shard n. The kernel lets go of it when the process dies, however it dies, so there is nothing
to expire and nothing to clean up. Claims hold between processes; threads of one process share theirs.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from dflash_core.stages import CLAIMS


class Claims:
    """The claims of this process in one folder. One object a process and folder: closing the file anywhere gives up all of them."""

    def __init__(self, folder: Path):
        self._path = folder / CLAIMS
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)

    def take(self, number: int) -> bool:
        """Claim a shard. False if another process has it."""
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        except (BlockingIOError, PermissionError):  # which of the two is up to the system
            return False
        return True

    def wait_for(self, number: int) -> None:
        """Claim a shard, once no other process has it."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX, 1, number)

    def give_back(self, number: int) -> None:
        """Others may claim the shard."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, number)

    def remove(self) -> None:
        """Take the file away: the work is done. Claims of this process last until ``close``."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Give up all claims."""
        os.close(self._descriptor)
