"""What a finished stage leaves behind: a folder, files written atomically, and a manifest that is written last.

A folder with a manifest is finished; one without holds partial work that the stage itself resumes. A manifest is only
believed after its files have been looked at (``Manifest.problem``), because a cache that does not look is a lie waiting.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from dflash_core.errors import DFlashError

Progress = Callable[[int, int, str], None]
"""Called often with (done, total, unit); total 0 means unknown. Must be cheap."""
MetricSink = Callable[[int, Mapping[str, float]], None]
"""Called with (step, metrics). Must not block."""

MANIFEST = "manifest.json"
_HASH_UP_TO = 16 * 2**20  # larger files carry checksums of their own (shards, weights) that their readers verify


def no_progress(done: int, total: int, unit: str) -> None:
    """A ``Progress`` that shows nothing."""


def no_metrics(step: int, metrics: Mapping[str, float]) -> None:
    """A ``MetricSink`` that keeps nothing."""


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; on success it is synced and renamed to ``path``, on failure removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
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


def write_json_atomic(path: Path, value: object) -> None:
    """Write ``value`` as indented JSON, atomically."""
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def file_sha256(path: Path) -> str:
    """sha256 (hex) of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class FileRecord(BaseModel):
    """A file of a finished stage. ``sha256`` is None for large files, which carry checksums of their own."""

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
    def write(cls, folder: Path, *, stage: str, key: str, counts: Mapping[str, Any], seconds: float, code_version: int) -> Manifest:
        """Record every file of ``folder`` and finish the stage."""
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() and not _ignored(path))
        files = tuple(_record(folder, name) for name in names)
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
        for record in self.files:
            path = folder / record.path
            if not path.is_file():
                return f"{record.path} is missing"
            if (size := path.stat().st_size) != record.bytes:
                return f"{record.path} has {size} bytes instead of {record.bytes}"
            if record.sha256 is not None and file_sha256(path) != record.sha256:
                return f"{record.path} has changed since it was written"
        return None


def _record(folder: Path, name: str) -> FileRecord:
    path = folder / name
    size = path.stat().st_size
    return FileRecord(path=name, bytes=size, sha256=file_sha256(path) if size <= _HASH_UP_TO else None)


def _ignored(path: Path) -> bool:
    return path.name in (MANIFEST, LOCK) or path.name.endswith(".tmp")


LOCK = ".lock"


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


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start
