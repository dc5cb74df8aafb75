"""Which characters of a rendered chat the assistant wrote, and which tokens those are.

Templates differ: some mark the assistant's text with ``{% generation %}`` tags, most do not; some strip the content, drop
old thinking, or add a system prompt. Three methods, the first that fits the template wins:

1. the template's own generation tags;
2. generation prompts: what the target would see before turn k is a prefix of the chat, so turn k begins where it ends;
3. alignment: the template's text around placeholders is found again in the chat, and what lies between is the turn.

Whatever the method, the end-of-turn token after a turn belongs to it, for the target generates it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from dflash_core.data.types import Message

Region = tuple[int, int]
"""First character, character after the last."""
RenderText = Callable[[Sequence[Message], bool], str]
"""(messages, add the generation prompt) → text"""

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_THINKING_END = "</think>"


def has_generation_tags(template: str) -> bool:
    """Whether the template marks the assistant's text itself."""
    return _GENERATION_TAG.search(template) is not None


def tagged_regions(template: str, messages: Sequence[Message], arguments: dict[str, Any]) -> tuple[str, list[Region]]:
    """Method 1: the rendered chat and the regions between its generation tags."""
    from transformers.utils.chat_template_utils import render_jinja_template

    turns = [{"role": message.role, "content": message.content} for message in messages]
    texts, regions = render_jinja_template([turns], chat_template=template, return_assistant_tokens_mask=True, **arguments)
    return texts[0], [(start, end) for start, end in regions[0] if end > start]


def regions_hold_contents(text: str, regions: Sequence[Region], messages: Sequence[Message]) -> bool:
    """Whether every region shares its text with an assistant message, white space aside. Tags inside macros give wrong places."""
    contents = ["".join(message.content.split()) for message in messages if message.role == "assistant" and message.content.strip()]
    found = ["".join(text[start:end].split()) for start, end in regions]
    return bool(found) and all(any(content in region or region in content for content in contents) for region in found)


def untagged_regions(render: RenderText, messages: Sequence[Message], text: str) -> list[Region] | None:
    """Methods 2 and 3: one region per assistant turn, or None if neither fits. ``text`` is the whole chat as rendered."""
    turns = [index for index, message in enumerate(messages) if message.role == "assistant"]
    holders = _placeholders(messages)
    regions = _by_generation_prompts(render, messages, text, turns, holders) or _by_alignment(render, messages, text, turns, holders)
    if regions is None:
        return None
    silent = any(messages[turn].content.strip() and not text[start:end].strip() for turn, (start, end) in zip(turns, regions, strict=True))
    return None if silent else regions


def with_end_of_turn(
    render: RenderText, messages: Sequence[Message], text: str, regions: list[Region], special_tokens: Sequence[str]
) -> list[Region]:
    """The regions, each lengthened by the template's end of a turn (up to its first special token) where that follows."""
    last = max(index for index, message in enumerate(messages) if message.role == "assistant")
    found = end_of_turn(render, messages[: last + 1], special_tokens)
    if found is None:
        return regions
    ending = "".join(found)
    return [(start, end + len(ending) if text.startswith(ending, end) else end) for start, end in regions]


def end_of_turn(render: RenderText, messages: Sequence[Message], special_tokens: Sequence[str]) -> tuple[str, str] | None:
    """What the template writes after the last message, an assistant's: (text before the first special token, that token). None: it has none."""
    holders = _placeholders(messages)
    return _to_first_special(_after_last(render(_with_holders(messages, holders), False), holders[-1]), special_tokens)


def user_turn(render: RenderText, before: Sequence[Message], special_tokens: Sequence[str]) -> tuple[str, str] | None:
    """What surrounds a user's turn after the messages ``before``: (all the text up to its first character, the special token after it).

    None: the template changes or repeats what users say, or writes no special token after it.
    """
    holder = _placeholders([*before, Message("user", "")])[-1]
    text = render([*before, Message("user", holder)], False)
    found = _to_first_special(_after_last(text, holder), special_tokens)
    return None if found is None else (text.split(holder)[0], found[1])


def _to_first_special(tail: str | None, special_tokens: Sequence[str]) -> tuple[str, str] | None:
    places = [(tail.index(token), -len(token), token) for token in special_tokens if token and token in tail] if tail else []
    if tail is None or not places:
        return None
    place, _, token = min(places)
    return tail[:place], token


def token_mask(text: str, offsets: Sequence[Region], special: Sequence[bool], regions: Sequence[Region]) -> list[bool]:
    """True for every token that lies within a region.

    White space does not decide: a token such as " Hello" that begins with the blank before the region is inside, and so is
    a special token that swallowed the white space after it. Any other token across a border is outside.

    Args:
        offsets: characters of each token, T entries.
        special: whether the token is a special one, T entries.
    """
    mask, previous, at = [], 0, 0
    for (begin, end), is_special in zip(offsets, special, strict=True):
        begin = previous if begin == end else begin  # byte-level tokenizers may trim a lone blank to nothing
        previous = max(previous, end)
        while at < len(regions) and regions[at][1] <= begin:
            at += 1
        if at == len(regions):
            mask.append(False)
            continue
        first, last = regions[at]
        begins_inside = begin >= first or (end > first and text[begin:first].isspace())
        ends_inside = end <= last or (is_special and text[last:end].isspace())
        mask.append(end > first and begins_inside and ends_inside)
    return mask


def _placeholders(messages: Sequence[Message]) -> list[str]:
    """For each message a number that no message contains; digits pass through templates that strip or change case."""
    number = "314159265358979"
    while any(number in message.content for message in messages):
        number += "3"
    return [f"{number}{index:05d}" for index in range(len(messages))]


def _with_holders(messages: Sequence[Message], holders: Sequence[str]) -> list[Message]:
    """The messages with every assistant content replaced by its placeholder."""
    return [Message(m.role, holder) if m.role == "assistant" else m for m, holder in zip(messages, holders, strict=False)]


def _after_last(text: str, holder: str) -> str | None:
    return text.rsplit(holder, 1)[1] if text.count(holder) == 1 else None


def _by_generation_prompts(
    render: RenderText, messages: Sequence[Message], text: str, turns: Sequence[int], holders: Sequence[str]
) -> list[Region] | None:
    prompts = [render(messages[:turn], True) for turn in turns]
    if not all(text.startswith(prompt) for prompt in prompts):
        return None
    starts = [len(prompt) for prompt in prompts]
    regions = []
    for number, (turn, start, bound) in enumerate(zip(turns, starts, [*starts[1:], len(text)], strict=True)):
        last = number == len(turns) - 1
        until = len(messages) if last else turns[number + 1]
        tail = _after_last(render(_with_holders(messages[:until], holders), not last), holders[turn])
        if tail is None or not text[start:bound].endswith(tail):
            return None
        regions.append((start, bound - len(tail)))
    return regions


def _by_alignment(render: RenderText, messages: Sequence[Message], text: str, turns: Sequence[int], holders: Sequence[str]) -> list[Region] | None:
    frame = render(_with_holders(messages, holders), False)
    if any(frame.count(holders[turn]) != 1 for turn in turns):
        return None
    pieces = re.split("|".join(re.escape(holders[turn]) for turn in turns), frame)
    if not text.startswith(pieces[0]):
        return None
    regions, place = [], len(pieces[0])
    for number, (turn, after) in enumerate(zip(turns, pieces[1:], strict=True)):
        end = _content_end(text, place, messages[turn].content, after, number == len(turns) - 1)
        if end is None:
            return None
        regions.append((place, end))
        place = end + len(after)
    return regions if place == len(text) else None


def _content_end(text: str, place: int, content: str, after: str, is_last: bool) -> int | None:
    """Where the content that begins at ``place`` ends: it is as given, stripped or without its thinking, or ``after`` follows just once."""
    answer = content.rsplit(_THINKING_END, 1)[-1]
    for variant in (content, content.strip(), content.lstrip(), content.rstrip(), answer, answer.strip(), answer.lstrip()):
        end = place + len(variant)
        if text.startswith(variant + after, place) and (not is_last or end + len(after) == len(text)):
            return end
    if is_last:
        return len(text) - len(after) if text.endswith(after) and len(text) - len(after) >= place else None
    return text.index(after, place) if after and text.count(after, place) == 1 else None
