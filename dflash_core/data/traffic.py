"""Traffic as data: what servers and gateways log of chat completions, as rows that ``rows.parse_row`` reads.

JSON lines, one request each:

- a request's body as it is, as vLLM writes it (``messages`` and ``request_type``);
- OpenAI's batch input: ``{"custom_id", "method", "url", "body": {…}}``;
- a gateway's pair of bodies: ``{"request": {…}, "response": {…}}``, or ``messages`` beside ``response`` as LiteLLM has it;
  bodies may also be text that holds JSON.

vLLM's own log (``.log``, text): lines of ``--enable-log-requests`` that hold the prompt, which newer versions write at the
level DEBUG only. The prompt there is rendered already; it is taken apart again for the templates that name each turn's role
(ChatML, Llama 3, Gemma).

An answer is taken only if it is whole: it ended by itself, with its thinking, if any, in the text.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from dflash_core.errors import Problem

_BODIES = ("body", "request")
_CHAT = "/chat/completions"

_LITERAL = r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_LOGGED = re.compile(rf"(?:Received request (\S+): prompt: {_LITERAL}, params: |Request (\S+) details: prompt: {_LITERAL}, prompt_token_ids: )")


class LogError(Exception):
    """A logged request that cannot be used; ``problem`` says why."""

    def __init__(self, problem: Problem):
        super().__init__(str(problem))
        self.problem = problem


def request_row(row: Mapping[Any, Any], where: str) -> Mapping[Any, Any]:
    """The row with ``messages`` of a logged request; a row that is none is returned as it is.

    Raises:
        LogError: it is a request of another kind than chat, was made with tools, or its parts cannot be read.
    """
    bare = all(row.get(column) is None for column in ("messages", "conversations", "prompt"))
    name = next((key for key in _BODIES if row.get(key) is not None), None) if bare else None
    answer = row.get("response")
    reply = _reply(answer)
    is_logged = row.get("request_type") or isinstance(answer, Mapping) or ("choices" in reply and row.get("messages") is not None)
    if name is None and not is_logged:
        return row
    body = _object(row[name], f"{where}: {name}") if name else row
    kind, url = str(row.get("request_type") or body.get("request_type") or ""), str(row.get("url") or _CHAT)
    if (kind and not kind.startswith("ChatCompletion")) or not url.endswith(_CHAT) or body.get("messages") is None:
        shown = kind or (url if not url.endswith(_CHAT) else sorted(map(str, body)))
        raise LogError(Problem(where, shown, "is not the request of a chat completion", "Leave such requests out"))
    if body.get("tools") or body.get("functions"):
        raise LogError(Problem(f"{where}: tools", "…", "the request offers tools, which are not supported", "Leave such requests out"))
    messages = list(body["messages"]) if isinstance(body["messages"], list) else body["messages"]
    said = _whole_answer(reply)
    if said is not None and isinstance(messages, list):
        messages = [*messages, {"role": "assistant", "content": said}]
    ids = (row.get("custom_id"), row.get("request_id"), row.get("id"), reply.get("id"))
    return {"id": next((value for value in ids if value is not None), None), "group": row.get("group"), "messages": messages}


def log_row(line: str, where: str) -> dict[str, Any] | Problem | None:
    """The row of a line of vLLM's log; None for a line that holds no prompt."""
    found = _LOGGED.search(line)
    if found is None:
        return None
    name, text = (part for part in found.groups() if part is not None)
    try:
        prompt = ast.literal_eval(text)
        messages = rendered_messages(prompt)
    except (ValueError, SyntaxError, MemoryError) as error:
        return Problem(where, text[:100], f"is no prompt that can be taken apart: {error}", "Log the bodies of requests as JSON lines instead")
    return {"id": name, "messages": messages}


class _Frame(NamedTuple):
    """How a family of chat templates writes a turn, and how it asks for the next one."""

    start: str
    turn: re.Pattern[str]
    ending: re.Pattern[str]


_FRAMES = (
    _Frame("", re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n?", re.S), re.compile(r"<\|im_start\|>assistant\n(<think>\n(\n</think>\n\n)?)?")),
    _Frame(
        "<|begin_of_text|>",
        re.compile(r"<\|start_header_id\|>(\w+)<\|end_header_id\|>\n\n(.*?)<\|eot_id\|>", re.S),
        re.compile(r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n"),
    ),
    _Frame("<bos>", re.compile(r"<start_of_turn>(\w+)\n(.*?)<end_of_turn>\n", re.S), re.compile(r"<start_of_turn>model\n")),
)
_DATES = re.compile(r"\ACutting Knowledge Date: .*\nToday Date: .*\n\n")  # Llama 3's template writes them into every system message itself


def rendered_messages(prompt: str) -> list[dict[str, str]]:
    """The messages of a prompt that a chat template rendered.

    Raises:
        ValueError: the template is of no known family, or the end of the prompt is missing.
    """
    for frame in _FRAMES:
        messages, place = [], len(frame.start) if prompt.startswith(frame.start) else 0
        while (turn := frame.turn.match(prompt, place)) is not None:
            role, content = turn.groups()
            if role != "system" or (content := _DATES.sub("", content)):
                messages.append({"role": role, "content": content})
            place = turn.end()
        if messages:
            if frame.ending.fullmatch(prompt, place):
                return messages
            raise ValueError("its end is missing or is not the beginning of an answer (does --max-log-len cut it off?)")
    raise ValueError("its chat template is of no family that is known")


def _whole_answer(reply: Mapping[Any, Any]) -> object | None:
    """The text of a response's body, or of a batch's output around it; None if it failed, was cut off, calls tools, or hides its thinking."""
    if isinstance(reply.get("body"), Mapping):
        reply = reply["body"]
    choices = reply.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], Mapping) else {}
    message = choice.get("message")
    if choice.get("finish_reason") != "stop" or not isinstance(message, Mapping):
        return None
    if any(message.get(name) for name in ("tool_calls", "function_call", "reasoning_content", "reasoning", "refusal")):
        return None
    content: object | None = message.get("content")
    return content


def _reply(answer: object) -> Mapping[Any, Any]:
    """A response's body; empty where something else was logged: nothing, the words of an error, the events of a stream."""
    if isinstance(answer, str):
        with contextlib.suppress(ValueError, RecursionError):
            answer = json.loads(answer)
    return answer if isinstance(answer, Mapping) else {}


def _object(value: object, where: str) -> Mapping[Any, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise LogError(Problem(where, str(value)[:100], f"is not JSON: {error}", "Log whole bodies")) from error
    if not isinstance(value, Mapping):
        raise LogError(Problem(where, value, f"must be a JSON object, found {type(value).__name__}", "Log the body of the request"))
    return value
