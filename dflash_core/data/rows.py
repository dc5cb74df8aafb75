"""From one row of a data set, in any of the usual shapes, to a conversation.

Columns, the first that is present wins: ``messages`` (role/content), ``conversations`` (from/value or role/content),
``prompt`` + ``response``, ``prompt`` (text, or a list of messages). Or a logged request, see ``traffic``. Optional: ``id``
(text or number) and ``group``
(conversations of one group stay on one side of the held-out split).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from dflash_core.data.traffic import LogError, request_row
from dflash_core.data.types import Conversation, Message, Role
from dflash_core.errors import Problem

COLUMNS = ("messages", "conversations", "prompt")
EXTRA_COLUMNS = ("response", "id", "group")

_ROLES: dict[str, Role] = {
    **{role: role for role in get_args(Role)},
    "developer": "system",
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
}


class RowError(Exception):
    """A row that cannot be used; ``problem`` says why."""

    def __init__(self, problem: Problem):
        super().__init__(str(problem))
        self.problem = problem


def parse_row(row: object, where: str) -> Conversation:
    """The conversation in a row.

    Args:
        row: the row as plain Python values.
        where: its place, ``file:line``; its last part names the conversation if the row has no ``id``.

    Raises:
        RowError: a column is missing, of the wrong type, or empty; the roles cannot be told.
    """
    if not isinstance(row, Mapping):
        raise _error(where, row, "a row must be a JSON object", f"Write objects with one of {', '.join(COLUMNS)}")
    try:
        row = request_row(row, where)
    except LogError as error:
        raise RowError(error.problem) from error
    column = next((name for name in COLUMNS if row.get(name) is not None), None)
    if column is None:
        raise _error(where, sorted(map(str, row)), f"has none of the columns {', '.join(COLUMNS)}", "Rename the column that holds the prompts")
    messages = _messages(row[column], f"{where}: {column}", column)
    if column == "prompt" and row.get("response") is not None:
        messages.append(Message("assistant", _text(row["response"], f"{where}: response")))
    _check_order(messages, where)
    return Conversation(_name(row, "id", where) or where.rsplit("/", 1)[-1], tuple(messages), _name(row, "group", where))


def _messages(value: object, where: str, column: str) -> list[Message]:
    if column == "prompt" and isinstance(value, str):
        return [Message("user", _filled(_text(value, where), where))]
    if not isinstance(value, list):
        expected = "text or a list of messages" if column == "prompt" else "a list of messages"
        raise _error(where, value, f"must be {expected}, found {type(value).__name__}", "Correct the column")
    if not value:
        raise _error(where, value, "is an empty list", "Leave the row out, or give it at least one user message")
    return [_message(item, f"{where}.{index}") for index, item in enumerate(value)]


def _message(item: object, where: str) -> Message:
    if not isinstance(item, Mapping):
        raise _error(where, item, "a message must be an object", 'Write {"role": "user", "content": "…"}')
    speaker_key, content_key = ("role", "content") if item.get("role") is not None else ("from", "value")
    speaker = item.get(speaker_key)
    role = _ROLES.get(speaker.lower()) if isinstance(speaker, str) else None
    if role is None:
        raise _error(f"{where}.{speaker_key}", speaker, "is not a known role", f"Use one of {', '.join(get_args(Role))} (or human, gpt)")
    if item.get("tool_calls"):
        raise _error(f"{where}.tool_calls", item["tool_calls"], "tool calls are not supported", "Leave such conversations out")
    text = _text(item.get(content_key), f"{where}.{content_key}")
    return Message(role, text if role == "assistant" else _filled(text, f"{where}.{content_key}"))


def _text(value: object, where: str) -> str:
    """Text as it is, or joined from OpenAI's content parts. Empty text is allowed here: an assistant may say nothing."""
    if isinstance(value, list):
        parts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in value]
        if not all(isinstance(part, str) for part in parts):
            raise _error(where, value, "has parts that are not text", "Only text is supported; leave such rows out")
        value = "".join(map(str, parts))
    if not isinstance(value, str):
        raise _error(where, value, f"must be text, found {type(value).__name__}", "Correct the type")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _error(where, ascii(value), "holds half of a surrogate pair, which is not valid Unicode", "Write the character whole") from error
    return value


def _filled(text: str, where: str) -> str:
    if not text.strip():
        raise _error(where, text, "is empty", "Leave the row out")
    return text


def _name(row: Mapping[Any, Any], column: str, where: str) -> str | None:
    value = row.get(column)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise _error(f"{where}: {column}", value, f"must be text or a whole number, found {type(value).__name__}", "Correct the type")
    return _text(str(value), f"{where}: {column}")


def _check_order(messages: list[Message], where: str) -> None:
    roles = [message.role for message in messages]
    if "user" not in roles:
        raise _error(where, roles, "has no user message", "Give it one")
    if next(role for role in roles if role != "system") == "assistant":
        raise _error(where, roles, "begins with the assistant", "Begin with a user message")
    for index in range(1, len(roles)):
        if roles[index] == roles[index - 1] == "assistant":
            raise _error(where, roles, f"messages {index - 1} and {index} are both the assistant's", "Join them into one")


def _error(where: str, value: object, message: str, remedy: str) -> RowError:
    return RowError(Problem(where, value, message, remedy))
