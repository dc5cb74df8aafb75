"""Requests that the target itself writes: ``source: target`` in ``data.sources``, for those who have no traffic yet.

A chat model that sees the opening of a user's turn of its own template, and nothing more, goes on as users do (Magpie, arXiv 2406.08464). Where
``data.drawn.followed`` asks for it, the target answers, and a second request is drawn in the same way after its answer.

    drawn = draw_requests(config, tokenizer, generate, workspace / "drawn", target=digests)
    config = drawn.as_source_of(config)      # a file like any other: filtered, compared, held out and kept out of evaluation sets as all are

Request number i draws from (run.seed, i) alone: more of them begin with the same ones, whatever the batch size and however often the work was
interrupted. Each is on disk before anything is made of it.

Results, in a folder named by all that they depend on: ``requests.jsonl.gz`` (rows of a source), ``answers.jsonl.gz`` (a response cache: the answers
before second requests need not be given again) and the manifest, which is written last, and believed once the files have been looked at.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dflash_core.config import DrawnConfig, GenerationConfig, PipelineConfig, PromptSource, digest_of
from dflash_core.data.cache import Journal, cache_key, write_response_cache
from dflash_core.data.driver import OF_ENDPOINTS, Driver, journalled
from dflash_core.data.render import check_tokenizer, render_prompt, special_ids, user_opening
from dflash_core.data.types import Conversation, Message, Response
from dflash_core.errors import DataError, Problem
from dflash_core.stages import Manifest, Progress, Stopwatch, atomic_write, make_ready, no_progress, stage_lock

REQUESTS, ANSWERS, _JOURNAL = "requests.jsonl.gz", "answers.jsonl.gz", "journal.jsonl"
_VERSION = 1  # raised when the same settings give other requests
_RUN = 4  # tokens of a run that is compared between requests
_LEAST_ENDED = 0.05  # share of the draws that end: a model that never saw a user's turn goes on for ever, or ends at once

logger = logging.getLogger(__name__)


class Draw(Protocol):
    """What a target offers: as ``driver.Generate``, but an answer may end with other tokens than the target's own, ``stop``, as well."""

    def __call__(
        self, prompts: list[list[int]], generation: GenerationConfig, /, *, seeds: list[int], stop: Sequence[int] = ()
    ) -> Iterable[tuple[int, Response]]: ...


@dataclass(frozen=True)
class Drawn:
    """Requests on disk.

    requests: rows of a source
    answers:  to first requests that are followed by a second one, as a response cache
    counts:   drawn, drawn_unfinished (not ended within max_new_tokens, empty, or with special tokens), drawn_repeated, drawn_followed
    """

    requests: Path
    answers: Path
    counts: Mapping[str, int]

    def as_source_of(self, config: PipelineConfig) -> PipelineConfig:
        """The configuration with this file in place of the source 'target'."""
        sources = tuple(PromptSource(source=str(self.requests)) if item.drawn else item for item in config.data.sources)
        return config.model_copy(update={"data": config.data.model_copy(update={"sources": sources})})


@dataclass(frozen=True)
class _Turn:
    """A user's turn that is to be drawn: the request's number, and what was said before."""

    number: int
    before: tuple[Message, ...]


def draws(config: PipelineConfig) -> int:
    """Requests that a configuration asks its target for; 0 if it has no such source."""
    return sum(item.limit or 0 for item in config.data.sources if item.drawn)


def draw_requests(
    config: PipelineConfig, tokenizer: Any, generate: Draw, folder: Path, *, target: Sequence[str | None], progress: Progress = no_progress
) -> Drawn:
    """Draw the requests of the source 'target', or find them drawn in ``folder``.

    Args:
        target: digests of the target's weights, its tokenizer and its chat template.

    Raises:
        DataError: an opening holds special tokens, the chat template does not tell where a user's turn begins and ends, or hardly a draw ends: a
            base model.
        StageBusyError: another process draws them.
    """
    check_tokenizer(tokenizer)
    key = digest_of(_depends_on(config, target))
    place = folder / key[:12]
    found = _whole(place)
    if found is None:
        with stage_lock(place):
            found = _whole(place)  # another process may have finished it meanwhile
            if found is None:
                if Manifest.read(place) is not None:
                    logger.warning("%s was damaged since it was drawn, and is drawn again", place)
                make_ready(place, key)
                watch = Stopwatch()
                with Journal(place / _JOURNAL) as journal:
                    counts = _Drawing(config, tokenizer, generate, journal, str(target[0]), progress).write(place)
                left_out = (_JOURNAL,)
                found = Manifest.write(place, stage="drawn", key=key, counts=counts, seconds=watch.seconds, code_version=_VERSION, leave_out=left_out)
                (place / _JOURNAL).unlink()
    return Drawn(place / REQUESTS, place / ANSWERS, found.counts)


def _whole(place: Path) -> Manifest | None:
    """The manifest of requests that are all there, as they were written."""
    found = Manifest.read(place)
    return None if found is None or found.problem(place) else found


def _depends_on(config: PipelineConfig, target: Sequence[str | None]) -> list[Any]:
    data = config.data
    answered = data.generation.model_dump(mode="json", exclude=OF_ENDPOINTS) if data.drawn.followed else None
    settings = [data.drawn.model_dump(mode="json"), data.system_prompt, data.template_arguments, answered]
    return [_VERSION, *target, config.target.dtype, config.run.seed, draws(config), *settings]


class _Drawing:
    """The work on one file of requests."""

    def __init__(self, config: PipelineConfig, tokenizer: Any, generate: Draw, journal: Journal, target_digest: str, progress: Progress):
        self._config, self._tokenizer, self._generate = config, tokenizer, generate
        self._journal, self._target_digest, self._progress = journal, target_digest, progress
        self._drawn: DrawnConfig = config.data.drawn
        self._special = special_ids(tokenizer)

    def write(self, place: Path) -> dict[str, int]:
        """Draw everything, and write requests and answers. Returns the counts."""
        self._check_openings()
        total = draws(self._config)
        system = () if self._config.data.system_prompt is None else (Message("system", self._config.data.system_prompt),)
        requests = self._draw([_Turn(number, system) for number in range(total)], self._drawn.openings)
        if len(requests) < _LEAST_ENDED * total:
            raise _error(total, f"of {total} requests only {len(requests)} ended within data.drawn.max_new_tokens = {self._drawn.max_new_tokens}")
        new = self._new(requests)
        firsts = {number: (*system, Message("user", text)) for number, text in new.items()}
        answers, histories = self._answered(
            {number: said for number, said in firsts.items() if self._random(number, "goes on") < self._drawn.followed}
        )
        seconds = self._draw([_Turn(number, said) for number, said in histories.items()], self._drawn.follow_ups)
        going_on = {number: (*histories[number], Message("user", text)) for number, text in seconds.items()}
        _write_rows(place / REQUESTS, firsts | going_on)
        write_response_cache(place / ANSWERS, answers)
        return {
            "drawn": total,
            "drawn_unfinished": total - len(requests),
            "drawn_repeated": len(requests) - len(new),
            "drawn_followed": len(seconds),
        }

    def _check_openings(self) -> None:
        """Raise ``DataError`` for openings that would end a user's turn, or begin another, before the target says a word."""
        problems = []
        for name in ("openings", "follow_ups"):
            for index, text in enumerate(getattr(self._drawn, name)):
                if held := self._special.intersection(self._tokenizer(text, add_special_tokens=False)["input_ids"]):
                    tokens = ", ".join(self._tokenizer.convert_ids_to_tokens(sorted(held)))
                    message = f"holds {tokens}, which the chat template alone writes"
                    problems.append(Problem(f"data.drawn.{name}.{index}", text, message, "Leave it out: openings are words of a user"))
        if problems:
            raise DataError("data", problems)

    def _draw(self, turns: Sequence[_Turn], openings: Sequence[str]) -> dict[int, str]:
        """What users say in these turns, by number, in order; those that did not end as a request does are left out."""
        prompts, begun, seeds, stop = [], [], [], 0
        rendered: dict[tuple[Message, ...], tuple[str, int]] = {}  # first turns are all preceded by the same
        for turn in turns:
            if turn.before not in rendered:
                rendered[turn.before] = user_opening(self._tokenizer, turn.before, self._config.data.template_arguments, id=f"request {turn.number}")
            text, stop = rendered[turn.before]
            begun.append(openings[int(self._random(turn.number, f"opening {len(turn.before)}") * len(openings))])
            prompts.append(list(self._tokenizer(text + begun[-1], add_special_tokens=False)["input_ids"]))
            seeds.append(self._seed(turn.number, f"draw {len(turn.before)}"))
        keys = [digest_of([prompt, seed]) for prompt, seed in zip(prompts, seeds, strict=True)]
        known = [self._journal.get(key) for key in keys]
        missing = [index for index, response in enumerate(known) if response is None]
        settings = GenerationConfig(
            max_new_tokens=self._drawn.max_new_tokens,
            temperature=self._drawn.temperature,
            top_p=self._drawn.top_p,
            batch_size=self._config.data.generation.batch_size,
        )
        done = len(turns) - len(missing)
        if missing:
            generated = self._generate([prompts[index] for index in missing], settings, seeds=[seeds[index] for index in missing], stop=[stop])
            for ready in journalled(self._journal, [keys[index] for index in missing], generated):
                for index, response in ready:
                    known[missing[index]] = response
                done += len(ready)
                self._progress(done, len(turns), "requests")
        said = (self._text(prompt, opening, response) for prompt, opening, response in zip(prompts, begun, known, strict=True))
        return {turn.number: text for turn, text in zip(turns, said, strict=True) if text is not None}

    def _text(self, prompt: list[int], opening: str, response: Response | None) -> str | None:
        """A request as its user would have typed it; None if it did not end, is empty, or holds what the template alone writes."""
        assert response is not None
        tokens = list(response.tokens[:-1])
        if response.finish_reason != "stop" or self._special.intersection(tokens):
            return None
        before = self._tokenizer.decode(prompt, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        whole = self._tokenizer.decode(prompt + tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        text = (opening + whole[len(before) :]).strip()  # decoded together: some tokenizers drop a blank in front
        return text if text and "\ufffd" not in text else None

    def _new(self, requests: Mapping[int, str]) -> dict[int, str]:
        """The requests without those that say too little that none before them said, in runs of tokens: so it is in every language."""
        seen: set[tuple[int, ...]] = set()
        new = {}
        for number, text in requests.items():
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
            runs = {tuple(ids[start : start + _RUN]) for start in range(max(1, len(ids) - _RUN + 1))}
            if len(runs - seen) >= max(self._drawn.min_new_share * len(runs), 1):
                new[number] = text
                seen |= runs
        return new

    def _answered(self, firsts: Mapping[int, tuple[Message, ...]]) -> tuple[list[tuple[Any, Response]], dict[int, tuple[Message, ...]]]:
        """The target's answers, as entries of a response cache, and what is said in each conversation up to there."""
        data = self._config.data
        driver = Driver(self._config, self._tokenizer, self._journal, self._target_digest, self._progress)
        entries, histories = [], {}
        for answered in driver.by_target([Conversation(str(number), said) for number, said in firsts.items()], self._generate):
            messages, number = answered.conversation.messages, int(answered.conversation.id)
            prompt = render_prompt(self._tokenizer, messages[:-1], data.template_arguments, id=f"request {number}")
            entries.append((cache_key(self._target_digest, data.generation, prompt), (answered.responses or ())[0]))
            histories[number] = messages
        return entries, histories

    def _seed(self, number: int, purpose: str) -> int:
        digest = hashlib.sha256(json.dumps([self._config.run.seed, number, purpose]).encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1

    def _random(self, number: int, purpose: str) -> float:
        return random.Random(self._seed(number, purpose)).random()


def _write_rows(path: Path, conversations: Mapping[int, Sequence[Message]]) -> None:
    rows = (
        {"id": f"drawn-{number:07}", "messages": [{"role": message.role, "content": message.content} for message in messages]}
        for number, messages in conversations.items()
    )
    content = "".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows)
    with atomic_write(path) as temporary:
        temporary.write_bytes(gzip.compress(content.encode(), mtime=0))


def _error(value: object, message: str) -> DataError:
    remedy = "A base model writes no requests: name an instruction-tuned target, or give prompts of another source. For a chat model raise the limit"
    return DataError("data", [Problem("data.sources (target)", value, message, remedy)])
