"""Write shards so that a process may die at any moment: a finished shard is whole, an unfinished one does not exist.

    with ShardWriter(folder, card) as writer:            # begins a dataset, or takes up one that was begun with the same card
        for shard in filter(writer.claim, writer.unfinished()):
            with writer.shard(shard, ids, lengths) as out:
                out.write(position, columns)             # each sample once, in any order
        writer.finalize()

A shard is filled under a temporary name, synced and renamed; then its index rows are added in the same way. Nothing is
ever changed in place. Several processes may write into one folder: each claims the shards that it makes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import torch

from dflash_core.disk import clear_disk_errors
from dflash_core.errors import ShardError
from dflash_core.shards.claims import Claims
from dflash_core.shards.format import (
    CARD,
    DTYPES,
    INDEX,
    INDEX_PARTS,
    TOKENS,
    Layout,
    ShardCard,
    checksum,
    index_part,
    is_whole,
    read_index,
    shard_name,
)
from dflash_core.shards.leases import SharedShards
from dflash_core.shards.store import SHARDS_KEPT, pull_shards
from dflash_core.stages import atomic_write, write_json_atomic


class ShardWriter:
    """Writes the shards of one dataset. ``card`` says everything about it, the number of samples in a shard included."""

    def __init__(self, folder: Path, card: ShardCard, shared: SharedShards | None = None, *, keep: bool = True):
        """Begin a dataset in ``folder``, or take up the one that is there.

        Args:
            shared: where those of other machines put their shards, and this one its own as soon as each is whole.
            keep: False leaves none of them in ``folder``.

        Raises:
            ShardError: the folder holds a dataset with another card (both values of each field are named), or the disk is full.
        """
        self.folder = folder
        self.card = card
        self._shared, self._keep = shared, keep
        with clear_disk_errors(folder, 0, SHARDS_KEPT, ShardError):
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / CARD).exists():
                ShardCard.read(folder).require(card.identity, folder)
            else:
                write_json_atomic(folder / CARD, card.model_dump(mode="json"))
            self._claims = Claims(folder)

    def unfinished(self) -> list[int]:
        """Shards that are still to be written, ascending. A shard whose file is missing or of the wrong size is one of them."""
        return [shard for shard in range(self.card.num_shards) if not self.is_finished(shard)]

    def claim(self, shard: int) -> bool:
        """Take it upon this process to make a shard. False if another process is at it; look again whether it is finished after a claim."""
        if not self._claims.take(shard):
            return False
        if self._shared is not None and not self._shared.take(shard):
            finished = self._shared.has(shard)
            if not finished:
                self._claims.give_back(shard)
            return finished
        for path in (self.folder / shard_name(shard), index_part(self.folder, shard)):
            for leftover in path.parent.glob(f".{path.name}.*.tmp"):  # of a process that was killed
                leftover.unlink()
        if self._shared is not None and is_whole(self.folder, self.card, shard):  # of a process that died before it had sent it
            self._publish(shard)
        return True

    def give_back(self, shard: int) -> None:
        """The shard that was claimed is finished, or is not going to be."""
        if self._shared is not None:
            self._shared.give_back(shard)
        self._claims.give_back(shard)

    def is_finished(self, shard: int) -> bool:
        """Whether a shard and its index rows are there, of the right size; where shards are shared: whether they are in the store."""
        return is_whole(self.folder, self.card, shard) if self._shared is None else self._shared.has(shard)

    @contextlib.contextmanager
    def shard(self, shard: int, ids: Sequence[str], lengths: Sequence[int], rows: Mapping[str, Sequence[int]] | None = None) -> Iterator[OpenShard]:
        """Write one shard: ids and token counts of ``card.samples_of(shard)`` are given, columns follow by ``OpenShard.write``.

        Args:
            rows: by name of ``card.partial``, rows of each sample in the columns that it is about

        Raises:
            ShardError: the disk is full (what is finished stays), or a sample was not written.
        """
        samples = self.card.samples_of(shard)
        if not len(ids) == len(lengths) == len(samples):
            raise ValueError(f"shard {shard} has {len(samples)} samples, but {len(ids)} ids and {len(lengths)} lengths were given")
        counts = {TOKENS: [int(length) for length in lengths], **(rows or {})}
        layout = Layout.of(self.card.columns, {name: sum(found) for name, found in counts.items()})
        with clear_disk_errors(self.folder, layout.size, SHARDS_KEPT, ShardError):
            with atomic_write(self.folder / shard_name(shard)) as temporary:
                descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
                try:
                    _reserve(descriptor, layout.size)
                    _write_at(descriptor, memoryview(layout.header), 0)
                    out = OpenShard(descriptor, layout, counts)
                    yield out
                finally:
                    os.close(descriptor)
                out.require_all(shard_name(shard))
            of_rows = {f"{name}_start": out.starts[name] for name in self.card.partial} | {name: counts[name] for name in self.card.partial}
            values: dict[str, Sequence[Any]] = {
                "sample": list(samples), "id": list(ids), "shard": [shard] * len(samples), "start": out.starts[TOKENS], TOKENS: counts[TOKENS],
                "supervised": out.supervised, "crc32": out.crc32, **of_rows,
            }  # fmt: skip
            table = pa.table(values, schema=self.card.index_schema)
            _write_index(index_part(self.folder, shard), table)
        if self._shared is not None:
            self._publish(shard)

    def _publish(self, shard: int) -> None:
        assert self._shared is not None
        self._shared.publish(shard, self.folder)
        for path in () if self._keep else (self.folder / shard_name(shard), index_part(self.folder, shard)):
            path.unlink()

    def finalize(self) -> pa.Table:
        """Join the index rows of all shards into ``index.arrow``, which makes the dataset whole. Returns the index.

        Shards that others have made are fetched first.

        Raises:
            ShardError: shards are missing, or the disk is full.
        """
        if missing := self.unfinished():
            raise ShardError(
                f"{self.folder} lacks {len(missing)} of {self.card.num_shards} shards, the first is {shard_name(missing[0])}. Run the extraction."
            )
        self._claims.wait_for(self.card.num_shards)  # the others write the same bytes, but would take away each other's temporary files
        if self._shared is not None:
            pull_shards(self._shared.address, self.card, self.folder)
        table = pa.concat_tables([read_index(index_part(self.folder, shard), self.card) for shard in range(self.card.num_shards)]).combine_chunks()
        for leftover in [*self.folder.glob(".*.tmp"), *self.folder.glob(f"{INDEX_PARTS}/.*.tmp")]:
            leftover.unlink()
        with clear_disk_errors(self.folder, 0, SHARDS_KEPT, ShardError):
            _write_index(self.folder / INDEX, table)
        self._claims.remove()
        return table

    def close(self) -> None:
        """Let other processes make what this one has claimed."""
        self._claims.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OpenShard:
    """A shard being filled. Positions count from 0 within the shard."""

    def __init__(self, descriptor: int, layout: Layout, counts: Mapping[str, Sequence[int]]):
        self._descriptor = descriptor
        self._layout = layout
        self._counts = counts
        self.starts: dict[str, list[int]] = {name: np.cumsum([0, *rows])[:-1].tolist() for name, rows in counts.items()}
        self.supervised: list[int | None] = [None] * len(counts[TOKENS])
        self.crc32: list[int | None] = [None] * len(counts[TOKENS])

    def write(self, position: int, columns: Mapping[str, torch.Tensor]) -> None:
        """Write all columns of one sample: CPU tensors [t, *shape] of the declared dtypes, of trimmed columns their rows alone.

        ``loss_mask`` is always among them.
        """
        pieces = []
        for index, column in enumerate(self._layout.columns):
            value = columns[column.name]
            rows, start = (values[column.counted_by][position] for values in (self._counts, self.starts))
            shape = (rows, *column.shape)
            if value.dtype != DTYPES[column.dtype] or value.shape != shape:
                raise ValueError(f"column {column.name} must be {DTYPES[column.dtype]} of shape {shape}, not {value.dtype} of {tuple(value.shape)}")
            piece = value.contiguous().reshape(-1).view(torch.uint8).numpy()
            offset, size = self._layout.span(index, start, rows)
            _write_at(self._descriptor, piece.data, offset)
            _start_for_disk(self._descriptor, offset, size)
            pieces.append(piece)
        self.crc32[position] = checksum(pieces)
        self.supervised[position] = int(columns["loss_mask"].sum())

    def require_all(self, name: str) -> None:
        """Raise ``ShardError`` unless every sample has been written."""
        if None in self.crc32:
            raise ShardError(f"{name}: sample {self.crc32.index(None)} of {len(self.crc32)} was not written.")


def _reserve(descriptor: int, size: int) -> None:
    # A disk that is too small is found here, before the target has run for the shard.
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:  # macOS
        os.ftruncate(descriptor, size)


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _start_for_disk(descriptor: int, offset: int, size: int) -> None:
    # Without it the system collects gigabytes, and the sync at the end of a shard waits for all of them. What is on its way stays in memory.
    if size >= 2**16 and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_DONTNEED)


def _write_index(path: Path, table: pa.Table) -> None:
    with atomic_write(path) as temporary, pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
