"""Rows from a live target are those from shards of it: same samples, same places, same order, and the same bits where passes are composed alike."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_core.config import PipelineConfig, parse_config
from dflash_core.errors import TargetError
from dflash_core.feed import Feed, LiveSamples, Row, ShardRows, target_loaders
from dflash_core.shards import ShardDataset, extract
from dflash_core.target import TargetModel
from tests.feed.test_rows import same
from tests.shards.fakes import FakeSamples
from tests.target.tiny import save_tiny_target

TAPS = (1, 2)


class Samples(FakeSamples):
    """Of tokens that the tiny target knows."""

    def tokens(self, i: int) -> np.ndarray:
        return super().tokens(i) % 250


SAMPLES = Samples(30)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return TargetModel.from_pretrained(save_tiny_target("llama", tmp_path_factory.mktemp("target")), dtype=torch.float32)


def config(batch_tokens: int, targets: int = 1, feature_dtype: str = "float32", trim: bool = False) -> PipelineConfig:
    return parse_config(
        {
            "run": {"seed": 3},
            "target": {"model": "tiny"},
            "data": {"sources": [{"source": "none.jsonl"}], "max_length": 96},
            "extraction": {"samples_per_shard": 8, "batch_tokens": batch_tokens, "feature_dtype": feature_dtype, "trim": trim},
            "drafter": {"block_size": 4, "mask_token_id": 259, "sliding_window": 5 if trim else None},
            "training": {"feed": "online", "target_devices": ["cpu"] * targets, "row_length": 96, "num_anchors": 10, "queue_rows": 4},
        }
    )


def rows(settings: PipelineConfig, target: TargetModel, count: int) -> list[Row]:
    """As a replica takes them from the queue that targets fill."""
    loaders = target_loaders(LiveSamples(SAMPLES, lambda devices: [target]), settings, TAPS)  # type: ignore[arg-type]
    with Feed(loaders, replicas=1, rows_per_microstep=1, queue_rows=4, start_ordinal=0, stop_ordinal=count) as feed:
        return [feed.take(0, microstep)[0] for microstep in range(count)]


def rows_of_shards(settings: PipelineConfig, target: TargetModel, folder: Path, count: int) -> list[Row]:
    extract(
        settings.extraction, target.info, [partial(target.packed_hidden_states, tap_layers=TAPS)], SAMPLES, folder,  # type: ignore[arg-type]
        tap_layers=TAPS, target_dtype="float32", code_version=1, window=settings.drafter.farthest_seen,
    )  # fmt: skip
    source = ShardRows(ShardDataset(folder), settings.training, settings.run.seed)
    assert source.rows_per_epoch(0) < count  # more than an epoch
    return [source.row(ordinal) for ordinal in range(count)]


@pytest.mark.parametrize(("targets", "trim"), [(1, False), (3, False), (1, True)])
def test_rows_of_live_targets_are_those_of_shards_bit_for_bit_where_samples_run_alone(
    tmp_path: Path, target: TargetModel, targets: int, trim: bool
) -> None:
    settings = config(1, targets, trim=trim)
    expected, found = rows_of_shards(settings, target, tmp_path, 14), rows(settings, target, 14)
    assert all(same(a, b) for a, b in zip(expected, found, strict=True))


def test_rows_of_a_target_that_is_spread_over_devices_are_those_of_one_device(target: TargetModel, tmp_path: Path) -> None:
    spread = TargetModel.from_pretrained(save_tiny_target("llama", tmp_path), dtype=torch.float32, device="cpu+cpu")
    settings = config(200).model_copy(update={"training": config(200).training.model_copy(update={"target_devices": ()})})
    settings = settings.model_copy(update={"target": settings.target.model_copy(update={"device": "cpu+cpu"})})
    assert settings.target_devices == ("cpu+cpu", "cpu+cpu")  # a thread for each stage
    assert all(same(a, b) for a, b in zip(rows(config(200), target, 14), rows(settings, spread, 14), strict=True))


@pytest.mark.parametrize("packs", [True, False])
def test_rows_that_run_whole_are_those_of_shards_within_rounding(
    tmp_path: Path, target: TargetModel, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "packs", packs)
    settings = config(200)
    for a, b in zip(rows_of_shards(settings, target, tmp_path, 14), rows(settings, target, 14), strict=True):
        torch.testing.assert_close(a.features, b.features, rtol=1e-4, atol=1e-4)
        assert (a.sample_ids, a.anchors.tolist()) == (b.sample_ids, b.anchors.tolist())


def test_features_are_kept_in_the_precision_that_shards_would_have(target: TargetModel) -> None:
    exact, kept = rows(config(200), target, 2), rows(config(200, feature_dtype="bfloat16"), target, 2)
    assert all(torch.equal(a.features.bfloat16(), b.features) for a, b in zip(exact, kept, strict=True))


def test_a_hidden_state_that_is_not_finite_names_sample_token_and_layer(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    original = target.packed_hidden_states

    def poisoned(documents: list[torch.Tensor], taps: tuple[int, ...]) -> torch.Tensor:
        features = original(documents, taps)
        if len(documents[0]) == len(SAMPLES.tokens(7)) and bool((documents[0] == torch.tensor(SAMPLES.tokens(7))).all()):
            features[2, -1] = float("inf")
        return features

    monkeypatch.setattr(target, "packed_hidden_states", poisoned)
    with pytest.raises(TargetError, match=r"Sample 'sample-007': the target's hidden state is inf at token 2, layer 2 \(1 such values\)"):
        rows(config(1), target, 14)
