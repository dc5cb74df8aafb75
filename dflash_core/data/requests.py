"""``builtin:everyday-requests``: requests as people make them of an assistant, put together from ``requests.yaml``.

Writing, role play, explaining, advice, reasoning, coding and extracting; every third goes on with a second question, because what
is asked of an answer before is asked in other words. What free data sets of questions lack, and no benchmark's text: the sentences were
written for this project. Always the same ones, by ``SEED``.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any

from ruamel.yaml import YAML

SEED = 0
_OF_EACH = 80  # most requests made of one sentence; sentences with fewer words to choose from give fewer
_FOLLOWED = 3  # one in so many goes on with a second question


def everyday_requests() -> Iterator[Mapping[str, Any]]:
    """Rows with ``id`` and ``messages``, mixed so that any limit takes a fair part; an answer that the target is to give is empty."""
    parts = YAML(typ="safe", pure=True).load(files(__package__).joinpath("requests.yaml").read_text(encoding="utf-8"))
    rows: dict[str, tuple[str, str, str | None]] = {}
    for kind, sentences in parts["requests"].items():
        for sentence in sentences:
            draws = random.Random(f"{SEED}/{sentence}")
            for _ in range(_OF_EACH):
                first = _filled(sentence, parts["words"], draws)
                digest = hashlib.sha256(first.encode()).hexdigest()
                follows = draws.randrange(_FOLLOWED) == 0
                rows.setdefault(digest, (kind, first, draws.choice(parts["then"][kind]) if follows else None))
    for digest in sorted(rows):
        kind, first, second = rows[digest]
        messages = [("user", first)] if second is None else [("user", first), ("assistant", ""), ("user", second)]
        yield {
            "id": f"everyday-{kind}-{digest[:12]}",
            "messages": [{"role": role, "content": text} for role, text in messages],
        }


def _filled(sentence: str, words: Mapping[str, list[Any]], draws: random.Random) -> str:
    """The sentence with a word drawn for each name in braces; a name that comes twice gets two words where there are two."""
    left: dict[str, list[Any]] = {}

    def word(match: re.Match[str]) -> str:
        choices = words[match[1]]
        return str(left.setdefault(match[1], draws.sample(choices, len(choices))).pop())

    return re.sub(r"\{(\w+)\}", word, sentence)
