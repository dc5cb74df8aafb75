"""How far the files that prompts arrive in have been read, by content and not by name.

Of every file the watermark knows how many bytes were read and their sha256. A file that begins with bytes that are known has
only the rest to tell, whatever it is called now: a log that grew, one that was renamed by rotation, a copy. One that was
truncated or written anew begins with other bytes and is read from its start; prompts that are known by then are dropped by
whoever asked (``rounds``). A last line that is still being written is left for the next time.

    rows, files = read_arrived(["traffic/*.jsonl"], watermark.files)
"""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from dflash_core.data.prompts import GROWING, SUFFIXES, read_file, read_row, written
from dflash_core.errors import DataError, Problem

_BLOCK = 1 << 20


class SeenFile(BaseModel):
    """The first ``bytes`` bytes of a file have been read; ``sha256`` (hex) is theirs. ``path`` is where that was, for people."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    path: str
    bytes: int
    sha256: str


class Watermark(BaseModel):
    """The last finished round, and what it had read."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    round: int = 0
    files: tuple[SeenFile, ...] = ()


Rows = list[tuple[str, object]]
"""(place, the row's value or a ``Problem``), as ``data.prompts`` reads them"""


def read_arrived(patterns: Sequence[str], seen: Sequence[SeenFile]) -> tuple[Rows, tuple[SeenFile, ...]]:
    """Everything in the files of ``patterns`` that was not read before, and the watermark's files after it.

    Raises:
        DataError: a file that is named by itself is missing, or a file cannot be read.
    """
    known = {(item.bytes, item.sha256): item for item in seen}
    rows: Rows = []
    found: dict[tuple[int, str], SeenFile] = {}
    outgrown: set[tuple[int, str]] = set()
    for path in arrived_files(patterns):
        try:
            fresh, now, before = _read_appended(path, known) if path.name.lower().endswith(GROWING) else _read_whole(path, known)
        except OSError as error:
            problem = Problem(
                "retrain.prompts", written(path), f"cannot be read: {error.strerror or error}", "Make it readable, or leave it out; nothing was begun"
            )
            raise DataError("retrain.prompts", [problem]) from error
        rows += fresh
        found[now.bytes, now.sha256] = now
        if before is not None and before.path == now.path:
            outgrown.add((before.bytes, before.sha256))
    files = {key: item for key, item in known.items() if key not in outgrown} | found
    return rows, tuple(sorted((item for item in files.values() if item.bytes), key=lambda item: (item.path, item.bytes)))


def arrived_files(patterns: Sequence[str]) -> list[Path]:
    """The files that patterns, folders and names mean now, each once, by name."""
    found: set[Path] = set()
    for pattern in patterns:
        path = Path(pattern)
        if glob.has_magic(pattern) and not path.exists():
            found.update(item for name in glob.glob(pattern, recursive=True) if (item := Path(name)).is_file() and _is_data(item))
        elif path.is_dir():
            found.update(item for item in path.iterdir() if item.is_file() and _is_data(item))
        elif path.is_file() and _is_data(path):
            found.add(path)
        else:
            message = f"is not a file of a kind that is known ({', '.join(SUFFIXES)})" if path.exists() else "there is no such file or folder"
            raise DataError("retrain.prompts", [Problem("retrain.prompts", pattern, message, f"Correct it (the working folder is {Path.cwd()})")])
    return sorted(found)


def _is_data(path: Path) -> bool:
    return path.name.lower().endswith(SUFFIXES) and not path.name.startswith(".")  # hidden: being written aside


def _read_appended(path: Path, known: dict[tuple[int, str], Any]) -> tuple[Rows, SeenFile, SeenFile | None]:
    """The rows of a JSONL file or a log after the longest beginning that is known."""
    with path.open("rb") as file:
        offset, before = _known_beginning(path, known)
        digest, lines = hashlib.sha256(), 0
        for block in _blocks(file, offset):
            digest.update(block)
            lines += block.count(b"\n")
        rows: Rows = []
        for number, line in enumerate(file, start=lines + 1):
            row = read_row(path, line, number)
            if not line.endswith(b"\n") and not isinstance(row, dict):
                break  # still being written
            digest.update(line)
            offset += len(line)
            if row is not None:
                rows.append((f"{written(path)}:{number}", row))
    return rows, SeenFile(path=written(path), bytes=offset, sha256=digest.hexdigest()), before


def _known_beginning(path: Path, known: dict[tuple[int, str], SeenFile]) -> tuple[int, SeenFile | None]:
    """The most bytes at the start of a file that are known, and as what."""
    size = path.stat().st_size
    best: tuple[int, SeenFile | None] = (0, None)
    digest, position = hashlib.sha256(), 0
    with path.open("rb") as file:
        for length in sorted({length for length, _ in known if length <= size}):
            for block in _blocks(file, length - position):
                digest.update(block)
            position = length
            if (item := known.get((length, digest.hexdigest()))) is not None:
                best = (length, item)
    return best


def _read_whole(path: Path, known: dict[tuple[int, str], SeenFile]) -> tuple[Rows, SeenFile, SeenFile | None]:
    """All rows of a file that cannot grow, unless the whole of it is known."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    now = SeenFile(path=written(path), bytes=path.stat().st_size, sha256=digest)
    return ([] if (now.bytes, digest) in known else list(read_file(path))), now, known.get((now.bytes, digest))


def _blocks(file: Any, count: int) -> Iterator[bytes]:
    while count > 0 and (block := file.read(min(count, _BLOCK))):
        count -= len(block)
        yield block
