"""Features stored in fp8 come back within a sixteenth of what they were, whatever their size, in half the space."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch.nn import functional

from dflash_core.errors import ShardError
from dflash_core.feed.source import build_row
from dflash_core.shards import ShardDataset, verify_shards
from dflash_core.shards.fp8 import from_fp8, to_fp8
from tests.shards.fakes import CONFIG, HIDDEN, TAPS, FakeSamples, contents, hidden_states, run

FP8 = CONFIG.model_copy(update={"feature_dtype": "fp8"})


@settings(deadline=None, max_examples=60)
@given(exponents=st.lists(st.integers(-90, 120), min_size=6, max_size=6), seed=st.integers(0, 999), dtype=st.sampled_from(["float32", "bfloat16"]))
def test_any_size_of_values_comes_back_within_a_sixteenth_and_exactly_as_stored(exponents: list[int], seed: int, dtype: str) -> None:
    draws = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(seed))
    features = torch.ldexp(draws, torch.tensor(exponents).view(3, 2, 1)).flatten(1).to(getattr(torch, dtype))
    values, scales = to_fp8(features, 2)
    back = from_fp8(values, scales)
    by_cast = values.float().unflatten(-1, (2, 16)) * scales[..., None]
    assert torch.equal(back.float(), by_cast.flatten(-2))
    assert torch.equal(scales.log2(), scales.log2().round())
    largest = features.float().unflatten(-1, (2, 16)).abs().amax(-1, keepdim=True).expand(3, 2, 16).flatten(1)
    assert bool(((back.float() - features.float()).abs() <= features.float().abs() / 16 + largest * 2.0**-17).all())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_the_same_bits_come_back() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).repeat(64, 2)
    scales = torch.ldexp(torch.ones(64, 2), torch.randint(-100, 100, (64, 2), generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(from_fp8(values.cuda(), scales.cuda()).cpu(), from_fp8(values, scales), rtol=0, atol=0, equal_nan=True)


def test_extremes_are_kept() -> None:
    features = torch.tensor([[0.0, -0.0, 0.0, 448.0, -449.0, 464.1, 1e30, -3.29e38, 1e-38, 65504.0, -65504.0, 1.0]]).T.reshape(12, 1)
    values, scales = to_fp8(features.expand(12, 2).contiguous(), 1)
    back = from_fp8(values, scales)[:, 0].float()
    torch.testing.assert_close(back, features[:, 0], rtol=1 / 16, atol=0)
    assert bool(back.isfinite().all())


def test_a_dataset_in_fp8_is_half_as_large_and_gives_rows_that_stay_in_fp8_with_their_scales(tmp_path: Path) -> None:
    half = run(tmp_path / "fp8", config=FP8)
    whole = run(tmp_path / "bf16")
    assert half["bytes_per_token"] - 5 == HIDDEN * len(TAPS) + 4 * len(TAPS)
    assert whole["bytes_per_token"] - 5 == 2 * HIDDEN * len(TAPS)
    assert verify_shards(tmp_path / "fp8") == []
    dataset, exact = ShardDataset(tmp_path / "fp8"), ShardDataset(tmp_path / "bf16")
    for i in range(len(dataset)):
        features = dataset.sample(i).features
        assert features.dtype == torch.bfloat16
        torch.testing.assert_close(features.float(), exact.sample(i).features.float(), rtol=1 / 14, atol=1e-4)
    row = build_row([dataset.sample(0), dataset.sample(1)], ordinal=0, epoch=0, row_length=96, num_anchors=4, generator=torch.Generator())
    assert row.features.dtype == torch.float8_e4m3fn
    assert row.feature_scales is not None
    read_TF = torch.cat([dataset.sample(0).features, dataset.sample(1).features])
    assert torch.equal(from_fp8(row.features, row.feature_scales), functional.pad(read_TF, (0, 0, 0, 96 - len(read_TF))))
    run(tmp_path / "again", config=FP8)
    assert contents(tmp_path / "again") == contents(tmp_path / "fp8")


def test_pyarrow_and_safetensors_alone_read_fp8_features(tmp_path: Path) -> None:
    run(tmp_path, config=FP8)
    row = pa.ipc.open_file(str(tmp_path / "index.arrow")).read_all().to_pylist()[7]
    with safe_open(tmp_path / f"shard-{row['shard']:05d}.safetensors", "pt") as shard:
        features, scales = (shard.get_slice(name)[row["start"] : row["start"] + row["tokens"]] for name in ("features", "feature_scales"))
    features = (features.float().unflatten(1, (len(TAPS), HIDDEN)) * scales[:, :, None]).flatten(1)
    assert torch.equal(features, ShardDataset(tmp_path).sample(7).features.float())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3.3e38])  # the last would come back as an infinity
def test_a_value_that_is_not_finite_names_its_sample_and_layer_in_fp8_too(tmp_path: Path, value: float) -> None:
    def target(documents: Sequence[torch.Tensor]) -> torch.Tensor:
        features_TF = hidden_states(documents)
        features_TF[1, HIDDEN + 3] = value
        return features_TF

    with pytest.raises(ShardError, match=rf"hidden state is {abs(value) * torch.inf} at token 1, layer {TAPS[1]}"):
        run(tmp_path, FakeSamples(), target, config=FP8)


def test_shards_of_another_precision_are_not_taken_up(tmp_path: Path) -> None:
    run(tmp_path)
    with pytest.raises(ShardError, match="columns"):
        run(tmp_path, config=FP8)
