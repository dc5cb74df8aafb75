"""Further ways to decode the prompts of an evaluation: in batches, at other temperatures, with smaller blocks. Speed and acceptance of each.

They are about speed, so they are measured in the precision of serving, where the evaluation has one beside its own.
Every way is measured against the target alone decoding in the same way. A way that was measured is kept in a file of its own, so that a
killed evaluation goes on with the next one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from pydantic import ValidationError

from dflash_core.config import EvaluationConfig, digest_of
from dflash_core.decoding import Decoder, Generation, Room, Sampling, Verifier, open_decoder, open_verifier
from dflash_core.drafter import DFlashConfig, DFlashDrafter
from dflash_core.evaluation.fit import fits, require_room
from dflash_core.evaluation.prompts import EvaluationPrompt
from dflash_core.evaluation.result import Way, WayFigures, figures
from dflash_core.stages import Progress, write_json_atomic
from dflash_core.target import TargetModel

BATCH_SIZES = "evaluation.batch_sizes"


def further_ways(settings: EvaluationConfig, block_size: int) -> list[Way]:
    """All combinations of the settings but the one that is measured anyway: one request at a time, greedily, with blocks of ``block_size``."""
    combinations = product(settings.batch_sizes, settings.temperatures, (block_size, *settings.block_sizes))
    ways = [Way(batch_size=rows, temperature=temperature, block_size=block) for rows, temperature, block in dict.fromkeys(combinations)]
    return [way for way in ways if way != Way(batch_size=1, temperature=0.0, block_size=block_size)]


def measure_ways(
    ways: Sequence[Way], target: TargetModel, drafter: DFlashDrafter, prompts: Sequence[EvaluationPrompt], max_new_tokens: int, folder: Path,
    *, key: str, graphs: bool, progress: Progress,
) -> tuple[WayFigures, ...]:  # fmt: skip
    """Decode all prompts in every way that ``folder`` has no figures of.

    Args:
        drafter: on the target's device, in its precision.
        key: digest of everything else that is measured with; figures of another key are measured afresh.
    """
    found: list[WayFigures] = []
    room, verifier = Room(0, 0, 0, 0), None
    alone: dict[tuple[int, float], list[Generation]] = {}
    for done, way in enumerate(ways):
        progress(done, len(ways), "ways of decoding")
        path = folder / f"way-{digest_of([key, way.model_dump()])[:16]}.json"
        with contextlib.suppress(OSError, ValidationError):  # not measured yet, or damaged since
            found.append(WayFigures.model_validate_json(path.read_bytes()))
            continue
        if verifier is None or room.rows != way.batch_size:
            room, verifier = _room(ways, way.batch_size, prompts, max_new_tokens), None  # which lets go of the last one's buffers
        case = (way.batch_size, way.temperature)
        with fits(target, room, drafter.config, BATCH_SIZES, way.batch_size):
            verifier = verifier or open_verifier(target, room, graphs=graphs)
            if case not in alone:
                alone[case] = _answers(_decoder(target, None, verifier, room, way), prompts, way)
            drafted = _answers(_decoder(target, drafter, verifier, room, way), prompts, way)
        differ = sum(one.tokens != own.tokens for one, own in zip(drafted, alone[case], strict=True))
        places = [(prompt.set, prompt.conversation) for prompt in prompts]
        measured = WayFigures(way=way, diverged=None if way.temperature else differ, figures=figures(drafted, alone[case], way.block_size, places))
        write_json_atomic(path, measured.model_dump(mode="json"))
        found.append(measured)
    if ways:
        progress(len(ways), len(ways), "ways of decoding")
    return tuple(found)


def require_room_of_ways(
    ways: Sequence[Way], target: TargetModel, drafter: DFlashConfig, prompts: Sequence[EvaluationPrompt], max_new_tokens: int
) -> None:
    """Raise ``InputError`` where the buffers of one of the ways do not fit into the memory of the target's device."""
    for size in dict.fromkeys(way.batch_size for way in ways):
        require_room(target, _room(ways, size, prompts, max_new_tokens), drafter, BATCH_SIZES, size)


def _room(ways: Sequence[Way], rows: int, prompts: Sequence[EvaluationPrompt], max_new_tokens: int) -> Room:
    """For all ways of one batch size."""
    longest, widest = max(len(prompt.tokens) for prompt in prompts), max(way.block_size for way in ways if way.batch_size == rows)
    return Room(rows, longest, max_new_tokens, widest)


def _decoder(target: TargetModel, drafter: DFlashDrafter | None, verifier: Verifier, room: Room, way: Way) -> Decoder:
    narrowed = Room(room.rows, room.longest_prompt, room.max_new_tokens, way.block_size)
    stops = target.info.eos_token_ids
    return open_decoder(target, drafter, verifier, narrowed, stop_ids=stops, sampling=Sampling(way.temperature))


def _answers(decoder: Decoder, prompts: Sequence[EvaluationPrompt], way: Way) -> list[Generation]:
    """To all prompts in their order, a batch at a time; a prompt's draws depend on its place alone."""
    batches = [range(at, min(at + way.batch_size, len(prompts))) for at in range(0, len(prompts), way.batch_size)]
    decoder.generate([prompts[index].tokens for index in batches[0]], most=2 * way.block_size)  # kernels and graphs are nobody's time
    return [answer for batch in batches for answer in decoder.generate([prompts[index].tokens for index in batch], seeds=batch)]
