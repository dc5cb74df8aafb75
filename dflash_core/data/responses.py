"""Answering the prompts: every assistant turn is generated anew by the target, in order, batch by batch.

The responses of the data are replaced, so that the drafter learns the target's own distribution (unless
``data.regenerate`` is 'never'). A batch is on disk before the next one begins, and which prompts make a batch depends on
the data alone: a run that was killed at any moment and started again gives the same bytes as one that was not.

Results: ``conversations.jsonl.gz`` (one ``Answered`` a line, in the order of the data), ``rejected.jsonl``, and
``counts.json``, which is written last.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import unicodedata
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from dflash_core.config import GenerationConfig, PipelineConfig, digest_of
from dflash_core.data.cache import Journal, cache_key, read_response_cache, response_from, response_record, write_response_cache
from dflash_core.data.prompts import read_prompts
from dflash_core.data.rejects import RejectLog
from dflash_core.data.render import check_tokenizer, render_prompt, response_text
from dflash_core.data.types import Conversation, Message, Response
from dflash_core.errors import DataError, Problem
from dflash_core.stages import Progress, atomic_write, no_progress, sync_folder, write_json_atomic

CONVERSATIONS = "conversations.jsonl.gz"
_BATCHES_PER_WINDOW = 16  # conversations in flight together; prompts of one length share a batch within it


class Generate(Protocol):
    """What a target offers: responses to prompts (token ids), in their order; prompt i draws from its own ``seeds[i]`` when sampling."""

    def __call__(self, prompts: list[list[int]], generation: GenerationConfig, /, *, seeds: list[int]) -> list[Response]: ...


@dataclass(frozen=True)
class Answered:
    """A conversation whose assistant turns are there. ``responses``: the tokens of each, or None where the data's own text is kept."""

    conversation: Conversation
    responses: tuple[Response, ...] | None


def build_responses(
    config: PipelineConfig, tokenizer: Any, generate: Generate, folder: Path, *, target_digest: str, progress: Progress = no_progress
) -> dict[str, int]:
    """Read the prompts, drop repetitions, and write every conversation with its responses into ``folder``.

    Args:
        generate: called with at most ``data.generation.batch_size`` prompts; never called when the cache has all responses or
            ``data.regenerate`` is 'never'.
        target_digest: of the target's weights; responses in ``data.response_cache`` count only under the same digest.

    Returns:
        counts: rows, rejected, duplicates, conversations, turns, generated, from_cache, response_tokens, truncated.

    Raises:
        DataError: a source cannot be read, too many rows are rejected, or none is left. Found before anything is generated.
    """
    folder.mkdir(parents=True, exist_ok=True)
    finished = folder / "counts.json"
    if finished.is_file():
        counts: dict[str, int] = json.loads(finished.read_text(encoding="utf-8"))
        return counts
    check_tokenizer(tokenizer)
    with RejectLog(folder / "rejected.jsonl") as rejected:
        conversations, duplicates = _select(config, tokenizer, rejected)
    counts = {"rows": rejected.seen, "rejected": rejected.count, "duplicates": duplicates, "conversations": len(conversations)}
    journal_path = folder / "journal.jsonl"
    if config.data.regenerate == "never":
        counts |= _write(folder / CONVERSATIONS, (Answered(conversation, None) for conversation in conversations))
    else:
        with Journal(journal_path) as journal:
            driver = _Driver(config, tokenizer, generate, journal, target_digest, progress)
            counts |= _write(folder / CONVERSATIONS, driver.answer(conversations))
            counts |= {"generated": driver.generated, "from_cache": driver.from_cache}
    write_json_atomic(finished, counts)
    journal_path.unlink(missing_ok=True)
    sync_folder(folder)
    return counts


def read_responses(folder: Path) -> Iterator[Answered]:
    """The conversations that ``build_responses`` wrote, in order.

    Raises:
        DataError: the file is missing or damaged.
    """
    path = folder / CONVERSATIONS
    where = str(path)
    try:
        with gzip.open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                where = f"{path}:{number}"
                yield _answered(json.loads(line))
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        reason = f"is not a readable record of responses: {type(error).__name__}: {error}"
        raise DataError(where, [Problem(where, path.name, reason, f"Delete {folder} and run the stage again")]) from error


def save_response_cache(config: PipelineConfig, tokenizer: Any, responses_folder: Path, path: Path, *, target_digest: str) -> int:
    """Turn a folder of generated responses into a file for ``data.response_cache``. Returns the number of responses."""
    entries = []
    for answered in read_responses(responses_folder):
        turns = [index for index, message in enumerate(answered.conversation.messages) if message.role == "assistant"]
        for turn, response in zip(turns, answered.responses or (), strict=False):
            prompt = render_prompt(tokenizer, answered.conversation.messages[:turn], config.data.template_arguments, id=answered.conversation.id)
            entries.append((cache_key(target_digest, config.data.generation, prompt), response))
    return write_response_cache(path, entries)


def normalised(text: str) -> str:
    """Text in the form in which prompts are compared: Unicode NFC, white space runs as one blank."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def fingerprint_of(conversation: Conversation, *, with_responses: bool) -> bytes:
    """sha256 of what is said, the same for conversations that repeat each other. ``with_responses``: what the assistant says counts too."""
    compared = [message for message in conversation.messages if with_responses or message.role != "assistant"]
    return hashlib.sha256(json.dumps([(message.role, normalised(message.content)) for message in compared]).encode()).digest()


def _select(config: PipelineConfig, tokenizer: Any, rejected: RejectLog) -> tuple[list[Conversation], int]:
    """The usable conversations without repetitions, and the number of repetitions. All checks that need no target are here."""
    keep = config.data.regenerate == "never"
    chosen: list[Conversation] = []
    seen: set[bytes] = set()
    duplicates = 0
    for conversation in read_prompts(config.data, rejected):
        fingerprint = fingerprint_of(conversation, with_responses=keep)
        if fingerprint in seen:
            duplicates += 1
            continue
        problem = _problem_of_kept(conversation) if keep else _problem_of_prompt(config, tokenizer, conversation)
        if problem is not None:
            rejected.add(problem)
            continue
        seen.add(fingerprint)
        chosen.append(conversation)
    rejected.check(config.data.max_rejected_fraction)
    if not chosen:
        raise DataError("data", [Problem("data.sources", rejected.seen, "no conversation is left to work with", f"See {rejected.path}")])
    return chosen, duplicates


def _problem_of_kept(conversation: Conversation) -> Problem | None:
    last = conversation.messages[-1]
    if last.role != "assistant":
        remedy = "Set data.regenerate to 'auto', or give the row a response"
        return Problem(conversation.id, last.role, "the last message has no response, and data.regenerate is 'never'", remedy)
    empty = next((message for message in conversation.messages if message.role == "assistant" and not message.content.strip()), None)
    return Problem(conversation.id, "", "has an empty response", "Leave the row out, or set data.regenerate to 'auto'") if empty else None


def _problem_of_prompt(config: PipelineConfig, tokenizer: Any, conversation: Conversation) -> Problem | None:
    rounds = _rounds(conversation)
    for messages in rounds:
        if messages[-1].role != "user":
            remedy = "End what comes before a response with a user message, or set data.regenerate to 'never'"
            return Problem(conversation.id, messages[-1].role, "the last message before a response is not the user's", remedy)
    try:
        prompt = render_prompt(tokenizer, rounds[0], config.data.template_arguments, id=conversation.id)
        if len(rounds) > 1:  # an answer stands in for those to come: does the template take the roles in this order?
            history = [message for messages in rounds[:-1] for message in (*messages, Message("assistant", "Yes."))]
            render_prompt(tokenizer, [*history, *rounds[-1]], config.data.template_arguments, id=conversation.id)
    except DataError as error:
        return error.problems[0]
    room = config.data.max_length - config.data.min_response_tokens
    if len(prompt) > room:
        message = f"its prompt has more than the {room} tokens that data.max_length = {config.data.max_length} leaves before a response"
        return Problem(conversation.id, len(prompt), message, "Shorten it or raise data.max_length")
    return None


def _rounds(conversation: Conversation) -> list[list[Message]]:
    """What is said before each assistant turn since the turn before. A last message without a response gets one."""
    rounds: list[list[Message]] = [[]]
    for message in conversation.messages:
        if message.role == "assistant":
            rounds.append([])
        else:
            rounds[-1].append(message)
    return rounds if rounds[-1] else rounds[:-1]


@dataclass
class _Dialogue:
    """A conversation while it is answered."""

    conversation: Conversation
    rounds: list[list[Message]]
    messages: list[Message] = field(default_factory=list)
    responses: list[Response] = field(default_factory=list)


@dataclass(frozen=True)
class _Request:
    """One turn that waits for its response."""

    dialogue: _Dialogue
    prompt: list[int]
    seed: int


class _Driver:
    """Answers conversations window by window, turn by turn, batch by batch."""

    def __init__(self, config: PipelineConfig, tokenizer: Any, generate: Generate, journal: Journal, target_digest: str, progress: Progress):
        self._config, self._tokenizer, self._generate = config, tokenizer, generate
        self._journal, self._target_digest, self._progress = journal, target_digest, progress
        self._generation = config.data.generation
        path = config.data.response_cache if config.data.regenerate == "auto" else None
        self._cache = read_response_cache(path, target_digest, self._generation) if path else {}
        self.generated = self.from_cache = 0

    def answer(self, conversations: Sequence[Conversation]) -> Iterator[Answered]:
        """The conversations with all assistant turns generated, in order."""
        width = _BATCHES_PER_WINDOW * self._generation.batch_size
        turns = sum(len(_rounds(conversation)) for conversation in conversations)
        for start in range(0, len(conversations), width):
            window = [_Dialogue(conversation, _rounds(conversation)) for conversation in conversations[start : start + width]]
            for turn in range(max(len(dialogue.rounds) for dialogue in window)):
                requests = [request for dialogue in window if turn < len(dialogue.rounds) and (request := self._request(dialogue, turn))]
                self._run(requests, turns)
            for dialogue in window:
                answered = Conversation(dialogue.conversation.id, tuple(dialogue.messages), dialogue.conversation.group)
                yield Answered(answered, tuple(dialogue.responses))

    def _request(self, dialogue: _Dialogue, turn: int) -> _Request | None:
        """The next turn, or None where the history has grown so long that the response would be cut off anyway."""
        if len(dialogue.responses) < turn:
            return None
        data, name = self._config.data, dialogue.conversation.id
        messages = [*dialogue.messages, *dialogue.rounds[turn]]
        prompt = render_prompt(self._tokenizer, messages, data.template_arguments, id=name)
        if turn > 0 and len(prompt) > data.max_length - data.min_response_tokens:
            return None
        dialogue.messages = messages
        seed = hashlib.sha256(json.dumps([self._config.run.seed, name, turn]).encode()).digest()
        return _Request(dialogue, prompt, int.from_bytes(seed[:8], "little") >> 1)

    def _run(self, requests: Sequence[_Request], total: int) -> None:
        missing = []
        for request in requests:
            cached = self._cache.get(cache_key(self._target_digest, self._generation, request.prompt).prompt)
            if cached is None:
                missing.append(request)
            else:
                self.from_cache += 1
                self._accept(request, cached)
        missing.sort(key=lambda request: len(request.prompt))
        size = self._generation.batch_size
        for batch in (missing[start : start + size] for start in range(0, len(missing), size)):
            for request, response in zip(batch, self._responses(batch), strict=True):
                self.generated += 1
                self._accept(request, response)
            self._progress(self.generated + self.from_cache, total, "responses")
        self._progress(self.generated + self.from_cache, total, "responses")

    def _responses(self, batch: Sequence[_Request]) -> list[Response]:
        prompts, seeds = [request.prompt for request in batch], [request.seed for request in batch]
        key = digest_of([self._target_digest, self._generation.model_dump(), prompts, seeds])
        responses = self._journal.get(key)
        if responses is None:
            responses = self._generate(prompts, self._generation, seeds=seeds)
            self._journal.append(key, responses)
        return responses

    def _accept(self, request: _Request, response: Response) -> None:
        dialogue = request.dialogue
        dialogue.responses.append(response)
        dialogue.messages = [*dialogue.messages, Message("assistant", response_text(self._tokenizer, response))]


def _write(path: Path, answered: Iterable[Answered]) -> dict[str, int]:
    counts = {"turns": 0, "response_tokens": 0, "truncated": 0}
    with atomic_write(path) as temporary, temporary.open("wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as file:
        for item in answered:
            _write_line(file, item)
            counts["turns"] += sum(message.role == "assistant" for message in item.conversation.messages)
            for response in item.responses or ():
                counts["response_tokens"] += len(response.tokens)
                counts["truncated"] += response.finish_reason == "length"
    return counts


def _write_line(file: IO[bytes] | gzip.GzipFile, item: Answered) -> None:
    conversation = item.conversation
    record = {
        "id": conversation.id,
        "group": conversation.group,
        "messages": [{"role": message.role, "content": message.content} for message in conversation.messages],
        "responses": None if item.responses is None else [response_record(response) for response in item.responses],
    }
    file.write(json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")


def _answered(record: Any) -> Answered:
    messages = tuple(Message(message["role"], message["content"]) for message in record["messages"])
    responses = None if record["responses"] is None else tuple(map(response_from, record["responses"]))
    return Answered(Conversation(record["id"], messages, record["group"]), responses)
