"""From messages to token ids, with a mask over what the assistant wrote.

sample = render_sample(tokenizer, [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}])
ids = render_prompt(tokenizer, [{"role": "user", "content": "Hi"}])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_core.data.masks import (
    Region,
    end_of_turn,
    has_generation_tags,
    regions_hold_contents,
    tagged_regions,
    token_mask,
    untagged_regions,
    user_turn,
    with_end_of_turn,
)
from dflash_core.data.types import Conversation, Message, Response, Sample
from dflash_core.errors import DataError, Problem

Messages = Sequence[Message] | Sequence[Mapping[str, str]]
TemplateArguments = Mapping[str, bool | int | float | str]


def check_tokenizer(tokenizer: Any) -> None:
    """The tokenizer can render chats and say where its tokens come from.

    Raises:
        DataError: it has no chat template, or it gives no offsets.
    """
    name = getattr(tokenizer, "name_or_path", "") or "tokenizer"
    if not getattr(tokenizer, "chat_template", None):
        remedy = "Use an instruction-tuned target, or put a chat_template.jinja beside its tokenizer; serve with the same"
        raise DataError(name, [Problem("target.model", name, "its tokenizer has no chat template", remedy)])
    if not getattr(tokenizer, "is_fast", False):
        remedy = "Convert it to a tokenizer.json (AutoTokenizer with the 'tokenizers' backend)"
        raise DataError(name, [Problem("target.model", type(tokenizer).__name__, "its tokenizer gives no token offsets", remedy)])


def render_prompt(tokenizer: Any, messages: Messages, template_arguments: TemplateArguments | None = None, *, id: str = "prompt") -> list[int]:
    """Token ids of the messages and the generation prompt: what the target sees before it answers.

    Raises:
        DataError: the template refuses the messages; names ``id``.
    """
    text = _render(tokenizer, _as_messages(messages), template_arguments or {}, id, True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def render_sample(
    tokenizer: Any, messages: Messages, *, template_arguments: TemplateArguments | None = None, max_length: int | None = None, id: str = "sample"
) -> Sample:
    """One conversation as token ids with an exact loss mask over the assistant's turns, their end-of-turn tokens included.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        messages: at least one of them the assistant's.
        template_arguments: extra arguments of the template, such as ``enable_thinking``.
        max_length: the tail beyond it is cut off. None keeps all.

    Raises:
        DataError: there is no assistant turn, the template refuses the messages, or the mask cannot be established, or nothing of it is
            left within ``max_length``. Never an all-zero mask.
    """
    messages, arguments = _as_messages(messages), template_arguments or {}
    check_tokenizer(tokenizer)
    if not any(message.role == "assistant" for message in messages):
        raise _error(id, [message.role for message in messages], "has no assistant message", "Give it a response, or regenerate responses")
    text, regions = _assistant_regions(tokenizer, messages, arguments, id)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    tokens: list[int] = list(encoded["input_ids"])
    special = special_ids(tokenizer)
    mask = token_mask(text, encoded["offset_mapping"], [token in special for token in tokens], regions)
    if not any(mask):
        raise _error(id, text[-200:], "none of its tokens could be told to be the assistant's", "Use a chat template with {% generation %} tags")
    return _sample(id, tokens, mask, max_length)


def splice_turns(
    tokenizer: Any,
    conversation: Conversation,
    responses: Sequence[Response],
    *,
    template_arguments: TemplateArguments | None = None,
    max_length: int | None = None,
) -> list[Sample]:
    """Samples of a conversation whose responses the target generated: exactly the tokens it saw and the tokens it made.

    Turns are joined into one sample as long as the prompt of the next turn begins with all tokens so far. Where it does not (the template
    drops thinking from the history, or the text tokenises differently), the turn begins a sample of its own, ``<id>#2``, so no
    token is supervised in a context in which the target did not generate it.

    Args:
        responses: one for each assistant message, in order.

    Raises:
        DataError: the template refuses the messages, or a supervised token is not left within ``max_length``.
    """
    turns = [index for index, message in enumerate(conversation.messages) if message.role == "assistant"]
    spliced: list[tuple[list[int], list[bool]]] = []
    for turn, response in zip(turns, responses, strict=True):
        prompt = render_prompt(tokenizer, conversation.messages[:turn], template_arguments, id=conversation.id)
        if not spliced or prompt[: len(spliced[-1][0])] != spliced[-1][0]:
            spliced.append(([], []))
        tokens, mask = spliced[-1]
        mask += [False] * (len(prompt) - len(tokens)) + [True] * len(response.tokens)
        tokens[len(tokens) :] = [*prompt[len(tokens) :], *response.tokens]
    names = [conversation.id, *(f"{conversation.id}#{number}" for number in range(2, len(spliced) + 1))]
    return [_sample(name, tokens, mask, max_length) for name, (tokens, mask) in zip(names, spliced, strict=True)]


def response_text(tokenizer: Any, response: Response) -> str:
    """The text of a response as a client would see it and send it back as history: without the stop token."""
    tokens = response.tokens[:-1] if response.finish_reason == "stop" else response.tokens
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def stop_token(tokenizer: Any, template_arguments: TemplateArguments | None = None) -> int:
    """The token with which the target ends its turn: the special token that the chat template writes after one, else the tokenizer's end of text."""

    def render(part: Sequence[Message], generation_prompt: bool) -> str:
        return _render(tokenizer, part, template_arguments or {}, "stop token", generation_prompt)

    found = end_of_turn(render, [Message("user", "Hi"), Message("assistant", "Hello")], _special_texts(tokenizer))
    return int(tokenizer.convert_tokens_to_ids(found[1]) if found else tokenizer.eos_token_id)


def user_opening(tokenizer: Any, before: Messages, template_arguments: TemplateArguments | None = None, *, id: str = "opening") -> tuple[str, int]:
    """What the target has seen when a user begins to speak after ``before`` (which may be empty), as text, and the token with which users end.

    Raises:
        DataError: the template refuses the messages, or a user's words cannot be told from what it writes around them; names ``id``.
    """
    turns, arguments = _as_messages(before), template_arguments or {}

    def render(part: Sequence[Message], generation_prompt: bool) -> str:
        return _render(tokenizer, part, arguments, id, generation_prompt)

    found = user_turn(render, turns, _special_texts(tokenizer))
    if found is None:
        message = "the chat template writes a user's words changed, more than once, or without a special token after them: their place cannot be told"
        raise _error(id, [turn.role for turn in turns], message, "Give prompts of another source than 'target'")
    return found[0], int(tokenizer.convert_tokens_to_ids(found[1]))


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids of the tokens that stand for no text."""
    return frozenset(tokenizer.all_special_ids) | {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}


def _special_texts(tokenizer: Any) -> list[str]:
    return [token.content for token in tokenizer.added_tokens_decoder.values() if token.special] + [tokenizer.eos_token]


def _sample(id: str, tokens: list[int], mask: list[bool], max_length: int | None) -> Sample:
    kept, kept_mask = tokens[:max_length], mask[:max_length]
    if not any(kept_mask):
        found = f"no supervised token is left within data.max_length = {max_length}"
        raise _error(id, len(tokens), found, "Raise data.max_length or leave the conversation out")
    return Sample(id, kept, kept_mask, kept_mask.index(True))


def _assistant_regions(tokenizer: Any, messages: list[Message], arguments: TemplateArguments, id: str) -> tuple[str, list[Region]]:
    def render(part: Sequence[Message], generation_prompt: bool) -> str:
        return _render(tokenizer, part, arguments, id, generation_prompt)

    text = render(messages, False)
    regions = _tagged(tokenizer, messages, arguments, text) or untagged_regions(render, messages, text)
    if regions is None:
        remedy = "Use a chat template with {% generation %} tags around the assistant's text"
        raise _error(id, text[-200:], "the template changes the messages so that the assistant's text cannot be found again", remedy)
    return text, with_end_of_turn(render, messages, text, regions, _special_texts(tokenizer))


def _tagged(tokenizer: Any, messages: list[Message], arguments: TemplateArguments, text: str) -> list[Region] | None:
    template = tokenizer.get_chat_template()
    if not has_generation_tags(template):
        return None
    tagged_text, regions = tagged_regions(template, messages, {**tokenizer.special_tokens_map, **arguments})
    return regions if tagged_text == text and regions_hold_contents(text, regions, messages) else None


def _render(tokenizer: Any, messages: Sequence[Message], arguments: TemplateArguments, id: str, generation_prompt: bool) -> str:
    turns = [{"role": message.role, "content": message.content} for message in messages]
    if not turns or turns[0]["role"] == "assistant":
        raise _error(id, [turn["role"] for turn in turns], "an assistant turn has nothing before it", "Begin with a user message")
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=generation_prompt, **arguments))
    except Exception as error:  # a template is a program of others, and may raise anything
        roles = ", ".join(turn["role"] for turn in turns)
        remedy = "Change the roles or the order to what the template takes"
        raise _error(id, roles, f"the chat template refuses the messages: {error}", remedy) from error


def _as_messages(messages: Messages) -> list[Message]:
    return [item if isinstance(item, Message) else Message(item["role"], item["content"]) for item in messages]  # type: ignore[arg-type]


def _error(id: str, value: object, message: str, remedy: str) -> DataError:
    return DataError(f"conversation {id}", [Problem(id, value, message, remedy)])
