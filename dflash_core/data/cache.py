"""Responses kept on disk: the cache that users share, and the journal that makes regeneration resumable.

Cache: JSON lines (gzipped where the name ends in .gz), one response a line, each with all it depends on:
``{"target": digest, "generation": digest, "prompt": digest, "tokens": [...], "finish_reason": "stop"}``. Files can be
concatenated. Journal: one line per response, synced before anything is made of it; a torn last line is dropped.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from dflash_core.config import GenerationConfig, digest_of
from dflash_core.data.types import Response
from dflash_core.errors import DataError, Problem
from dflash_core.stages import atomic_write


class CacheKey(NamedTuple):
    """What a response depends on, as sha256 digests in hex: the target's weights, the settings of generation, the prompt's token ids."""

    target: str
    generation: str
    prompt: str


def cache_key(target_digest: str, generation: GenerationConfig, prompt: Sequence[int]) -> CacheKey:
    """Key of the response to ``prompt``. The batch size does not count, nor, when greedy, do the settings of sampling."""
    greedy = generation.temperature == 0
    settings = {"max_new_tokens": generation.max_new_tokens} | ({} if greedy else generation.model_dump(include={"temperature", "top_p", "top_k"}))
    return CacheKey(target_digest, digest_of(settings), hashlib.sha256(np.asarray(prompt, dtype="<i4").tobytes()).hexdigest())


def read_response_cache(path: Path, target_digest: str, generation: GenerationConfig) -> dict[str, Response]:
    """Responses of this target under these settings, by the prompt's digest. Others in the file are passed over.

    Raises:
        DataError: the file is missing or a line is not a cached response.
    """
    wanted = cache_key(target_digest, generation, [])[:2]
    found: dict[str, Response] = {}
    where = str(path)
    try:
        with gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                where = f"{path}:{number}"
                record = json.loads(line)
                if (record["target"], record["generation"]) == wanted:
                    found[record["prompt"]] = response_from(record)
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"is not a cached response: {type(error).__name__}: {error}"
        raise DataError(where, [Problem("data.response_cache", where, reason, "Write the file again, or leave data.response_cache out")]) from error
    return found


def write_response_cache(path: Path, entries: Iterable[tuple[CacheKey, Response]]) -> int:
    """Write a cache that ``read_response_cache`` reads; the same entries give the same bytes. Returns their number."""
    lines = [json.dumps({**key._asdict(), **response_record(response)}, separators=(",", ":")) + "\n" for key, response in entries]
    with atomic_write(path) as temporary:
        content = "".join(lines).encode()
        temporary.write_bytes(gzip.compress(content, compresslevel=9, mtime=0) if path.name.endswith(".gz") else content)
    return len(lines)


def response_record(response: Response) -> dict[str, Any]:
    """A response as plain JSON values."""
    return {"tokens": list(response.tokens), "finish_reason": response.finish_reason}


def response_from(record: Any) -> Response:
    """The response in plain JSON values. Raises ``ValueError``, ``KeyError`` or ``TypeError`` if it is none."""
    tokens, reason = tuple(record["tokens"]), record["finish_reason"]
    if not tokens or not all(type(token) is int and token >= 0 for token in tokens) or reason not in ("stop", "length"):
        raise ValueError(f"tokens {str(tokens)[:60]}, finish_reason {reason!r}")
    return Response(tokens, reason)


class Journal:
    """Responses on disk, found again by key after the process was killed at any moment."""

    def __init__(self, path: Path):
        self._file = path.open("a+b")
        self._places: dict[str, int] = {}
        self._file.seek(0)
        end = 0
        for line in self._file:
            try:
                record = json.loads(line)
                response_from(record)
                key = record["key"] if line.endswith(b"\n") else None
            except (ValueError, KeyError, TypeError, RecursionError):
                key = None
            if type(key) is not str:  # torn by a crash, or damaged: all after it is generated again
                break
            self._places[key] = end
            end += len(line)
        self._file.truncate(end)

    def get(self, key: str) -> Response | None:
        """A response that is there, or None."""
        if key not in self._places:
            return None
        self._file.seek(self._places[key])
        return response_from(json.loads(self._file.readline()))

    def append(self, responses: Iterable[tuple[str, Response]]) -> None:
        """Record responses under their keys; all are on disk when this returns."""
        place = self._file.seek(0, os.SEEK_END)
        places = {}
        for key, response in responses:
            places[key] = place
            place += self._file.write(json.dumps({"key": key, **response_record(response)}, separators=(",", ":")).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._places |= places

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
