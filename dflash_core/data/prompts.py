"""Reading prompts: JSON lines (also gzipped), Parquet, a server's log, a Hugging Face dataset, or a packaged source.

Trouble with a whole file (missing, empty, not what its name says) is a ``DataError`` at once; trouble with a row goes to
the ``RejectLog``, and the stage decides by its limit.

    with RejectLog(folder / "rejected.jsonl") as rejected:
        conversations = list(read_prompts(config.data, rejected))
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq

from dflash_core.config import DataConfig, PromptSource
from dflash_core.data.builtin import BUILTIN_SOURCES
from dflash_core.data.filters import Filter
from dflash_core.data.rejects import RejectLog
from dflash_core.data.rows import COLUMNS, EXTRA_COLUMNS, RowError, parse_row
from dflash_core.data.traffic import log_row
from dflash_core.data.types import Conversation, Message
from dflash_core.errors import DataError, Problem

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet", ".log")
GROWING = (".jsonl", ".log")
MAX_LINE_BYTES = 64 * 2**20
_PARQUET_BATCH = 1024

Rows = Iterator[tuple[str, object]]
"""(place of the row, the row's value, or a ``Problem`` where it cannot even be read)"""


def read_prompts(data: DataConfig, rejected: RejectLog) -> Iterator[Conversation]:
    """Conversations of all sources, in order, each with an id of its own and, where configured, a system message.

    Raises:
        DataError: a source is missing, empty or not readable. Unusable rows are added to ``rejected`` instead.
    """
    used: dict[str, int] = {}
    chosen = Filter(data.filters)
    rejected.hide_values = bool(data.filters.redact)
    for source in data.sources:
        rows = 0
        for where, row in itertools.islice(_open(source), source.limit):
            rows += 1
            if (conversation := usable_conversation(row, where, chosen, rejected)) is not None:
                yield _with_system_prompt(_with_unique_id(conversation, used), data.system_prompt)
        if rows == 0:
            hint = "vLLM logs prompts with --enable-log-requests and VLLM_LOGGING_LEVEL=DEBUG"
            remedy = hint if source.source.lower().endswith(".log") else "Check the file; it must have at least one row"
            raise _error(source.source, source.source, "holds no rows", remedy)


def usable_conversation(row: object, where: str, chosen: Filter, rejected: RejectLog) -> Conversation | None:
    """The conversation of a row, redacted; None where it is not used, which ``rejected`` then tells."""
    rejected.seen += 1
    try:
        if isinstance(row, Problem):
            raise RowError(row)
        conversation = chosen.redacted(parse_row(row, where))
    except RowError as error:
        rejected.add(error.problem)
        return None
    problem = chosen.problem(conversation)
    if problem is not None:
        rejected.leave_out(problem)
        return None
    return conversation


def _with_unique_id(conversation: Conversation, used: dict[str, int]) -> Conversation:
    """Ids may repeat in the data; the second ``x`` becomes ``x~2``."""
    wanted = name = conversation.id
    while name in used:
        used[wanted] += 1
        name = f"{wanted}~{used[wanted]}"
    used[name] = 1
    return conversation if name == wanted else replace(conversation, id=name)


def _with_system_prompt(conversation: Conversation, system_prompt: str | None) -> Conversation:
    if system_prompt is None or conversation.messages[0].role == "system":
        return conversation
    return replace(conversation, messages=(Message("system", system_prompt), *conversation.messages))


def _open(source: PromptSource) -> Rows:
    name = source.source
    if name.startswith("builtin:"):
        return _builtin_rows(name)
    if name.startswith("hf://"):
        return _hub_rows(source)
    if not name.lower().endswith(SUFFIXES):
        known = f"{', '.join(SUFFIXES)}, hf://owner/dataset or {', '.join(BUILTIN_SOURCES)}"
        raise _error(name, name, "is not a kind of source that is known", f"Use {known}")
    path = Path(name)
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "is not a plain file" if path.exists() else "there is no such file"
        raise _error(name, name, found, f"Correct the path (the working folder is {Path.cwd()})")
    return read_file(path)


def read_file(path: Path) -> Rows:
    """The rows of a file of one of ``SUFFIXES``. Raises ``DataError`` where the file as a whole cannot be read."""
    return _parquet_rows(path) if path.name.lower().endswith(".parquet") else _jsonl_rows(path)


def written(path: Path) -> str:
    """A path as text that can be written down: names of files need not be UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _builtin_rows(name: str) -> Rows:
    if name not in BUILTIN_SOURCES:
        raise _error(name, name, "is not a built-in source", f"Use {', '.join(BUILTIN_SOURCES)}")
    return ((f"{name}:{number}", row) for number, row in enumerate(BUILTIN_SOURCES[name](), start=1))


def _jsonl_rows(path: Path) -> Rows:
    name, number = written(path), 0
    try:
        with path.open("rb") as raw:
            zipped = path.name.lower().endswith(".gz")
            file: IO[bytes] = io.BufferedReader(gzip.GzipFile(fileobj=raw)) if zipped else raw
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                where = f"{name}:{number}"
                if len(line) > MAX_LINE_BYTES:
                    _skip_line(file, line)
                    yield where, Problem(where, line[:100], f"the line is longer than {MAX_LINE_BYTES} bytes", "Split it; one conversation a line")
                elif (row := read_row(path, line, number)) is not None:
                    yield where, row
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise _error(f"{name}:{number + 1}", name, f"is not a whole gzip file: {error}", "Write the file again") from error
    except OSError as error:
        raise _error(f"{name}:{number + 1}", name, f"cannot be read: {error}", "Make it readable, or leave it out") from error


def _skip_line(file: IO[bytes], line: bytes) -> None:
    while line and not line.endswith(b"\n"):
        line = file.readline(MAX_LINE_BYTES)


def read_row(path: Path, line: bytes, number: int) -> object | None:
    """What a line of a JSONL file or of a server's log holds: a value, a ``Problem`` where it cannot be read, None where there is no row."""
    where, text = f"{written(path)}:{number}", line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
    if path.name.lower().endswith(".log"):
        return log_row(text.decode("utf-8", "replace"), where)
    return _json(text, where) if text.strip() else None


def _json(line: bytes, where: str) -> object:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        near = line[max(error.start - 10, 0) : error.start + 10]
        return Problem(where, near, f"is not UTF-8: {error.reason} at byte {error.start}", "Save the file as UTF-8")
    except json.JSONDecodeError as error:
        reason = f"is not JSON: {error.msg} at column {error.colno}"
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number of thousands of digits
        reason = f"cannot be read as JSON: {error}"
    return Problem(where, line[:100].decode("utf-8", "replace"), reason, "Write one JSON object a line")


def _parquet_rows(path: Path) -> Rows:
    name = written(path)
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise _error(name, name, f"is not a readable Parquet file: {error}", "Write the file again") from error
    with file:
        names = file.schema_arrow.names
        if not set(COLUMNS) & set(names):
            raise _error(name, names, f"has none of the columns {', '.join(COLUMNS)}", "Rename the column that holds the prompts")
        wanted = [column for column in names if column in (*COLUMNS, *EXTRA_COLUMNS)]
        number = 0
        try:
            for batch in file.iter_batches(batch_size=_PARQUET_BATCH, columns=wanted):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{name}:{number}", row
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise _error(f"{name}:{number + 1}", name, f"cannot be read on: {error}", "Write the file again") from error


def _hub_rows(source: PromptSource) -> Rows:
    """Rows of a Hugging Face dataset, streamed, so that a limit fetches no more than it needs. ``hf://owner/name@revision`` pins it."""
    try:
        import datasets
    except ImportError as error:
        raise _error(source.source, source.source, "needs the package 'datasets'", "pip install 'dflash-pipeline[pipeline]'") from error
    name, _, revision = source.source.removeprefix("hf://").partition("@")
    number = 0
    try:
        rows = datasets.load_dataset(name, source.subset, split=source.split, revision=revision or None, streaming=True)
        for row in rows:
            number += 1
            yield f"{name}:{source.split}:{number}", {column: row[column] for column in (*COLUMNS, *EXTRA_COLUMNS) if column in row} or row
    except Exception as error:  # datasets, huggingface_hub, fsspec and the readers each raise their own
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        remedy = "Check name, split, subset and the network, or download it and name the .parquet file"
        where = f"split {source.split}, subset {source.subset}, row {number + 1}"
        raise _error(source.source, where, f"cannot be read: {reason}", remedy) from error


def _error(where: str, value: object, message: str, remedy: str) -> DataError:
    return DataError(where, [Problem("data.sources", value, message, remedy)])
