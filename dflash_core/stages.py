"""What a finished stage leaves behind: a folder, files written atomically, and a manifest that is written last.

A folder with a manifest is finished; one without holds partial work that the stage itself resumes. A manifest is only
believed after its files have been looked at (``Manifest.problem``), because a cache that does not look is a lie waiting.
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import functools
import hashlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from dflash_core.errors import DFlashError

if TYPE_CHECKING:
    from torch import Tensor

Progress = Callable[[int, int, str], None]
"""Called often with (done, total, unit); total 0 means unknown. Must be cheap."""
MetricSink = Callable[[int, Mapping[str, float]], None]
"""Called with (step, metrics). Must not block."""

MANIFEST, LOCK, CLAIMS = "manifest.json", ".lock", ".claims"


def no_progress(done: int, total: int, unit: str) -> None:
    """A ``Progress`` that shows nothing."""


def no_metrics(step: int, metrics: Mapping[str, float]) -> None:
    """A ``MetricSink`` that keeps nothing."""


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; on success it is synced and renamed to ``path``, on failure removed.

    Whoever may read the folder may read the file: safetensors by itself lets nobody but the owner.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")  # machines that share a folder have the same numbers
    try:
        yield temporary
        temporary.chmod(path.parent.stat().st_mode & 0o666)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make renames in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_files(folder: Path) -> None:
    """Make the files in ``folder`` durable, content and names."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)


def write_json_atomic(path: Path, value: object) -> None:
    """Write ``value`` as indented JSON, atomically."""
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file. What the system refuses is an ``OSError`` with its number and the path, as of other files."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file  # torch takes seconds

    try:
        save_file(dict(tensors), path, metadata=metadata)
    except SafetensorError as error:
        if not (refused := re.search(r"os error (\d+)", str(error))):
            raise
        raise OSError(int(refused[1]), os.strerror(int(refused[1])), str(path)) from error


def file_sha256(path: Path) -> str:
    """sha256 (hex) of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@functools.lru_cache(maxsize=4096)
def _sha256_of_version(path: Path, size: int, modified_ns: int, inode: int) -> str:
    """A plan looks at the same files many times, and they may be large."""
    return file_sha256(path)


def _sha256_of(path: Path) -> str:
    status = path.stat()
    return _sha256_of_version(path.resolve(), status.st_size, status.st_mtime_ns, status.st_ino)


class FileRecord(BaseModel):
    """A file of a finished stage. ``sha256`` is None where the file's own reader verifies it (shards, which may be terabytes)."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    path: str
    bytes: int
    sha256: str | None


class Manifest(BaseModel):
    """The last file of a finished stage: what it made, from what, with which code."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    stage: str
    key: str
    files: tuple[FileRecord, ...]
    counts: dict[str, Any]
    seconds: float
    created: str
    code_version: int

    @classmethod
    def write(
        cls, folder: Path, *, stage: str, key: str, counts: Mapping[str, Any], seconds: float, code_version: int,
        leave_out: Sequence[str] = (), checked_by_reader: Sequence[str] = (),
    ) -> Manifest:  # fmt: skip
        """Record the files of ``folder`` and finish the stage.

        Args:
            leave_out: patterns of files that are not part of the result.
            checked_by_reader: patterns of files that are recorded without a sha256.
        """
        found = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and not _ignored(path))
        wanted = [path for path in found if not _matches(path, leave_out)]
        files = tuple(_record(folder, path, hashed=not _matches(path, checked_by_reader)) for path in wanted)
        created = datetime.now(UTC).isoformat(timespec="seconds")
        manifest = cls(stage=stage, key=key, files=files, counts=dict(counts), seconds=round(seconds, 3), created=created, code_version=code_version)
        write_json_atomic(folder / MANIFEST, manifest.model_dump(mode="json"))
        return manifest

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """The manifest of ``folder``, or None where there is none that can be read."""
        try:
            return cls.model_validate_json((folder / MANIFEST).read_bytes())
        except (OSError, ValidationError):
            return None

    def problem(self, folder: Path) -> str | None:
        """The first difference between the manifest and the files in ``folder``, or None."""
        return next(iter(self.problems(folder).values()), None)

    def problems(self, folder: Path) -> dict[str, str]:
        """Path within ``folder`` → what is wrong, for every file that is not as it was written."""
        return {record.path: problem for record in self.files if (problem := _problem(record, folder / record.path))}


def _problem(record: FileRecord, path: Path) -> str | None:
    if not path.is_file():
        return f"{record.path} is missing"
    if (size := path.stat().st_size) != record.bytes:
        return f"{record.path} has {size} bytes instead of {record.bytes}"
    if record.sha256 is not None and _sha256_of(path) != record.sha256:
        return f"{record.path} has changed since it was written"
    return None


def _record(folder: Path, path: Path, *, hashed: bool) -> FileRecord:
    return FileRecord(path=path.as_posix(), bytes=(folder / path).stat().st_size, sha256=_sha256_of(folder / path) if hashed else None)


def _matches(path: Path, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(path.as_posix(), pattern) for pattern in patterns)


def _ignored(path: Path) -> bool:
    return path.name in (MANIFEST, LOCK, CLAIMS) or path.name.endswith(".tmp")


def make_ready(folder: Path, key: str, repairable: Sequence[str] = (), *, sweep: bool = True) -> None:
    """Before a stage is run in ``folder``: take away whatever it must not build upon. The caller holds the folder's lock.

    That is what a killed process left half written and, where the stage was finished once, every damaged file; with the rest,
    unless all that is damaged are files that the stage makes anew from the rest.

    Args:
        key: of the stage now.
        repairable: patterns of the files that it makes anew by themselves.
        sweep: take away temporary files. Not where other processes may be at work beside the one that holds the lock.
    """
    for leftover in folder.rglob(".*.tmp") if sweep else ():
        if leftover.is_file():
            leftover.unlink()
    manifest = Manifest.read(folder)
    if manifest is not None:
        damaged = [Path(name) for name in manifest.problems(folder)]
        if manifest.key == key and all(_matches(path, repairable) for path in damaged):
            for path in damaged:
                (folder / path).unlink(missing_ok=True)
        else:
            _empty(folder)
    (folder / MANIFEST).unlink(missing_ok=True)  # last: until then the damage is known


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name in (MANIFEST, LOCK):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


class StageBusyError(DFlashError):
    """Another process is working in the same stage folder."""


@contextlib.contextmanager
def stage_lock(folder: Path) -> Iterator[None]:
    """Hold a stage folder for this process; the kernel lets go when the process dies, however it dies."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StageBusyError(f"{folder} is being worked on by another process. Wait for it to end, or stop it, and start again.") from error
        yield


def is_busy(folder: Path) -> bool:
    """Whether a process holds a stage folder at this moment."""
    if not (folder / LOCK).exists():
        return False
    try:
        with stage_lock(folder):
            return False
    except StageBusyError:
        return True


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start
