"""Rows that cannot be used: written to ``rejected.jsonl`` with reasons; above a limit the stage fails."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from dflash_core.errors import DataError, Problem
from dflash_core.words import counted

_SHOWN = 5  # rejected rows named in the error itself; the file has all of them


class RejectLog:
    """Counts the rows that were seen and writes down those that were rejected, one JSON object a line.

    hide_values: nothing is shown of their content, only where they are and why
    first:       the first few that were rejected

    with RejectLog(folder / "rejected.jsonl") as rejected:
        ...
        rejected.check(config.data.max_rejected_fraction)
    """

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.seen = 0
        self.count = 0
        self.filtered = 0
        self.hide_values = False
        self.first: list[Problem] = []
        self._part: tuple[int, int, Problem | None] = (0, 0, None)
        self._file = path.open("w", encoding="utf-8")

    def add(self, problem: Problem) -> None:
        """Reject one row. ``problem.path`` says which: ``prompts.jsonl:17`` or the id of a conversation."""
        self.count += 1
        problem = self._write(problem)
        if self._part[2] is None:
            self._part = (*self._part[:2], problem)
        if len(self.first) < _SHOWN:
            self.first.append(problem)

    def leave_out(self, problem: Problem) -> None:
        """List a row that ``data.filters`` leave out, or an evaluation set does; it does not count as wrong."""
        self.filtered += 1
        self._write(problem)

    def _write(self, problem: Problem) -> Problem:
        if self.hide_values:
            problem = replace(problem, value="(not shown, since data.filters.redact is set)")
        value = problem.value if isinstance(problem.value, str) else repr(problem.value)
        value = value.encode("utf-8", "backslashreplace").decode()
        record = {"where": problem.path, "reason": problem.message, "value": value[:200], "remedy": problem.remedy}
        self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
        return problem

    def begin_part(self) -> None:
        """Rows from here on are told of by themselves in ``of_part``."""
        self._part = (self.seen, self.count, None)

    def of_part(self) -> str:
        """How many rows of the part were rejected, and why the first was, in a sentence; empty if none was."""
        seen, count, first = self._part
        if first is None:
            return ""
        rejected = f"{self.count - count:,} of {counted(self.seen - seen, 'row')} {'was' if self.count - count == 1 else 'were'} rejected"
        return f"{rejected}; of the first, {first.path}: {first.message}. {first.remedy}."

    def check(self, limit: float) -> None:
        """Raises ``DataError`` when the rejected share of the rows seen is above ``limit`` (``data.max_rejected_fraction``)."""
        self._file.flush()
        if self.count <= limit * self.seen:
            return
        share = f"{self.count} of {self.seen} rows ({self.count / max(self.seen, 1):.1%}) were rejected"
        remedy = f"Correct the rows (all of them, with reasons, are in {self.path}), or raise the limit"
        raise DataError("data", [Problem("data.max_rejected_fraction", limit, share, remedy), *self.first])

    def __enter__(self) -> RejectLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
