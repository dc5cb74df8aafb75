"""Whether what an evaluation keeps in memory fits onto its device: found before anything is decoded, and told in terms of the settings.

with fits(target, room, drafter.config, "evaluation.batch_sizes", 64):
    verifier = open_verifier(target, room)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dflash_core.decoding import Room
from dflash_core.drafter import DFlashConfig
from dflash_core.errors import InputError, Problem
from dflash_core.target import TargetModel
from dflash_core.target.device import free_memory


def require_room(target: TargetModel, room: Room, drafter: DFlashConfig, field: str, value: object, *, drafters: int = 1) -> None:
    """Check that keys and values of target and drafters, in buffers of fixed size, fit beside what is there already.

    Raises:
        InputError: naming ``field``, the setting that asks for so many requests or tokens.
    """
    wanted = room.cache_bytes(target.info, drafter, target.dtype.itemsize, drafters=drafters)
    free = sum(map(free_memory, set(target.devices)))
    if wanted > free:
        message = f"keys and values of {_requests(target, room)} take {_gib(wanted)}, and {_places(target)} has {_gib(free)} left"
        raise InputError("evaluation", [_problem(field, value, message)])


@contextmanager
def fits(target: TargetModel, room: Room, drafter: DFlashConfig, field: str, value: object, *, drafters: int = 1) -> Iterator[None]:
    """``require_room``, and the same error in place of torch's own where what is done within the block proves to take more."""
    require_room(target, room, drafter, field, value, drafters=drafters)
    try:
        yield
    except torch.OutOfMemoryError as error:
        message = f"decoding {_requests(target, room)} takes more than the memory of {_places(target)}"
        raise InputError("evaluation", [_problem(field, value, message)]) from error


def _problem(field: str, value: object, message: str) -> Problem:
    tokens = "training.evaluation.max_new_tokens" if field.startswith("training.") else "evaluation.max_new_tokens"
    remedy = "Lower it" if field == tokens else f"Lower it or {tokens}"
    return Problem(field, value, message, f"{remedy}, or take other programs off the device")


def _requests(target: TargetModel, room: Room) -> str:
    return f"{room.rows} request{'s' * (room.rows > 1)} of up to {room.capacity(target.info):,} positions"


def _places(target: TargetModel) -> str:
    return " and ".join(map(str, dict.fromkeys(target.devices)))


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"
