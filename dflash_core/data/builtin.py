"""Prompt sources that anyone can have without a model hub: they travel in packages of the Python index.

``builtin:python-tasks``: descriptions of programming tasks from reasoning-gym 0.1.25 (Apache-2.0), as requests for a
short Python function. A narrow domain, so that a small drafter learns something in minutes. Fetched, never committed.
The sets of ``benchmarks`` are sources as well, for evaluation alone.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dflash_core.data.benchmarks import BENCHMARKS
from dflash_core.data.packages import fetch_package_file

_PACKAGE = "reasoning-gym==0.1.25"
_TASK_FILES = {  # member of the wheel → sha256
    "reasoning_gym/data/codeio.jsonl.gz": "a088810cf4d020279ec50dc5e64f25b7eccc8a428a6f76a25c70c126e4370f33",
    "reasoning_gym/data/codeio-hq.jsonl.gz": "7f2effca40d6412d9f7ccf37e866c5416984e20b2b59d84b4e16b38b18cd5c00",
}
_LONGEST_TASK = 240  # characters, about 50 tokens: the demo's two cores read every prompt
_INSTRUCTION = "Write a short Python function that solves this task. Answer with the code only.\n\n{task}"


def python_tasks() -> Iterator[Mapping[str, str]]:
    """Rows with ``id`` and ``prompt``: the short English tasks, without repetition, mixed so that any limit takes a fair part.

    Raises:
        DataError: the package cannot be fetched or its files are not the ones expected.
    """
    tasks = {" ".join(task.split()) for member, sha256 in _TASK_FILES.items() for task in _descriptions(member, sha256)}
    short = {hashlib.sha256(task.encode()).hexdigest(): task for task in tasks if len(task) <= _LONGEST_TASK and task.isascii()}
    for digest in sorted(short):
        yield {"id": f"python-tasks-{digest[:12]}", "prompt": _INSTRUCTION.format(task=short[digest])}


def _descriptions(member: str, sha256: str) -> Iterator[str]:
    text = gzip.decompress(fetch_package_file(_PACKAGE, member, sha256).read_bytes()).decode()
    rows = json.loads(text) if text.lstrip().startswith("[") else map(json.loads, filter(None, text.split("\n")))
    for row in rows:
        yield row["task_description"]


BUILTIN_SOURCES: Mapping[str, Callable[[], Iterator[Mapping[str, Any]]]] = {"builtin:python-tasks": python_tasks, **BENCHMARKS}
