"""Read shards: memory-mapped, without copying, each sample checked when it is first read.

    dataset = ShardDataset(folder, expect=expected_of(info, tap_layers))
    sample = dataset.sample(7)          # features [t, F], tokens [t], loss_mask [t]: views of the file

Safe to use from several threads. Tensors must not be written to: they are the file.
"""

from __future__ import annotations

import functools
import mmap
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_core.errors import ShardError
from dflash_core.shards.format import CARD, DTYPES, INDEX, TOKENS, Layout, ShardCard, checksum, read_index, shard_name
from dflash_core.shards.fp8 import SCALES, from_fp8
from dflash_core.shards.trim import runs
from dflash_core.stages import file_sha256

AGAIN = "Delete that file and run the extraction again: only this shard is made anew."


@dataclass(frozen=True)
class ShardSample:
    """One sample as stored: a tensor [t, *shape] for every declared column; of a trimmed one its rows alone.

    where: for each trimmed column the one that says which tokens have a row
    """

    id: str
    columns: Mapping[str, torch.Tensor]
    where: Mapping[str, str] = field(default_factory=dict)

    @functools.cached_property
    def features(self) -> torch.Tensor:
        """Hidden states of the tapped layers side by side, [t, F]: a view in the stored precision, or in bfloat16 if they are stored in fp8.

        Of a trimmed dataset a copy, 0 where nothing is stored.
        """
        stored, scales = self.columns["features"], self.columns.get(SCALES)
        features_tF = stored if scales is None else from_fp8(stored, scales)
        if "features" not in self.where:
            return features_tF
        whole_tF = features_tF.new_zeros(len(self.tokens), features_tF.shape[1])
        whole_tF[self.columns[self.where["features"]]] = features_tF
        return whole_tF

    def pieces(self, name: str) -> list[tuple[int, torch.Tensor]]:
        """What is stored of a column, as runs of tokens: the first one's position in the sample, and the rows [n, *shape]."""
        stored = self.columns[name]
        if name not in self.where:
            return [(0, stored)]
        found = runs(self.columns[self.where[name]])
        rows = stored.split([after - first for first, after in found])
        return [(first, piece) for (first, _), piece in zip(found, rows, strict=True)] or [(0, stored)]

    @property
    def tokens(self) -> torch.Tensor:
        """Token ids, [t] int32."""
        return self.columns["tokens"]

    @property
    def loss_mask(self) -> torch.Tensor:
        """True where the target produced the token, [t] bool."""
        return self.columns["loss_mask"]


class ShardDataset:
    """A finished dataset of hidden states.

    card:       what it is (``ShardCard``)
    ids:        sample ids, in order
    lengths:    tokens of each sample, int64
    supervised: supervised tokens of each sample, int64
    digest:     sha256 of the index, which holds every sample's checksum
    """

    def __init__(self, folder: Path, expect: Mapping[str, Any] | None = None, *, verify: bool = True):
        """Open a dataset. ``expect`` are card fields it must have, see ``expected_of``; ``verify`` checks each sample at its first reading.

        Raises:
            ShardError: the dataset is missing, unfinished or damaged, or made for something else (both values are named).
        """
        self.folder = folder
        self.card = ShardCard.read(folder)
        self.card.require(expect or {}, folder)
        try:
            index = read_index(folder / INDEX, self.card)
            self.digest = file_sha256(folder / INDEX)
        except FileNotFoundError as error:
            raise ShardError(f"{folder} is not finished: it has no {INDEX}. Run the extraction again; it goes on where it ended.") from error
        if len(index) != self.card.num_samples:
            raise ShardError(
                f"{folder / INDEX} has {len(index)} samples, but {folder / CARD} says {self.card.num_samples}. Run the extraction again."
            )
        self.ids: list[str] = index["id"].to_pylist()
        self.lengths = index["tokens"].to_numpy().astype(np.int64)
        self.supervised = index["supervised"].to_numpy().astype(np.int64)
        self._shards = index["shard"].to_numpy()
        self._rows = {TOKENS: (index["start"].to_numpy(), self.lengths)} | {
            name: (index[f"{name}_start"].to_numpy(), index[name].to_numpy()) for name in self.card.partial
        }
        self._where = {column.name: column.where for column in self.card.columns if column.where is not None}
        self._checksums = index["crc32"].to_numpy()
        self._unverified = np.full(len(index), verify)
        self._mapped: dict[int, tuple[Layout, torch.Tensor]] = {}
        self._lock = threading.Lock()

    def require_column(self, name: str, who: str, remedy: str) -> None:
        """Raise ``ShardError`` unless the column is stored. ``who`` wants it, in words."""
        stored = [column.name for column in self.card.columns]
        if name not in stored:
            raise ShardError(f"{who} needs the column {name!r}, and {self.folder} has {', '.join(stored)}. {remedy}")

    def __len__(self) -> int:
        return len(self.ids)

    def sample(self, index: int) -> ShardSample:
        """Sample ``index`` as views of its shard. Raises ``ShardError`` naming the shard and the sample if they are damaged."""
        shard = int(self._shards[index])
        layout, data = self._open(shard)
        rows = {name: (int(starts[index]), int(counts[index])) for name, (starts, counts) in self._rows.items()}
        spans = [layout.span(position, *rows[column.counted_by]) for position, column in enumerate(layout.columns)]
        pieces = [data[begin : begin + size] for begin, size in spans]
        if self._unverified[index]:
            where = f"{self.folder / shard_name(shard)}: sample {self.ids[index]!r}"
            found, stored = checksum(pieces), int(self._checksums[index])
            if found != stored:
                raise ShardError(f"{where} is damaged, its CRC-32 is {found:08x} instead of {stored:08x}. {AGAIN}")
            for column, piece in zip(layout.columns, pieces, strict=True):
                if column.name in self.card.partial and (true := int(piece.count_nonzero())) != rows[column.name][1]:
                    raise ShardError(f"{where} has {true} tokens that are {column.name}, and {INDEX} says {rows[column.name][1]}. {AGAIN}")
            self._unverified[index] = False
        return ShardSample(
            self.ids[index],
            {
                column.name: piece.view(DTYPES[column.dtype]).view(rows[column.counted_by][1], *column.shape)
                for column, piece in zip(layout.columns, pieces, strict=True)
            },
            self._where,
        )

    def _open(self, shard: int) -> tuple[Layout, torch.Tensor]:
        with self._lock:
            if shard not in self._mapped:
                here = self._shards == shard
                layout = Layout.of(self.card.columns, {name: int(counts[here].sum()) for name, (_, counts) in self._rows.items()})
                self._mapped[shard] = layout, map_shard(self.folder / shard_name(shard), layout)
            return self._mapped[shard]


def map_shard(path: Path, layout: Layout) -> torch.Tensor:
    """Map a shard's file as bytes, uint8 [size]. Raises ``ShardError`` if it is missing, truncated, or its header is damaged."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size != layout.size:
                raise ShardError(f"{path} has {size} bytes instead of {layout.size}: it was truncated or overwritten. {AGAIN}")
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise ShardError(f"{path} is missing. Run the extraction again: only this shard is made anew.") from error
    if view[: len(layout.header)] != layout.header:
        raise ShardError(f"{path}: the header is damaged. {AGAIN}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable", category=UserWarning)  # as it should be
        return torch.frombuffer(view, dtype=torch.uint8)
