"""Pack whole samples into rows of one length with little waste, in an order that seed and epoch decide."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dflash_core.errors import DataError, Problem


def pack_rows(lengths: Sequence[int] | npt.NDArray[np.int64], row_length: int, *, seed: int, epoch: int) -> list[tuple[int, ...]]:
    """Sample indices of every row of one epoch: each sample once, no row longer than ``row_length``.

    Best-fit decreasing: the longest sample goes first, each into the fullest row that still has room for it. On lengths of a
    chat mix less than 0.5 % is padding; where most samples are longer than half a row nothing can be packed. Samples of
    equal length are shuffled before and the rows after, so an epoch is a fresh order of freshly mixed rows, while the **number** of
    rows depends on the lengths alone: all epochs have the same, and a schedule is known before training starts.

    Args:
        lengths: tokens of each sample.
    Raises:
        DataError: a sample is empty or longer than a row.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    wrong = np.flatnonzero((lengths < 1) | (lengths > row_length))
    if len(wrong):
        problems = [
            Problem(
                f"sample {index}",
                int(lengths[index]),
                f"its length in tokens must be from 1 to the row length {row_length}",
                "Raise training.row_length",
            )
            for index in wrong[:10].tolist()
        ]
        raise DataError(f"{len(wrong)} of {len(lengths)} samples do not fit into a row", problems)
    draws = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))
    order = draws.permutation(len(lengths))
    order = order[np.argsort(-lengths[order], kind="stable")]
    rows = _best_fit(order.tolist(), lengths[order].tolist(), row_length)
    return [tuple(rows[i]) for i in draws.permutation(len(rows)).tolist()]


def _best_fit(order: list[int], lengths: list[int], row_length: int) -> list[list[int]]:
    rows: list[list[int]] = []
    with_room: defaultdict[int, list[int]] = defaultdict(list)  # free tokens -> rows that have exactly so many
    rooms = 0  # bit n is set where with_room[n] is not empty: the smallest room that fits is the lowest bit of rooms >> length
    for sample, length in zip(order, lengths, strict=True):
        if fitting := rooms >> length:
            room = length + (fitting & -fitting).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, row = row_length, len(rows)
            rows.append([])
        rows[row].append(sample)
        if rest := room - length:
            with_room[rest].append(row)
            rooms |= 1 << rest
    return rows
