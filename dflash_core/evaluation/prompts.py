"""The prompts that drafters are measured on: held-out ones of the data, and those of ``evaluation.sets``.

    prompts = [*heldout_prompts(table, 32), *set_prompts(config, config.evaluation.sets[0], info, tokenizer, target_model, folder)]

A set's conversations become one prompt for each turn: the second turn is asked with the target's own greedy answer to the first in
between, so every drafter of a target is asked the same. The prompts are kept in a file named by all that they depend on, and are
made once.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_core.config import EvaluationSet, GenerationConfig, PipelineConfig, digest_of
from dflash_core.data import Conversation, Message, SampleTable, render_prompt
from dflash_core.data.cache import Journal
from dflash_core.data.driver import Driver, rounds_of
from dflash_core.data.sets import read_set
from dflash_core.errors import DataError, Problem
from dflash_core.stages import Progress, file_sha256, no_progress, stage_lock, write_json_atomic
from dflash_core.target import TargetInfo, TargetModel

HELDOUT, PROMPTS = "heldout", "prompts.json"
_VERSION = 1  # raised when the same settings give other prompts

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluationPrompt:
    """One request.

    set:          'heldout', or a name of ``evaluation.sets``
    id:           unique in its set; later turns of a conversation have ``<conversation>#2``, …
    conversation: turns of one are not independent of each other
    tokens:       what the target is given
    """

    set: str
    id: str
    conversation: str
    tokens: tuple[int, ...]


def heldout_prompts(heldout: SampleTable, count: int) -> list[EvaluationPrompt]:
    """The first ``count`` held-out prompts of the data, up to their first response."""
    names = [heldout.id(index) for index in range(min(count, len(heldout)))]
    return [EvaluationPrompt(HELDOUT, name, name, tuple(heldout.prompt_tokens(index).tolist())) for index, name in enumerate(names)]


def set_prompts(
    config: PipelineConfig,
    chosen: EvaluationSet,
    info: TargetInfo,
    tokenizer: Any,
    target: Callable[[], TargetModel],
    folder: Path,
    progress: Progress = no_progress,
) -> list[EvaluationPrompt]:
    """The prompts of a set, from ``folder`` or made anew.

    Args:
        target: gives the target of the evaluation; called only where a conversation has a second turn.

    Raises:
        DataError: the set cannot be had, too many of its rows are unusable, or none of its prompts leaves room for an answer.
    """
    evaluation, path = config.evaluation, chosen.path
    key = digest_of(
        [
            _VERSION, chosen.model_dump(mode="json", exclude={"name"}), file_sha256(path) if path else None, info.digest, info.tokenizer_digest,
            info.template_digest, config.data.system_prompt, config.data.template_arguments, evaluation.dtype, evaluation.max_new_tokens,
            [item.model_dump(mode="json") for item in config.data.filters.redact],
        ]
    )  # fmt: skip
    place = folder / f"{chosen.name}-{key[:12]}"
    made = place / PROMPTS
    if (found := _read_made(made, chosen.name)) is not None:  # it is written as a whole, so evaluations of it may go on side by side
        return found
    with stage_lock(place):
        prompts = _made(config, chosen, info, tokenizer, target, place, progress)
        write_json_atomic(made, [asdict(prompt) for prompt in prompts])
    return prompts


def _read_made(path: Path, name: str) -> list[EvaluationPrompt] | None:
    """The prompts in a file of an earlier evaluation; None if there is none, or it was damaged since."""
    try:
        return [EvaluationPrompt(name, row["id"], row["conversation"], tuple(row["tokens"])) for row in json.loads(path.read_bytes())] or None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _made(
    config: PipelineConfig,
    chosen: EvaluationSet,
    info: TargetInfo,
    tokenizer: Any,
    target: Callable[[], TargetModel],
    place: Path,
    progress: Progress,
) -> list[EvaluationPrompt]:
    generation = GenerationConfig(max_new_tokens=config.evaluation.max_new_tokens, batch_size=config.data.generation.batch_size)
    data = config.data.model_copy(update={"generation": generation, "regenerate": "always", "max_length": info.max_position_embeddings})
    asking = config.model_copy(update={"data": data})
    conversations = read_set(config, chosen, place / "rejected.jsonl")
    begun = {item.id: _without_last_round(item) for item in conversations if len(rounds_of(item)) > 1}
    with Journal(place / "journal.jsonl") as journal:
        driver = Driver(asking, tokenizer, journal, info.digest, progress)
        answered = driver.by_target(list(begun.values()), lambda prompts, settings, /, *, seeds: target().answers(prompts, settings, seeds=seeds))
        histories = {item.conversation.id: item.conversation.messages for item in answered}
    turns = [turn for item in conversations for turn in _turns(item, histories.get(item.id, ()))]
    arguments, positions = config.data.template_arguments, info.max_position_embeddings
    prompts = [EvaluationPrompt(chosen.name, name, item.id, tuple(render_prompt(tokenizer, said, arguments, id=name))) for item, name, said in turns]
    fitting = [prompt for prompt in prompts if len(prompt.tokens) < positions]
    if len(fitting) < len(prompts):
        logger.warning("%d of %d prompts of %s fill the target's %d positions and are left out", len(prompts) - len(fitting), len(prompts),
                       chosen.name, positions)  # fmt: skip
    if not fitting:
        raise _error(chosen, f"none of its {len(prompts)} prompts is shorter than the target's {positions} positions", "Give shorter prompts")
    return fitting


def _without_last_round(conversation: Conversation) -> Conversation:
    rounds = rounds_of(conversation)[:-1]
    messages = [message for said in rounds for message in (*said, Message("assistant", ""))]
    return Conversation(conversation.id, tuple(messages[:-1]), conversation.group)


def _turns(conversation: Conversation, history: Sequence[Message]) -> Iterator[tuple[Conversation, str, list[Message]]]:
    """(conversation, name of the turn, what is said up to its response), as far as its earlier turns were answered."""
    answers = [message for message in history if message.role == "assistant"]
    said: list[Message] = []
    for number, spoken in enumerate(rounds_of(conversation), start=1):
        said = [*said, *spoken]
        yield conversation, conversation.id if number == 1 else f"{conversation.id}#{number}", said
        if number > len(answers):
            return
        said = [*said, answers[number - 1]]


def _error(chosen: EvaluationSet, message: str, remedy: str) -> DataError:
    return DataError(f"evaluation set {chosen.name}", [Problem("evaluation.sets", chosen.source, message, remedy)])
