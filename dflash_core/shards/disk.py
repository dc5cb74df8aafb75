"""What a full disk is told as."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from dflash_core.errors import ShardError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of the errors with which a system says so."""


@contextlib.contextmanager
def clear_disk_errors(folder: Path, needed: int) -> Iterator[None]:
    """A full disk becomes a ``ShardError`` that names it. ``needed``: bytes of the file that is written there; 0 where they are few."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        status = os.statvfs(next(place for place in (folder, *folder.absolute().parents) if place.is_dir()))
        wanted = f"a file of {needed:,} bytes does not fit" if needed else "no space is left"
        raise ShardError(
            f"The disk of {folder} is full ({error.strerror}): {wanted}, {status.f_bavail * status.f_frsize:,} bytes are free. "
            "Finished shards are kept: free some space and run the extraction again."
        ) from error
