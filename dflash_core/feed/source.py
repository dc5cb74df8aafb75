"""Where rows come from. A row is a function of its ordinal alone, so any thread can make any row and the order is data.

``ShardRows`` packs the samples of a dataset on disk; ``feed.online`` makes the same rows of the same samples from live targets. Which samples
a row is made of, and its anchors, both have from ``PackedOrder`` and ``build_row``.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from dflash_core.config import TrainingConfig
from dflash_core.drafter import sample_anchors
from dflash_core.feed.packing import Lengths, pack_rows
from dflash_core.feed.row import Row
from dflash_core.shards import ShardDataset, ShardSample
from dflash_core.shards.fp8 import SCALES
from dflash_core.shards.reader import bits


class RowSource(Protocol):
    """Makes rows. ``row`` is called from several threads and returns the same row for the same ordinal, always."""

    def rows_per_epoch(self, epoch: int) -> int:
        """Rows of an epoch."""

    def row(self, ordinal: int) -> Row:
        """Row ``ordinal``; ordinals run on over the epochs."""


def steps_available(source: RowSource, epochs: int, rows_per_step: int) -> int:
    """Whole optimiser steps that some epochs give, all with equally many rows. Steps run on over the end of one: only the last rows are left over."""
    return epochs * source.rows_per_epoch(0) // rows_per_step


class PackedOrder:
    """Which samples each row of a run is made of: packed anew in every epoch, from the lengths of the samples and the seed alone."""

    def __init__(self, lengths: Lengths, training: TrainingConfig, seed: int):
        """Pack the first epoch.

        Raises:
            DataError: a sample is longer than ``training.row_length``.
        """
        self.row_length = training.row_length
        self.num_anchors = training.num_anchors
        self._lengths = lengths
        self._seed = seed
        self._packed: dict[int, list[tuple[int, ...]]] = {}
        self._lock = threading.Lock()
        self.rows = len(self._epoch(0))

    def samples(self, ordinal: int) -> tuple[int, ...]:
        """Indices of the samples of row ``ordinal``, in their places."""
        epoch, index = divmod(ordinal, self.rows)
        return self._epoch(epoch)[index]

    def row(
        self, ordinal: int, samples: Sequence[ShardSample], features_TF: torch.Tensor | None = None, *,
        pinned: bool = False, further: Sequence[str] = (),
    ) -> Row:  # fmt: skip
        """Row ``ordinal`` of its ``samples``, as ``build_row`` makes it."""
        epoch, index = divmod(ordinal, self.rows)
        return build_row(
            samples, ordinal=ordinal, epoch=epoch, row_length=self.row_length, num_anchors=self.num_anchors,
            generator=row_generator(self._seed, epoch, index), features_TF=features_TF, pinned=pinned, further=further,
        )  # fmt: skip

    def _epoch(self, epoch: int) -> list[tuple[int, ...]]:
        with self._lock:
            if epoch not in self._packed:
                before = {epoch - 1: self._packed[epoch - 1]} if epoch - 1 in self._packed else {}  # loaders work on both sides of an epoch's end
                self._packed = {**before, epoch: pack_rows(self._lengths, self.row_length, seed=self._seed, epoch=epoch)}
            return self._packed[epoch]


class ShardRows:
    """Rows of a dataset of hidden states: packed anew and with new anchors in every epoch."""

    def __init__(self, dataset: ShardDataset, training: TrainingConfig, seed: int, *, further: Sequence[str] = ()):
        """Pack the first epoch. ``further``: columns that rows hold besides.

        Raises:
            DataError: as ``PackedOrder`` does.
            ShardError: the dataset has not all of these columns.
        """
        for name in further:
            dataset.require_column(name, "Distillation from the target (objective.distillation)", "Extract again, with this extraction.teacher.")
        self._further = tuple(further)
        self._dataset = dataset
        self._order = PackedOrder(dataset.lengths, training, seed)
        self._pinned = training.devices[0] != "cpu"

    def rows_per_epoch(self, epoch: int) -> int:
        """Rows of an epoch; the same for all."""
        return self._order.rows

    def row(self, ordinal: int) -> Row:
        """Row ``ordinal``. Raises ``ShardError`` naming shard and sample if what it is made of is damaged."""
        samples = [self._dataset.sample(i) for i in self._order.samples(ordinal)]
        return self._order.row(ordinal, samples, pinned=self._pinned, further=self._further)


def row_generator(seed: int, epoch: int, row: int) -> torch.Generator:
    """The CPU generator of everything that is drawn for one row of one epoch."""
    state = int(np.random.SeedSequence([seed, epoch, row]).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(state & (2**63 - 1))


def build_row(
    samples: Sequence[ShardSample], *, ordinal: int, epoch: int, row_length: int, num_anchors: int, generator: torch.Generator,
    features_TF: torch.Tensor | None = None, pinned: bool = False, further: Sequence[str] = (),
) -> Row:  # fmt: skip
    """Lay samples side by side in a row of T tokens and draw its anchors.

    By NumPy, which copies in the calling thread without Python's lock, and keeps it where there is little to do. torch would share each copy among
    threads, of which every loader has as many as there are cores, and each of its operations lets go of the lock, for which all loaders wait.

    Args:
        features_TF: of the row, where they lie in their places already; otherwise the samples' are copied, once, from where they lie.
        pinned: copy them into memory that a GPU reads by itself.
        further: columns that the row holds besides.
    """
    lengths_D = np.array([len(sample) for sample in samples])
    ends_D = lengths_D.cumsum()
    begins, end = [0, *ends_D.tolist()][:-1], int(ends_D[-1])
    tokens_T, loss_mask_T = np.empty(row_length, dtype=np.int64), np.empty(row_length, dtype=np.bool_)
    _lay_out(samples, begins, "tokens", tokens_T)
    _lay_out(samples, begins, "loss_mask", loss_mask_T)
    document_ids_T = np.full(row_length, -1, dtype=np.int32)
    document_ids_T[:end] = np.repeat(np.arange(len(samples)), lengths_D)
    positions_T = np.arange(row_length)
    positions_T[:end] -= np.repeat(ends_D - lengths_D, lengths_D)
    positions_T[end:] = 0
    tokens, document_ids, positions, loss_mask = map(torch.from_numpy, (tokens_T, document_ids_T, positions_T, loss_mask_T))
    columns: dict[str, Any] = {} if features_TF is None else {"features": features_TF}
    for name in (*(("features", SCALES) if features_TF is None else ()), *further):
        if (stored := samples[0].stored.tensors.get(name)) is not None:
            columns[name] = torch.empty(row_length, *stored.shape[1:], dtype=stored.dtype, pin_memory=pinned)
            _lay_out(samples, begins, name, bits(columns[name]))
    return Row(
        ordinal=ordinal,
        epoch=epoch,
        tokens=tokens,
        document_ids=document_ids,
        positions=positions,
        loss_mask=loss_mask,
        anchors=sample_anchors(loss_mask, document_ids, num_anchors, generator),
        sample_ids=tuple([sample.id for sample in samples]),
        **columns,
    )


def _lay_out(samples: Sequence[ShardSample], begins: Sequence[int], name: str, row_TX: npt.NDArray[Any]) -> None:
    """Fill [T, …] with a column of samples that begin there, 0 in the padding and where nothing is stored.

    The only copy between the page cache and, from ``pinned`` memory, the GPU.
    """
    end = 0
    for begin, sample in zip(begins, samples, strict=True):
        for first, rows in sample.pieces(name):
            if begin + first > end:
                row_TX[end : begin + first] = 0
            end = begin + first + len(rows)
            row_TX[begin + first : end] = rows
    row_TX[end:] = 0
