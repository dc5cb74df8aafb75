"""The small types that the data part hands to the others. Nothing here imports torch or transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Role = Literal["system", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Message:
    """One turn of a conversation: who speaks and what, as text."""

    role: Role
    content: str


@dataclass(frozen=True)
class Conversation:
    """Messages in order, with a name that is stable between runs.

    id:       unique within a data set, from the data itself (``id`` column) or ``<source>:<line>``
    messages: at least one; assistant turns are kept or regenerated as the config says
    group:    split key; conversations of one group are never divided between training and held-out. None: the prompt's text decides
    """

    id: str
    messages: tuple[Message, ...]
    group: str | None = None


@dataclass(frozen=True)
class Response:
    """What the target answered to one prompt.

    tokens:        generated ids, the stop token included if it was generated
    finish_reason: 'stop' (a stop token ended it) or 'length' (max_new_tokens ended it)
    """

    tokens: tuple[int, ...]
    finish_reason: FinishReason


@dataclass(frozen=True)
class Sample:
    """One tokenised conversation.

    tokens:        token ids, length T
    loss_mask:     T flags; True where the assistant (the target) produced the token, its end-of-turn token included
    prompt_length: tokens before the first supervised one
    """

    id: str
    tokens: Sequence[int]
    loss_mask: Sequence[bool]
    prompt_length: int
