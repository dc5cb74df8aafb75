"""Run the target over every sample and keep the hidden states of its tapped layers.

A shard's batches are made of its own samples alone, longest first, so a shard that is made again is the same shard, byte
for byte, whatever was done before it. Work that was finished is found and skipped.

Shapes: B samples of a batch, T tokens of the longest of them, t tokens of one sample, F = taps · hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow.compute as pc
import torch

from dflash_core.config import ExtractionConfig
from dflash_core.errors import ShardError
from dflash_core.shards.format import DTYPES, INDEX, Column, ShardCard, shard_name
from dflash_core.shards.fp8 import SCALES, to_fp8
from dflash_core.shards.writer import OpenShard, ShardWriter
from dflash_core.stages import Progress, file_sha256, no_progress

if TYPE_CHECKING:
    from dflash_core.data import SampleTable
    from dflash_core.target import TargetInfo

HiddenStates = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(ids [B, T] int64, mask [B, T] bool, both on the CPU, padded on the right) → features [B, T, F] on any device."""

_FEATURE_DTYPES: dict[str, Literal["BF16", "F32", "F8_E4M3"]] = {"bfloat16": "BF16", "float32": "F32", "fp8": "F8_E4M3"}


def extract(
    config: ExtractionConfig,
    info: TargetInfo,
    hidden_states: HiddenStates,
    samples: SampleTable,
    folder: Path,
    *,
    tap_layers: Sequence[int],
    target_dtype: str,
    code_version: int,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Write the hidden states of all samples into ``folder``, or finish what was begun there.

    Args:
        tap_layers: the layers whose outputs ``hidden_states`` returns, in that order.
        target_dtype: precision in which the target runs, for the record.
    Returns:
        counts: samples, tokens, supervised_tokens, shards, bytes, bytes_per_token, and digest (sha256 of the index, which holds the
        checksum of every sample).
    Raises:
        ShardError: the folder holds shards of another target or other settings; a feature is not finite (its sample is named);
            the disk is full. Finished shards are kept, and the same call goes on after the last one.
    """
    card = _card(config, info, samples, tuple(tap_layers), target_dtype, code_version)
    writer = ShardWriter(folder, card)
    unfinished = set(writer.unfinished())
    lengths = [int(length) for length in samples.lengths]
    total = sum(lengths)
    done = 0
    for shard in range(card.num_shards):
        members = card.samples_of(shard)
        if shard in unfinished:
            ids = [samples.id(i) for i in members]
            with writer.shard(shard, ids, [lengths[i] for i in members]) as out:
                for batch in batches(lengths, members, config.batch_tokens):
                    _extract_batch(card, hidden_states, samples, batch, members.start, out)
                    done += sum(lengths[i] for i in batch)
                    progress(done, total, "tokens")
        else:
            done += sum(lengths[i] for i in members)
            progress(done, total, "tokens")
    index = writer.finalize()
    return {
        "samples": card.num_samples,
        "tokens": total,
        "supervised_tokens": pc.sum(index["supervised"]).as_py(),
        "shards": card.num_shards,
        "bytes": sum((folder / shard_name(shard)).stat().st_size for shard in range(card.num_shards)),
        "bytes_per_token": sum(column.token_bytes for column in card.columns),
        "digest": file_sha256(folder / INDEX),
    }


def _card(
    config: ExtractionConfig, info: TargetInfo, samples: SampleTable, tap_layers: tuple[int, ...], target_dtype: str, code_version: int
) -> ShardCard:
    if len(samples) == 0:
        raise ShardError("There are no samples to extract hidden states of. Add prompts, or see rejected.jsonl for why they were left out.")
    return ShardCard(
        target_name=info.name,
        target_revision=info.revision,
        target_digest=info.digest,
        target_dtype=target_dtype,
        tokenizer_digest=info.tokenizer_digest,
        template_digest=info.template_digest,
        tap_layers=tap_layers,
        hidden_size=info.hidden_size,
        columns=(
            *feature_columns(config, len(tap_layers), info.hidden_size),
            Column(name="tokens", dtype="I32"),
            Column(name="loss_mask", dtype="BOOL"),
        ),
        samples_digest=samples.digest,
        num_samples=len(samples),
        samples_per_shard=config.samples_per_shard,
        batch_tokens=config.batch_tokens,
        code_version=code_version,
    )


def feature_columns(config: ExtractionConfig, taps: int, hidden_size: int) -> tuple[Column, ...]:
    """The columns that hold hidden states: ``features``, and their scales where they are fp8."""
    features = Column(name="features", dtype=_FEATURE_DTYPES[config.feature_dtype], shape=(taps * hidden_size,))
    return (features, Column(name=SCALES, dtype="F32", shape=(taps,))) if config.feature_dtype == "fp8" else (features,)


def batches(lengths: Sequence[int], members: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Split the samples ``members`` into batches of at most ``batch_tokens`` tokens, padding included; a longer sample goes alone.

    Longest first: neighbours are of similar length, so little is padded, and a batch that is too large for memory fails at once.
    """
    ordered = sorted(members, key=lambda i: (-lengths[i], i))
    batch: list[int] = []
    for i in ordered:
        if batch and (len(batch) + 1) * lengths[batch[0]] > batch_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _extract_batch(card: ShardCard, hidden_states: HiddenStates, samples: SampleTable, batch: list[int], first: int, out: OpenShard) -> None:
    tokens = [torch.tensor(samples.tokens(i), dtype=torch.int32) for i in batch]
    ids_BT = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True).long()
    mask_BT = torch.arange(ids_BT.shape[1]) < torch.tensor([len(ids) for ids in tokens])[:, None]
    features_BTF = hidden_states(ids_BT, mask_BT)
    column = card.columns[0]
    if features_BTF.shape != (*ids_BT.shape, *column.shape):
        raise ValueError(f"hidden_states returned {tuple(features_BTF.shape)} instead of {(*ids_BT.shape, *column.shape)}")
    features_BTF = features_BTF.detach()
    stored = {"features": features_BTF.to(DTYPES[column.dtype])}
    looked_at = stored["features"]  # after the cast, which can overflow too
    if column.dtype == "F8_E4M3":
        stored["features"], stored[SCALES] = to_fp8(features_BTF, len(card.tap_layers))
        looked_at = stored[SCALES]
    # Both extremes are NaN if any value is; they cost a fortieth of isfinite().all() on CPUs.
    if not bool(torch.stack(torch.aminmax(looked_at)).isfinite().all()):
        _refuse_nonfinite(card, features_BTF if column.dtype == "F8_E4M3" else looked_at, samples, batch, [len(ids) for ids in tokens])
    stored = {name: value_BT.cpu() for name, value_BT in stored.items()}
    for row, i in enumerate(batch):
        loss_mask = torch.tensor(samples.loss_mask(i), dtype=torch.bool)
        features = {name: value_BT[row, : len(tokens[row])] for name, value_BT in stored.items()}
        out.write(i - first, {**features, "tokens": tokens[row], "loss_mask": loss_mask})


def _refuse_nonfinite(card: ShardCard, features_BTF: torch.Tensor, samples: SampleTable, batch: list[int], lengths: list[int]) -> None:
    """Raise for the first sample with a NaN or an infinity; what stands in the padding does not matter."""
    for row, (i, length) in enumerate(zip(batch, lengths, strict=True)):
        bad = (~features_BTF[row, :length].isfinite()).nonzero()
        if len(bad):
            position, feature = bad[0].tolist()
            layer = card.tap_layers[feature // card.hidden_size]
            value = features_BTF[row, position, feature].item()
            raise ShardError(
                f"Sample {samples.id(i)!r}: the target's hidden state is {value} at token {position}, layer {layer} ({len(bad)} such values). "
                f"Run the target in another precision than {card.target_dtype} (target.dtype), store more precisely (extraction.feature_dtype), "
                "or take the sample out of the data. Finished shards are kept."
            )
