"""Read shards: memory-mapped, without copying, each sample checked when it is first read.

    dataset = ShardDataset(folder, expect=expected_of(info, tap_layers))
    sample = dataset.sample(7)          # features [t, F], tokens [t], loss_mask [t]: views of the file

Safe to use from several threads. Tensors must not be written to: they are the file.

Thousands of samples a second are read by threads that share Python's lock, and each operation of torch lets go of it and waits for it again. So what
is done for each sample is slicing by NumPy (``ShardSample.pieces``), and tensors are made where somebody asks for them.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dflash_core.errors import ShardError
from dflash_core.shards.format import CARD, DTYPES, INDEX, TOKENS, Layout, ShardCard, checksum, index_part, read_index, shard_name
from dflash_core.shards.fp8 import SCALES, from_fp8
from dflash_core.shards.trim import runs
from dflash_core.stages import file_sha256

Bits = npt.NDArray[np.integer[Any]]
AGAIN = "Delete that file and run the extraction again: only this shard is made anew."
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(values: torch.Tensor) -> Bits:
    """A tensor on the CPU as integers of the same size, in the same memory: NumPy has no bfloat16 and no fp8."""
    return values.view(_INTEGERS[values.itemsize]).numpy()


class Columns:
    """Columns of some samples one after the other, [T, *shape]: as tensors, and as ``bits`` of the same memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self.tensors = tensors
        self.bits = {name: bits(values) for name, values in tensors.items()}
        for values in self.bits.values():
            values.flags.writeable = False


def index_damaged(index: Path, part: Path) -> str:
    """What to do about an index that contradicts that of a shard, which is whole."""
    return (
        f"{index} is damaged: it does not tell the same as {part}. Delete it and run the extraction again: it is joined anew, and no shard is made."
    )


@dataclass(frozen=True)
class ShardSample:
    """One sample as stored: its place in the columns of its shard.

    places: which rows of a column are the sample's, by ``Column.counted_by``
    where:  for each trimmed column the one that says which tokens have a row
    """

    id: str
    stored: Columns
    places: Mapping[str, slice]
    where: Mapping[str, str]

    @classmethod
    def of(cls, id: str, columns: Mapping[str, torch.Tensor]) -> ShardSample:
        """A sample that is in no shard: a tensor [t, *shape] for every column, ``tokens`` and ``loss_mask`` among them."""
        return cls(id, Columns(columns), {TOKENS: slice(0, len(columns["tokens"]))}, {})

    def __len__(self) -> int:
        place = self.places[TOKENS]
        return int(place.stop - place.start)

    @functools.cached_property
    def columns(self) -> Mapping[str, torch.Tensor]:
        """A tensor [t, *shape] for every declared column; of a trimmed one its rows alone."""
        return {name: values[self._place(name)] for name, values in self.stored.tensors.items()}

    @functools.cached_property
    def features(self) -> torch.Tensor:
        """Hidden states of the tapped layers side by side, [t, F]: a view in the stored precision, or in bfloat16 if they are stored in fp8.

        Of a trimmed dataset a copy, 0 where nothing is stored.
        """
        stored, scales = self.columns["features"], self.columns.get(SCALES)
        features_tF = stored if scales is None else from_fp8(stored, scales)
        if "features" not in self.where:
            return features_tF
        whole_tF = features_tF.new_zeros(len(self), features_tF.shape[1])
        whole_tF[self.columns[self.where["features"]]] = features_tF
        return whole_tF

    def bits(self, name: str) -> Bits:
        """What is stored of a column, [n, *shape], as ``bits``."""
        return self.stored.bits[name][self._place(name)]

    def pieces(self, name: str) -> list[tuple[int, Bits]]:
        """The same as runs of tokens: the first one's position in the sample, and the rows."""
        stored = self.bits(name)
        if name not in self.where:
            return [(0, stored)]
        pieces, begin = [], 0
        for first, after in runs(self.bits(self.where[name]).view(np.bool_)):
            pieces.append((first, stored[begin : begin + after - first]))
            begin += after - first
        return pieces

    @property
    def tokens(self) -> torch.Tensor:
        """Token ids, [t] int32."""
        return self.columns["tokens"]

    @property
    def loss_mask(self) -> torch.Tensor:
        """True where the target produced the token, [t] bool."""
        return self.columns["loss_mask"]

    def _place(self, name: str) -> slice:
        return self.places[self.where.get(name, TOKENS)]


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
        self._mapped: dict[int, Columns] = {}
        self._lock = threading.Lock()

    def require_column(self, name: str, who: str, remedy: str) -> None:
        """Raise ``ShardError`` unless the column is stored. ``who`` wants it, in words."""
        stored = [column.name for column in self.card.columns]
        if name not in stored:
            raise ShardError(f"{who} needs the column {name!r}, and {self.folder} has {', '.join(stored)}. {remedy}")

    def __len__(self) -> int:
        return len(self.ids)

    def sample(self, index: int) -> ShardSample:
        """Sample ``index`` as views of its shard. Raises ``ShardError`` naming the shard and the sample, or the index, if they are damaged."""
        try:
            shard = int(self._shards[index])
            stored = self._mapped.get(shard) or self._open(shard)
            places = {name: slice(start := int(starts[index]), start + int(counts[index])) for name, (starts, counts) in self._rows.items()}
            sample = ShardSample(self.ids[index], stored, places, self._where)
            if self._unverified[index]:
                self._verify(index, shard, sample)
            return sample
        except ShardError as error:
            if problem := self._index_problem():  # a shard that is whole looks damaged where the index is
                raise ShardError(problem) from error
            raise

    def _index_problem(self) -> str | None:
        """Where the index does not tell the same as those of the shards, from which it was joined: copies that nobody reads otherwise."""
        whole = read_index(self.folder / INDEX, self.card)
        for shard in range(self.card.num_shards):
            members, path = self.card.samples_of(shard), index_part(self.folder, shard)
            with contextlib.suppress(FileNotFoundError, ShardError):
                if not read_index(path, self.card).equals(whole.slice(members.start, len(members))):
                    return index_damaged(self.folder / INDEX, path)
        return None

    def _verify(self, index: int, shard: int, sample: ShardSample) -> None:
        where = f"{self.folder / shard_name(shard)}: sample {sample.id!r}"
        found, expected = checksum([sample.bits(name) for name in sample.stored.bits]), int(self._checksums[index])
        if found != expected:
            raise ShardError(f"{where} is damaged, its CRC-32 is {found:08x} instead of {expected:08x}. {AGAIN}")
        for name in self.card.partial:
            true, counted = np.count_nonzero(sample.bits(name)), int(self._rows[name][1][index])
            if true != counted:
                raise ShardError(f"{where} has {true} tokens that are {name}, and {INDEX} says {counted}. {AGAIN}")
        self._unverified[index] = False

    def _open(self, shard: int) -> Columns:
        with self._lock:
            if shard not in self._mapped:
                here = self._shards == shard
                rows = {name: int(counts[here].sum()) for name, (_, counts) in self._rows.items()}
                layout = Layout.of(self.card.columns, rows)
                data = map_shard(self.folder / shard_name(shard), layout)
                tensors = {}
                for position, column in enumerate(layout.columns):  # in this order a sample's checksum was taken
                    count = rows[column.counted_by]
                    begin, size = layout.span(position, 0, count)
                    tensors[column.name] = data[begin : begin + size].view(DTYPES[column.dtype]).view(count, *column.shape)
                self._mapped[shard] = Columns(tensors)
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
    except OSError as error:
        raise ShardError(f"{path} cannot be read: {error}. Make it readable. Otherwise: {AGAIN}") from error
    if view[: len(layout.header)] != layout.header:
        raise ShardError(f"{path}: the header is damaged. {AGAIN}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable", category=UserWarning)  # as it should be
        return torch.frombuffer(view, dtype=torch.uint8)
