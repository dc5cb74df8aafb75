"""What a full disk is told as."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from dflash_core.errors import DFlashError, ShardError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of the errors with which a system says so."""

SHARDS_KEPT = "Finished shards are kept: free some space and run the extraction again."


@contextlib.contextmanager
def clear_disk_errors(folder: Path, needed: int, kept: str = SHARDS_KEPT, error_type: type[DFlashError] = ShardError) -> Iterator[None]:
    """A full disk becomes an error of ours that names it.

    Args:
        needed: bytes that are written there; 0 where they are few
        kept: what is not lost, and what to do
    """
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        status = os.statvfs(next(place for place in (folder, *folder.absolute().parents) if place.is_dir()))
        wanted = f"a file of {needed:,} bytes does not fit" if needed else "no space is left"
        raise error_type(
            f"The disk of {folder} is full ({error.strerror}): {wanted}, {status.f_bavail * status.f_frsize:,} bytes are free. {kept}"
        ) from error
