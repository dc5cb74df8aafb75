"""What of the data is used, by rules that hold for every language, and what is blanked out in it.

``data.filters`` does nothing unless it is set. A conversation that a filter leaves out is listed with its reason but does
not count as a row that is wrong: that so much of the traffic is like this is known.
"""

from __future__ import annotations

import re
import unicodedata
import zlib
from collections.abc import Sequence
from dataclasses import replace

from dflash_core.config import FilterConfig
from dflash_core.data.types import Conversation
from dflash_core.errors import Problem

_LEAVE = "It is left out as data.filters say"


class Filter:
    """The filters of a configuration, made ready."""

    def __init__(self, config: FilterConfig):
        self._config = config
        self._redactions = [(re.compile(item.pattern), item.replacement) for item in config.redact]

    def redacted(self, conversation: Conversation) -> Conversation:
        """The conversation with all that ``data.filters.redact`` matches replaced in every message, rule after rule."""
        for pattern, text in self._redactions:
            said = tuple(replace(message, content=pattern.sub(text, message.content)) for message in conversation.messages)
            conversation = replace(conversation, messages=said)
        return conversation

    def problem(self, conversation: Conversation) -> Problem | None:
        """Why a conversation is left out, judged by what its users say; None if it is not."""
        rules, name = self._config, conversation.id
        if self._redactions and not all(message.content.strip() for message in conversation.messages if message.role != "assistant"):
            return Problem(name, "", "nothing is left of a message in which data.filters.redact blank something out", _LEAVE)
        text = "\n".join(message.content for message in conversation.messages if message.role == "user")
        if len(text) < rules.min_characters:
            return Problem(name, text, f"has {len(text)} characters, fewer than data.filters.min_characters = {rules.min_characters}", _LEAVE)
        if rules.max_characters is not None and len(text) > rules.max_characters:
            return Problem(name, text, f"has {len(text)} characters, more than data.filters.max_characters = {rules.max_characters}", _LEAVE)
        if (share := word_share(text)) < rules.min_word_share:
            message = f"{share:.0%} of it is letters and digits, less than data.filters.min_word_share = {rules.min_word_share}"
            return Problem(name, text, message, _LEAVE)
        if (share := compressed_share(text)) < rules.min_compressed_share:
            message = f"it repeats itself: zlib makes it {share:.0%} of its size, less than data.filters.min_compressed_share"
            return Problem(name, text, f"{message} = {rules.min_compressed_share}", _LEAVE)
        return None


def word_share(text: str) -> float:
    """Share of the characters, white space aside, that are letters, marks or digits of any script. 1 for no characters."""
    characters = [character for character in text if not character.isspace()]
    return sum(unicodedata.category(character)[0] in "LMN" for character in characters) / len(characters) if characters else 1.0


def compressed_share(text: str) -> float:
    """Size that zlib brings the text to, as a share of its own: about 0.5 for a page of prose or code, near 0 for repetition. At most 1."""
    data = text.encode()
    return min(1.0, len(zlib.compress(data)) / len(data)) if data else 1.0


def continued(conversations: Sequence[Conversation], *, with_responses: bool) -> set[str]:
    """Ids of conversations that another one begins with and goes on from: chats log all that was said before with every turn.

    Args:
        with_responses: what the assistant says counts too, since it is kept.
    """
    said = [
        tuple((message.role, message.content) for message in item.messages if with_responses or message.role != "assistant") for item in conversations
    ]
    beginnings = {hash(messages[:length]) for messages in said for length in range(1, len(messages))}
    return {item.id for item, messages in zip(conversations, said, strict=True) if hash(messages) in beginnings}
