"""The shard format: what lies where in a dataset of hidden states.

    card.json                     what the dataset is: target, tap layers, columns, samples (``ShardCard``)
    shard-00000.safetensors …     the columns of a run of samples, one after the other, nothing else
    index/shard-00000.arrow …     the rows of one shard; written after the shard, so its presence means the shard is whole
    index.arrow                   all rows, in order; written last, so its presence means the dataset is whole

Every byte of a shard follows from the card, the index and the samples: the header is computed, not stored, and each
sample has a checksum. So the position of every sample is known before the target has run, samples may be written in any
order, and a reader checks exactly what it reads. pyarrow and safetensors alone can read it::

    index = pyarrow.ipc.open_file("index.arrow").read_all().to_pylist()
    row = index[7]
    shard = safetensors.safe_open(f"shard-{row['shard']:05d}.safetensors", "pt")
    features = shard.get_slice("features")[row["start"] : row["start"] + row["tokens"]]

A trimmed dataset is of format 2: some of its columns have rows for some of the tokens alone. Which, another column says (``Column.where``).

Shapes: t tokens of a sample, T tokens of a shard, K tap layers, H hidden size of the target, F = K·H.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, SerializerFunctionWrapHandler, ValidationError, model_serializer, model_validator

from dflash_core.errors import ShardError

if TYPE_CHECKING:
    from dflash_core.target import TargetInfo

CARD = "card.json"
INDEX = "index.arrow"
INDEX_PARTS = "index"
TOKENS = "tokens"  # column of the index that counts the rows of a column with one for each token

# Names of safetensors. Further columns (top-k, position ids of several axes) need no other change here.
DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

INDEX_SCHEMA = pa.schema(
    [
        pa.field("sample", pa.int64(), nullable=False),  # row of the sample dataset
        pa.field("id", pa.string(), nullable=False),
        pa.field("shard", pa.int32(), nullable=False),
        pa.field("start", pa.int64(), nullable=False),  # first token within the shard
        pa.field("tokens", pa.int32(), nullable=False),
        pa.field("supervised", pa.int32(), nullable=False),
        pa.field("crc32", pa.uint32(), nullable=False),  # of the sample's bytes, column after column in file order
    ]
)


class _Described(BaseModel):
    """Part of a card. What only trimmed datasets have is not written of others, whose cards stay as they were before there were such."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_serializer(mode="wrap")
    def _without_trimming(self, as_usual: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = as_usual(self)
        return {name: value for name, value in values.items() if value is not None or name not in ("where", "trimmed_for_window")}


class Column(_Described):
    """A value per token: its name, its safetensors dtype and its shape per token (``()`` for a scalar).

    where: the column of BOOL that says which tokens have a row in this one; None: all have
    """

    name: str
    dtype: Literal["F32", "F16", "BF16", "F8_E4M3", "I64", "I32", "U8", "BOOL"]
    shape: tuple[PositiveInt, ...] = ()
    where: str | None = None

    @property
    def token_bytes(self) -> int:
        """Bytes of one token that has a row."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def counted_by(self) -> str:
        """Column of the index that counts its rows in each sample."""
        return self.where or TOKENS


class ShardCard(_Described):
    """What a dataset of hidden states is, and of what. Kept as ``card.json``.

    trimmed_for_window: only what a drafter uses is stored whose layers all have a sliding window of so many positions, or less; 0: what any uses
    """

    format: Literal[1, 2] = 1
    target_name: str
    target_revision: str | None
    target_digest: str
    target_dtype: str
    tokenizer_digest: str
    template_digest: str | None
    tap_layers: tuple[int, ...]
    hidden_size: PositiveInt
    columns: tuple[Column, ...]
    samples_digest: str
    num_samples: PositiveInt
    samples_per_shard: PositiveInt
    batch_tokens: int
    code_version: int
    trimmed_for_window: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _adds_up(self) -> ShardCard:
        """What it says of its columns fits together: a card that was edited is found before whole shards are taken for damaged."""
        if (self.trimmed_for_window is not None) != (self.format == 2) or (self.format == 2) != bool(self.partial):
            has = [f"format = {self.format}", f"trimmed_for_window = {self.trimmed_for_window}", f"where = {list(self.partial)} in columns"]
            raise ValueError(
                f"{', '.join(has)}: a trimmed dataset has format 2, trimmed_for_window and a where in columns, and others have none of the three"
            )
        columns = {column.name: column for column in self.columns}
        if len(columns) < len(self.columns) or not {"features", "tokens", "loss_mask"} <= columns.keys():
            raise ValueError(
                f"columns = {[column.name for column in self.columns]}: features, tokens and loss_mask must be there, and each name once"
            )
        if columns["tokens"].where or columns["loss_mask"].where:
            raise ValueError("columns: tokens and loss_mask have a value for every token, and so no where")
        for name in self.partial:
            found = columns.get(name)
            if found is None or (found.dtype, found.shape, found.where) != ("BOOL", (), None):
                raise ValueError(f"columns: a where is {name!r}, which is no column of BOOL with a value for every token")
        features, scales = columns["features"], columns.get("feature_scales")
        wanted = (len(self.tap_layers),) if features.dtype == "F8_E4M3" else None
        if (scales.shape if scales else None) != wanted or (scales and scales.where != features.where):
            raise ValueError("columns: feature_scales belong to features in F8_E4M3 alone, one for each of tap_layers, with the same where")
        if features.shape != (len(self.tap_layers) * self.hidden_size,):
            raise ValueError(f"columns: features have the shape {features.shape}, and not tap_layers × hidden_size")
        return self

    @property
    def partial(self) -> tuple[str, ...]:
        """The columns that say which tokens have a row in others."""
        return tuple(dict.fromkeys(column.where for column in self.columns if column.where is not None))

    @property
    def index_schema(self) -> pa.Schema:
        """Columns of the index."""
        numbers = [pa.field(f"{name}_start", pa.int64(), nullable=False) for name in self.partial]
        counts = [pa.field(name, pa.int32(), nullable=False) for name in self.partial]
        return pa.schema([*INDEX_SCHEMA, *(field for pair in zip(numbers, counts, strict=True) for field in pair)])

    @property
    def identity(self) -> dict[str, Any]:
        """Every field that decides what the rows are; the target's digest stands for it, whatever its name."""
        return {name: getattr(self, name) for name in type(self).model_fields if name not in ("target_name", "target_revision")}

    @property
    def num_shards(self) -> int:
        return -(-self.num_samples // self.samples_per_shard)

    def samples_of(self, shard: int) -> range:
        """Rows of the sample dataset that lie in ``shard``."""
        first = shard * self.samples_per_shard
        return range(first, min(first + self.samples_per_shard, self.num_samples))

    @classmethod
    def read(cls, folder: Path) -> ShardCard:
        """The card of a dataset. Raises ``ShardError`` where there is none or it cannot be read."""
        path = folder / CARD
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError as error:
            raise ShardError(f"{folder} is not a dataset of hidden states: it has no {CARD}. Check the path, or run the extraction.") from error
        except (OSError, ValidationError) as error:
            raise ShardError(
                f"{path} cannot be read: {_in_words(error)}. "
                "It is damaged, was edited, or is of another format: put it back, or extract into a new folder."
            ) from error

    def require(self, expected: Mapping[str, Any], where: Path | str) -> None:
        """Raise ``ShardError`` with both values of every field that is not as expected."""
        differences = [
            f"  {name}: the shards have {found!r}, this run needs {wanted!r}"
            for name, wanted in expected.items()
            if (found := getattr(self, name)) != (tuple(wanted) if isinstance(wanted, list) else wanted)
        ]
        if differences:
            text = "\n".join([f"{where} holds hidden states of {self.target_name} that do not fit:", *differences])
            raise ShardError(f"{text}\nUse shards of this target and these settings, or extract into another folder.")

    def require_window(self, window: int, where: Path | str) -> None:
        """Raise ``ShardError`` if they are trimmed to less than a drafter sees, of whose layers all have this window; 0: one sees everything."""
        trimmed = self.trimmed_for_window
        if trimmed and not 0 < window <= trimmed:
            wanted = f"drafter.sliding_window = {window} sees farther" if window else "this run has draft layers with full attention"
            raise ShardError(
                f"{where}/{CARD}: trimmed_for_window = {trimmed}, so of each context the last {trimmed} positions are stored, and {wanted}. "
                f"Extract again for this drafter or with extraction.trim = false, or set drafter.sliding_window to at most {trimmed} in all layers."
            )


def _in_words(error: OSError | ValidationError) -> str:
    if isinstance(error, OSError):
        return str(error)
    found = [(".".join(map(str, item["loc"])), item["input"], item["msg"].removeprefix("Value error, ")) for item in error.errors()]
    return "; ".join(f"{field} = {value!r}: {message}" if field else message for field, value, message in found)


def expected_of(info: TargetInfo, tap_layers: Sequence[int]) -> dict[str, Any]:
    """The card fields that shards must have to train a drafter for a target with these taps."""
    return {
        "target_digest": info.digest,
        "tokenizer_digest": info.tokenizer_digest,
        "template_digest": info.template_digest,
        "hidden_size": info.hidden_size,
        "tap_layers": tuple(tap_layers),
    }


@dataclass(frozen=True)
class Layout:
    """Where the bytes of a shard of T tokens lie: header, then one array [T, *shape] per column; of a trimmed column [its rows, *shape]."""

    columns: tuple[Column, ...]
    header: bytes
    begins: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, columns: Sequence[Column], rows: Mapping[str, int]) -> Layout:
        """The layout of a shard. Columns come widest dtype first, as safetensors has them, so that each is aligned.

        Args:
            rows: by ``Column.counted_by``
        """
        ordered = tuple(sorted(columns, key=lambda column: -DTYPES[column.dtype].itemsize))
        ends = np.cumsum([0, *(rows[column.counted_by] * column.token_bytes for column in ordered)]).tolist()
        entries = {
            column.name: {"dtype": column.dtype, "shape": [rows[column.counted_by], *column.shape], "data_offsets": ends[i : i + 2]}
            for i, column in enumerate(ordered)
        }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        return cls(ordered, header, tuple(len(header) + end for end in ends[:-1]), len(header) + ends[-1])

    def span(self, position: int, start: int, rows: int) -> tuple[int, int]:
        """(first byte, number of bytes) in the file of some rows of the column at ``position``."""
        width = self.columns[position].token_bytes
        return self.begins[position] + start * width, rows * width


def shard_name(shard: int) -> str:
    """File name of a shard."""
    return f"shard-{shard:05d}.safetensors"


def index_part(folder: Path, shard: int) -> Path:
    """Path of the index rows of one shard."""
    return folder / INDEX_PARTS / f"shard-{shard:05d}.arrow"


def read_index(path: Path, card: ShardCard) -> pa.Table:
    """Read index rows into memory. Raises ``ShardError`` if the file is damaged or cannot be read; ``FileNotFoundError`` if it is not there."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ShardError(f"{path} cannot be read: {error}. Make it readable, or delete it and run the extraction again.") from error
    try:
        table = pa.ipc.open_file(pa.py_buffer(content)).read_all()
        table.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise ShardError(f"{path} is damaged: {error}. Delete it and run the extraction again: at most one shard is made anew.") from error
    if table.schema != card.index_schema:
        raise ShardError(
            f"{path} has columns {table.schema.names} instead of {card.index_schema.names}. It is damaged or of another program. "
            "Delete it and run the extraction again."
        )
    return table


def is_whole(folder: Path, card: ShardCard, shard: int) -> bool:
    """Whether a shard and its index rows are there, of the right size."""
    try:
        rows = read_index(index_part(folder, shard), card)
        size = (folder / shard_name(shard)).stat().st_size
    except (FileNotFoundError, ShardError):
        return False
    return size == Layout.of(card.columns, {name: sum(rows[name].to_pylist()) for name in (TOKENS, *card.partial)}).size


def checksum(pieces: Sequence[npt.NDArray[Any]]) -> int:
    """CRC-32 of the bytes of some contiguous arrays, one after the other.

    The danger is a damaged disk, not a forger: CRC-32 finds every burst of up to 32 bits and misses other damage once in
    four thousand million, and zlib's runs at 3 GB/s on a core without the interpreter lock, where sha256 reaches 1.5 and blake2b
    0.8. It is taken per sample so that a reader checks what it reads, rather than terabytes before the first row.
    """
    value = 0
    for piece in pieces:
        value = zlib.crc32(piece.data, value)
    return value
