"""Answering the prompts: every assistant turn is generated anew by the target, turn after turn.

The responses of the data are replaced, so that the drafter learns the target's own distribution (unless
``data.regenerate`` is 'never'). A response is on disk before anything is made of it, and depends on its own prompt and
seed alone: a run that was killed at any moment and started again repeats only what was not there yet, and ends the same as
one that was not, to the byte where the arithmetic of a response does not depend on its company (``TargetModel.answers``).
With ``data.generation.endpoints`` servers answer instead.

Results: ``conversations.jsonl.gz`` (one ``Answered`` a line, in the order of the data), ``rejected.jsonl``, and
``counts.json``, which is written last.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import unicodedata
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from dflash_core.config import PipelineConfig
from dflash_core.data.cache import Journal, cache_key, response_from, response_record, write_response_cache
from dflash_core.data.driver import Answered, Driver, Generate, rounds_of
from dflash_core.data.endpoint import EndpointClient
from dflash_core.data.filters import continued
from dflash_core.data.prompts import read_prompts
from dflash_core.data.rejects import RejectLog
from dflash_core.data.render import check_tokenizer, render_prompt
from dflash_core.data.sets import KeptOut, refuse_overlap
from dflash_core.data.types import Conversation, Message
from dflash_core.errors import DataError, Problem
from dflash_core.stages import Progress, atomic_write, no_progress, sync_folder, write_json_atomic
from dflash_core.words import counted

CONVERSATIONS = "conversations.jsonl.gz"


def build_responses(
    config: PipelineConfig,
    tokenizer: Any,
    generate: Generate | EndpointClient,
    folder: Path,
    *,
    target_digest: str,
    answers: Path | None = None,
    progress: Progress = no_progress,
) -> dict[str, int]:
    """Read the prompts, drop repetitions, and write every conversation with its responses into ``folder``.

    Args:
        generate: called with the prompts of many conversations, or endpoints to ask; never used when the cache has all
            responses or ``data.regenerate`` is 'never'.
        target_digest: of the target's weights; responses in ``data.response_cache`` count only under the same digest.
        answers: a response cache of this run's own.

    Returns:
        counts: rows, rejected, filtered, duplicates, conversations, turns, generated, from_cache, dropped (responses), response_tokens, truncated.

    Raises:
        DataError: a source cannot be read, too many rows are rejected, or none is left. Found before anything is generated, except
            that endpoints refuse too many.
        EndpointError: no endpoint answers, or one serves something else than the target. What was answered is kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    finished = folder / "counts.json"
    counts: dict[str, int]
    with contextlib.suppress(OSError, ValueError):  # not finished yet, or damaged since
        counts = json.loads(finished.read_bytes())
        return counts
    check_tokenizer(tokenizer)
    journal_path = folder / "journal.jsonl"
    with RejectLog(folder / "rejected.jsonl") as rejected:
        conversations, duplicates = _select(config, tokenizer, rejected)
        counts = {"rows": rejected.seen, "filtered": rejected.filtered, "duplicates": duplicates}
        if config.data.regenerate == "never":
            counts |= _write(folder / CONVERSATIONS, (Answered(conversation, None) for conversation in conversations))
        else:
            with Journal(journal_path) as journal:
                driver = Driver(config, tokenizer, journal, target_digest, progress, answers=answers)
                if isinstance(generate, EndpointClient):
                    answered = _usable(driver.by_endpoints(conversations, generate), rejected, config.data.max_rejected_fraction)
                else:
                    answered = driver.by_target(conversations, generate)
                counts |= _write(folder / CONVERSATIONS, answered)
                counts |= {"generated": driver.generated, "from_cache": driver.from_cache, "dropped": driver.dropped}
        counts["rejected"] = rejected.count
    if counts["conversations"] == 0:
        message = "every response was dropped: all reach max_new_tokens" if counts.get("dropped") else "no conversation is left to work with"
        remedy = f"Raise data.generation.max_new_tokens, or see {folder / 'rejected.jsonl'}"
        raise DataError("data", [Problem("data.generation.truncated", config.data.generation.truncated, message, remedy)])
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


def write_prompts(config: PipelineConfig, tokenizer: Any, path: Path) -> dict[str, int]:
    """Write down the conversations that ``build_responses`` would answer: a JSONL source of its own, for machines that cannot reach the others.

    The order is that of digests of the ids, whatever the sources' order, so that any ``limit`` takes a fair part of each.

    Args:
        path: ends in ``.jsonl`` or ``.jsonl.gz``.

    Returns:
        counts: rows, rejected, filtered, duplicates, conversations. What was rejected or left out is listed beside, in ``<name>.rejected.jsonl``.

    Raises:
        DataError: a source cannot be read, too many rows are rejected, none is left, or ``path`` has another ending.
    """
    if not path.name.lower().endswith((".jsonl", ".jsonl.gz")):
        raise DataError(str(path), [Problem("OUT", str(path), "is written as JSON lines", "Name a file that ends in .jsonl or .jsonl.gz")])
    with RejectLog(path.with_name(f"{path.name}.rejected.jsonl")) as rejected:
        conversations, duplicates = _select(config, tokenizer, rejected)
        counts = {"rows": rejected.seen, "rejected": rejected.count, "filtered": rejected.filtered, "duplicates": duplicates}
    if not rejected.count + rejected.filtered:
        rejected.path.unlink()
    lines = []
    for conversation in sorted(conversations, key=lambda item: hashlib.sha256(item.id.encode()).digest()):
        messages = [{"role": message.role, "content": message.content} for message in conversation.messages]
        row = {"id": conversation.id, "group": conversation.group, "messages": messages}
        lines.append(json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
    content = b"".join(lines)
    with atomic_write(path) as temporary:
        temporary.write_bytes(gzip.compress(content, mtime=0) if path.name.lower().endswith(".gz") else content)
    return counts | {"conversations": len(conversations)}


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
    if config.data.filters.drop_continued:
        again = continued(chosen, with_responses=keep)
        duplicates += len(again)
        chosen = [conversation for conversation in chosen if conversation.id not in again]
    if not chosen:
        sources = ", ".join(item.source for item in config.data.sources)
        message = f"of {counted(rejected.seen, 'row')} none is left to work with"
        raise DataError("data", [Problem("data.sources", sources, message, f"The reasons are in {rejected.path}"), *rejected.first])
    if config.evaluation.sets and config.data.evaluation_overlap == "refuse":
        kept_out = KeptOut.of(config, rejected.path.with_name("rejected-of-sets.jsonl"))
        refuse_overlap([(item.id, name) for item in chosen if (name := kept_out.found_in(item)) is not None])
    return chosen, duplicates


def _problem_of_kept(conversation: Conversation) -> Problem | None:
    last = conversation.messages[-1]
    if last.role != "assistant":
        remedy = "Set data.regenerate to 'auto', or give the row a response"
        return Problem(conversation.id, last.role, "the last message has no response, and data.regenerate is 'never'", remedy)
    empty = next((message for message in conversation.messages if message.role == "assistant" and not message.content.strip()), None)
    return Problem(conversation.id, "", "has an empty response", "Leave the row out, or set data.regenerate to 'auto'") if empty else None


def _problem_of_prompt(config: PipelineConfig, tokenizer: Any, conversation: Conversation) -> Problem | None:
    rounds = rounds_of(conversation)
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


def _usable(answered: Iterable[Answered | Problem], rejected: RejectLog, limit: float) -> Iterator[Answered]:
    """What was answered; what was refused is rejected, and too much of that ends it at once."""
    for item in answered:
        if isinstance(item, Problem):
            rejected.add(item)
            rejected.check(limit)
        else:
            yield item


def _write(path: Path, answered: Iterable[Answered]) -> dict[str, int]:
    counts = {"conversations": 0, "turns": 0, "response_tokens": 0, "truncated": 0}
    with atomic_write(path) as temporary, temporary.open("wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as file:
        for item in answered:
            _write_line(file, item)
            counts["conversations"] += 1
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
