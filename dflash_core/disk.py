"""What a full disk is told as: one wording for shards, stores, checkpoints and metrics."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from dflash_core.errors import DFlashError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of the errors with which a system says so."""


@contextlib.contextmanager
def clear_disk_errors(folder: Path, needed: int, kept: str, error_type: type[DFlashError]) -> Iterator[None]:
    """A full disk becomes an error of ours that names it.

    Args:
        needed: bytes that are written there, in whichever files; 0 where they are few
        kept: what is not lost, and what to do
    """
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        status = os.statvfs(next(place for place in (folder, *folder.absolute().parents) if place.is_dir()))
        free = f"{status.f_bavail * status.f_frsize:,} bytes are free"
        raise error_type(full_disk(folder, error, f"{needed:,} bytes do not fit, {free}" if needed else free, kept)) from error


def full_disk(where: Path | str, error: OSError, room: str, kept: str) -> str:
    """The message. ``room`` is what is known of the space there."""
    return f"The disk of {where} is full ({error.strerror}): {room}. {kept}"
