"""Evaluation sets: reading them, and finding their prompts among those that are trained on.

    kept_out = KeptOut.of(config, folder / "rejected-of-sets.jsonl")
    kept_out.found_in(conversation)          # 'mtbench: mtbench-81', or None

Texts are compared by their words alone: case, punctuation, white space and the form of Unicode do not matter. A user message says a
prompt if it is the same, or if one of the two holds the other whole: questions come with instructions around them, here or there. Texts of less
than eight words count only where they are the same.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from dflash_core.config import EvaluationSet, FilterConfig, PipelineConfig, PromptSource
from dflash_core.data.prompts import read_prompts
from dflash_core.data.rejects import RejectLog
from dflash_core.data.types import Conversation
from dflash_core.errors import DataError, Problem

_WINDOW = 8
Words = tuple[str, ...]


def read_set(config: PipelineConfig, chosen: EvaluationSet, rejected_path: Path) -> list[Conversation]:
    """The conversations of a set, as ``data`` would have them said to the target; nothing but ``data.filters.redact`` is applied.

    Raises:
        DataError: it cannot be had, or a larger share of its rows than ``data.max_rejected_fraction`` is unusable.
    """
    source = PromptSource(**chosen.model_dump(exclude={"name"}))
    data = config.data.model_copy(update={"sources": (source,), "filters": FilterConfig(redact=config.data.filters.redact)})
    try:
        with RejectLog(rejected_path) as rejected:
            conversations = list(read_prompts(data, rejected))
            rejected.check(data.max_rejected_fraction)
    except DataError as error:
        field = f"evaluation.sets ({chosen.name})"
        problems = [Problem(field if item.path == "data.sources" else item.path, item.value, item.message, item.remedy) for item in error.problems]
        raise DataError(f"evaluation set {chosen.name}", problems) from error
    return conversations


class KeptOut:
    """What users say in evaluation sets, to be found elsewhere."""

    def __init__(self, sets: Mapping[str, Iterable[Conversation]]):
        self._texts: list[tuple[str, str]] = []  # words between blanks, and the name to tell
        self._whole: dict[Words, str] = {}
        self._by_middle: dict[Words, list[int]] = defaultdict(list)
        self._by_window: dict[Words, set[int]] = defaultdict(set)
        for name, conversations in sets.items():
            for conversation in conversations:
                for words in _said(conversation):
                    self._add(words, f"{name}: {conversation.id}")

    @classmethod
    def of(cls, config: PipelineConfig, rejected_path: Path) -> KeptOut:
        """All prompts of all sets of a configuration, whatever their limits. Raises ``DataError`` as ``read_set`` does."""
        whole = (item.model_copy(update={"limit": None}) for item in config.evaluation.sets)
        return cls({item.name: read_set(config, item, rejected_path) for item in whole})

    def _add(self, words: Words, name: str) -> None:
        if words in self._whole:
            return
        self._whole[words] = name
        if len(words) >= _WINDOW:
            index = len(self._texts)
            self._texts.append((_between_blanks(words), name))
            self._by_middle[_middle(words)].append(index)
            for window in _windows(words):
                self._by_window[window].add(index)

    def found_in(self, conversation: Conversation) -> str | None:
        """Set and id of a prompt that one of the conversation's users says; None if none is."""
        return next((name for words in _said(conversation) if (name := self._found(words)) is not None), None)

    def _found(self, words: Words) -> str | None:
        if words in self._whole:
            return self._whole[words]
        if len(words) < _WINDOW:
            return None
        text = _between_blanks(words)
        for window in _windows(words):
            for kept, name in (self._texts[index] for index in self._by_middle.get(window, ())):
                if kept in text:
                    return name
        return next((name for kept, name in (self._texts[index] for index in self._by_window.get(_middle(words), ())) if text in kept), None)


def refuse_overlap(found: Sequence[tuple[str, str]]) -> None:
    """Raises ``DataError`` if there are conversations (id, and the prompt of a set that it says); names the first ones."""
    if found:
        message = f"{len(found)} conversations say a prompt of evaluation.sets"
        remedy = "Take them out of the data, or set it to 'drop'"
        shown = [Problem(id, name, "is a prompt of an evaluation set", "Leave it out") for id, name in found[:5]]
        raise DataError("data", [Problem("data.evaluation_overlap", "refuse", message, remedy), *shown])


def _said(conversation: Conversation) -> Iterator[Words]:
    for message in conversation.messages:
        if message.role == "user":
            text = unicodedata.normalize("NFKC", message.content).casefold()
            yield tuple(re.findall(r"\w+", text)) or (text.strip(),)


def _windows(words: Words) -> Iterator[Words]:
    return (words[start : start + _WINDOW] for start in range(len(words) - _WINDOW + 1))


def _middle(words: Words) -> Words:
    """Eight words from the middle, where texts that begin or end alike differ."""
    start = (len(words) - _WINDOW) // 2
    return words[start : start + _WINDOW]


def _between_blanks(words: Words) -> str:
    return f" {' '.join(words)} "
