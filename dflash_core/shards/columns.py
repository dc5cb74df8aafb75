"""What is stored of each token: which columns, what the card says of them, how a pass of the target becomes them, and whether they are finite.

Shapes: T tokens of all samples of a batch, F = taps · hidden size, H hidden size, K of the likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch

from dflash_core.config import ExtractionConfig
from dflash_core.errors import ShardError
from dflash_core.shards.format import DTYPES, TOKENS, Column, ShardCard
from dflash_core.shards.fp8 import SCALES, to_fp8
from dflash_core.shards.trim import SEEN, TAUGHT

if TYPE_CHECKING:
    from dflash_core.data import SampleTable
    from dflash_core.target import TargetInfo

LAST_HIDDEN = "last_hidden"
TOPK = ("topk_ids", "topk_logprobs")
TEACHER_COLUMNS = {"none": (), "last_hidden": (LAST_HIDDEN,), "topk": TOPK}  # by extraction.teacher
EXTREMES = "extremes"  # beside the columns of a pass: least and largest value
_FEATURE_DTYPES: dict[str, Literal["BF16", "F32", "F8_E4M3"]] = {"bfloat16": "BF16", "float32": "F32", "fp8": "F8_E4M3"}
Likeliest = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
"""Last hidden states [T, H], K → ids [T, K] and log-probabilities [T, K] of the likeliest tokens."""


def feature_columns(config: ExtractionConfig, taps: int, hidden_size: int) -> tuple[Column, ...]:
    """The columns of the target's: ``features``, their scales where they are fp8, and what is stored of its distribution, never in fp8."""
    seen, taught = (SEEN, TAUGHT) if config.trim else (None, None)
    columns = [Column(name="features", dtype=_FEATURE_DTYPES[config.feature_dtype], shape=(taps * hidden_size,), where=seen)]
    if config.feature_dtype == "fp8":
        columns.append(Column(name=SCALES, dtype="F32", shape=(taps,), where=seen))
    if config.teacher == "last_hidden":
        columns.append(Column(name=LAST_HIDDEN, dtype="F32" if config.feature_dtype == "float32" else "BF16", shape=(hidden_size,), where=taught))
    if config.teacher == "topk":
        columns += [
            Column(name=TOPK[0], dtype="I32", shape=(config.teacher_tokens,), where=taught),
            Column(name=TOPK[1], dtype="F16", shape=(config.teacher_tokens,), where=taught),
        ]
    return tuple(columns)


def all_columns(config: ExtractionConfig, taps: int, hidden_size: int) -> tuple[Column, ...]:
    """Those of the target's, token ids and masks, and which tokens have a row in the columns that are trimmed."""
    of_target = feature_columns(config, taps, hidden_size)
    partial = dict.fromkeys(column.where for column in of_target if column.where is not None)
    of_tokens = Column(name="tokens", dtype="I32"), Column(name="loss_mask", dtype="BOOL"), *(Column(name=name, dtype="BOOL") for name in partial)
    return *of_target, *of_tokens


def card_of(
    config: ExtractionConfig,
    info: TargetInfo,
    samples: SampleTable,
    tap_layers: tuple[int, ...],
    target_dtype: str,
    code_version: int,
    window: int = 0,
) -> ShardCard:
    """The card of a dataset that is to be made; arguments as ``extract``. Raises ``ShardError`` where there are no samples."""
    if len(samples) == 0:
        raise ShardError("There are no samples to extract hidden states of. Add prompts, or see rejected.jsonl for why they were left out.")
    return ShardCard(
        format=2 if config.trim else 1,
        target_name=info.name,
        target_revision=info.revision,
        target_digest=info.digest,
        target_dtype=target_dtype,
        tokenizer_digest=info.tokenizer_digest,
        template_digest=info.template_digest,
        tap_layers=tap_layers,
        hidden_size=info.hidden_size,
        columns=all_columns(config, len(tap_layers), info.hidden_size),
        samples_digest=samples.digest,
        num_samples=len(samples),
        samples_per_shard=config.samples_per_shard,
        batch_tokens=config.batch_tokens,
        code_version=code_version,
        trimmed_for_window=window if config.trim else None,
    )


def trimmed_bytes(columns: Sequence[Column], rows: Mapping[str, int]) -> int:
    """What a trimmed dataset takes less than if it were not, the masks that say so included. ``rows`` of the whole, by ``Column.counted_by``."""
    partial = {column.where for column in columns if column.where is not None}
    return sum((rows[TOKENS] - rows[column.counted_by]) * column.token_bytes for column in columns) - len(partial) * rows[TOKENS]


def stored_columns(card: ShardCard, features_TF: torch.Tensor, tokens: int, head: Likeliest | None = None) -> dict[str, torch.Tensor]:
    """The columns of some tokens as they are stored, and the extremes of what must be finite; on the device where the features are."""
    columns = {column.name: column for column in card.columns}
    column, teacher = card.columns[0], [name for name in (LAST_HIDDEN, *TOPK) if name in columns]
    width = column.shape[0] + (card.hidden_size if teacher else 0)
    if features_TF.shape != (tokens, width):
        raise ValueError(f"the target returned {tuple(features_TF.shape)} instead of {(tokens, width)}")
    features_TF, last_TH = features_TF.detach().split([column.shape[0], width - column.shape[0]], dim=1)
    # Looked at after the cast, which can overflow too. Both extremes are NaN if any value is; they cost a fortieth of isfinite().all() on CPUs.
    if column.dtype == "F8_E4M3":
        values, scales = to_fp8(features_TF, len(card.tap_layers))
        stored, looked_at = {"features": values, SCALES: scales}, [scales]
    else:
        stored = {"features": features_TF.to(DTYPES[column.dtype])}
        looked_at = [stored["features"]]
    if teacher:
        said: tuple[torch.Tensor, ...] = (last_TH,) if teacher == [LAST_HIDDEN] else _required(head)(last_TH, columns[TOPK[0]].shape[0])
        stored |= {name: value.to(DTYPES[columns[name].dtype]) for name, value in zip(teacher, said, strict=True)}
        looked_at.append(stored[teacher[-1]])
    return {**stored, EXTREMES: torch.stack([extreme.float() for values in looked_at for extreme in torch.aminmax(values)])}


def _required(head: Likeliest | None) -> Likeliest:
    if head is None:
        raise ValueError("extraction.teacher = topk needs the target's head")
    return head


def check_finite(card: ShardCard, stored: dict[str, torch.Tensor], samples: SampleTable, batch: list[int]) -> None:
    """Raise ``ShardError`` for the first sample with a NaN or an infinity."""
    if bool(stored[EXTREMES].isfinite().all()):
        return
    values_TN = stored.get(SCALES, stored["features"])  # N: features, or one scale for each layer
    teacher_TX = next((stored[name] for name in (LAST_HIDDEN, TOPK[1]) if name in stored), values_TN[:, :0])
    found = first_nonfinite(torch.cat([values_TN, teacher_TX], dim=1), samples, batch, card.tap_layers, values_TN.shape[1])
    if found is not None:
        raise ShardError(f"{found} Finished shards are kept.")


def first_nonfinite(values_TN: torch.Tensor, samples: SampleTable, members: Sequence[int], tap_layers: Sequence[int], tapped: int) -> str | None:
    """The first sample with a NaN or an infinity and what helps, in words; None if there is none.

    Args:
        values_TN: of the samples ``members``, one after the other
        tapped:    of the N so many are of the tapped layers, equally many of each; all others are of the last layer
    """
    end = 0
    for i in members:
        begin, end = end, end + int(samples.lengths[i])
        bad = (~values_TN[begin:end].isfinite()).nonzero()
        if len(bad):
            position, place = bad[0].tolist()
            layer = str(tap_layers[place * len(tap_layers) // tapped]) if place < tapped else "the last one"
            return (
                f"Sample {samples.id(i)!r}: the target's hidden state is {values_TN[begin + position, place].item()} at token {position}, "
                f"layer {layer} ({len(bad)} such values). Run the target in another precision (target.dtype), "
                "keep its features more precisely (extraction.feature_dtype), or take the sample out of the data."
            )
    return None
