from __future__ import annotations

import errno
import importlib
import itertools
import os
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from dflash_core.config import ExtractionConfig
from dflash_core.errors import ShardError
from dflash_core.shards import ShardDataset, overlap, verify_shards
from dflash_core.shards.extract import batches
from tests.shards.fakes import CONFIG, HIDDEN, TAPS, FakeInfo, FakeSamples, contents, hidden_states, run
from tests.waiting import PATIENCE_S, eventually


@pytest.mark.parametrize("feature_dtype", ["bfloat16", "float32"])
def test_every_sample_comes_back_as_the_target_gave_it(tmp_path: Path, feature_dtype: str) -> None:
    samples = FakeSamples()
    config = CONFIG.model_copy(update={"feature_dtype": feature_dtype})
    seen: dict[tuple[int, ...], torch.Tensor] = {}

    def target(documents: Sequence[torch.Tensor]) -> torch.Tensor:
        features_TF = hidden_states(documents)
        for ids, features in zip(documents, features_TF.split([len(ids) for ids in documents]), strict=True):
            seen[tuple(ids.tolist())] = features
        return features_TF

    counts = run(tmp_path, samples, target, config=config)
    dataset = ShardDataset(tmp_path)
    assert len(dataset) == len(samples)
    for i in range(len(samples)):
        sample = dataset.sample(i)
        assert sample.id == samples.id(i)
        np.testing.assert_array_equal(sample.tokens.numpy(), samples.tokens(i))
        np.testing.assert_array_equal(sample.loss_mask.numpy(), samples.loss_mask(i))
        assert torch.equal(sample.features, seen[tuple(samples.tokens(i).tolist())].to(getattr(torch, feature_dtype)))
    assert counts["tokens"] == samples.lengths.sum() == dataset.lengths.sum()
    assert counts["supervised_tokens"] == dataset.supervised.sum()
    assert counts["digest"] == dataset.digest
    assert verify_shards(tmp_path) == []


def test_pyarrow_and_safetensors_alone_read_a_dataset(tmp_path: Path) -> None:
    run(tmp_path)
    dataset = ShardDataset(tmp_path)
    row = pa.ipc.open_file(str(tmp_path / "index.arrow")).read_all().to_pylist()[7]
    with safe_open(tmp_path / f"shard-{row['shard']:05d}.safetensors", "pt") as shard:
        features = shard.get_slice("features")[row["start"] : row["start"] + row["tokens"]]
        tokens = shard.get_slice("tokens")[row["start"] : row["start"] + row["tokens"]]
    assert torch.equal(features, dataset.sample(7).features)
    assert torch.equal(tokens, dataset.sample(7).tokens)
    assert row["id"] == dataset.ids[7]


def test_two_extractions_are_byte_identical(tmp_path: Path) -> None:
    run(tmp_path / "a")
    run(tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_finished_shards_are_not_made_again(tmp_path: Path) -> None:
    run(tmp_path)
    before = contents(tmp_path)

    def never(documents: Sequence[torch.Tensor]) -> torch.Tensor:
        raise AssertionError("the target ran")

    run(tmp_path, target=never)
    assert contents(tmp_path) == before


def test_only_a_lost_or_truncated_shard_is_made_again(tmp_path: Path) -> None:
    run(tmp_path)
    before = contents(tmp_path)
    (tmp_path / "shard-00001.safetensors").unlink()
    os.truncate(tmp_path / "shard-00002.safetensors", 100)
    extracted = 0

    def counting(documents: Sequence[torch.Tensor]) -> torch.Tensor:
        nonlocal extracted
        extracted += len(documents)
        return hidden_states(documents)

    run(tmp_path, target=counting)
    assert extracted == 8
    assert contents(tmp_path) == before


def test_a_batch_is_of_one_shard_and_bounded(tmp_path: Path) -> None:
    sizes = []

    def target(documents: Sequence[torch.Tensor]) -> torch.Tensor:
        sizes.append(len(documents) * max(map(len, documents)))
        return hidden_states(documents)

    run(tmp_path, target=target)
    assert max(sizes) <= CONFIG.batch_tokens


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40), batch_tokens=st.integers(1, 200))
def test_batches_hold_every_sample_once_within_the_bound(lengths: list[int], batch_tokens: int) -> None:
    made = list(batches(lengths, range(len(lengths)), batch_tokens))
    assert sorted(i for batch in made for i in batch) == list(range(len(lengths)))
    for batch in made:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= batch_tokens


@pytest.mark.parametrize(
    ("changes", "field", "found", "wanted"),
    [
        ({"info": FakeInfo(digest="e" * 64)}, "target_digest", "d" * 64, "e" * 64),
        ({"tap_layers": (1, 5)}, "tap_layers", "(1, 4)", "(1, 5)"),
        ({"info": FakeInfo(template_digest="new")}, "template_digest", "c" * 64, "new"),
        ({"target_dtype": "bfloat16"}, "target_dtype", "float32", "bfloat16"),
        ({"samples": FakeSamples(seed=3)}, "samples_digest", "samples-0-14", "samples-3-14"),
        ({"config": CONFIG.model_copy(update={"batch_tokens": 32})}, "batch_tokens", "64", "32"),
        ({"code_version": 2}, "code_version", "1", "2"),
    ],
)
def test_shards_of_something_else_are_not_continued(tmp_path: Path, changes: dict, field: str, found: str, wanted: str) -> None:
    run(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(ShardError) as caught:
        run(tmp_path, **changes)
    assert all(text in str(caught.value) for text in (field, found, wanted, "another folder"))
    assert contents(tmp_path) == before


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e39])
def test_a_nonfinite_feature_names_its_sample_token_and_layer_and_the_rest_is_kept(tmp_path: Path, value: float) -> None:
    samples = FakeSamples()
    victim = samples.tokens(9)

    def broken(documents: Sequence[torch.Tensor]) -> torch.Tensor:
        features_TF = hidden_states(documents).double()
        begin = 0
        for ids in documents:
            if ids.tolist() == victim.tolist():
                features_TF[begin + 2, HIDDEN + 3] = value
            begin += len(ids)
        return features_TF

    with pytest.raises(ShardError, match=r"'sample-009'.*token 2, layer 4"):
        run(tmp_path, samples, broken)
    assert not list(tmp_path.rglob("*.tmp"))
    assert (tmp_path / "shard-00001.safetensors").exists()
    assert not (tmp_path / "shard-00002.safetensors").exists()
    run(tmp_path, samples)
    run(tmp_path.parent / "undisturbed", samples)
    assert contents(tmp_path) == contents(tmp_path.parent / "undisturbed")


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_last_hidden_states_are_stored_beside_the_features_and_looked_at_too(tmp_path: Path, dtype: str) -> None:
    config = CONFIG.model_copy(update={"teacher": "last_hidden", "feature_dtype": dtype})

    def with_last(documents: Sequence[torch.Tensor]) -> torch.Tensor:
        features_TF = hidden_states(documents)
        return torch.cat([features_TF, features_TF[:, :HIDDEN] / 3], dim=1)

    run(tmp_path / "whole", target=with_last, config=config)
    run(tmp_path / "without", config=config.model_copy(update={"teacher": "none"}))
    sample, plain = ShardDataset(tmp_path / "whole").sample(7), ShardDataset(tmp_path / "without").sample(7)
    assert torch.equal(sample.features, plain.features)
    last_tH = sample.columns["last_hidden"]
    assert last_tH.dtype == torch.bfloat16
    torch.testing.assert_close(last_tH.float(), plain.features[:, :HIDDEN].float() / 3, rtol=0.1, atol=0.01)

    def broken(documents: Sequence[torch.Tensor]) -> torch.Tensor:
        states_TX = with_last(documents)
        states_TX[1, -1] = torch.nan
        return states_TX

    with pytest.raises(ShardError, match="token 1, layer the last one"):
        run(tmp_path / "broken", target=broken, config=config)


@pytest.mark.parametrize("devices", [2, 3])
def test_the_number_of_devices_changes_no_byte(tmp_path: Path, devices: int) -> None:
    """Three devices are more than may be at work at the end; each shard is made by one of them."""
    threads: set[str] = set()
    all_at_work = threading.Barrier(devices)

    def target(documents: Sequence[torch.Tensor]) -> torch.Tensor:
        if threading.current_thread().name not in threads:
            threads.add(threading.current_thread().name)
            all_at_work.wait(PATIENCE_S)
        return hidden_states(documents)

    run(tmp_path / "several", FakeSamples(40), target, devices=devices)
    run(tmp_path / "one", FakeSamples(40))
    assert len(threads) == devices
    assert contents(tmp_path / "several") == contents(tmp_path / "one")


def test_what_one_device_cannot_do_stops_the_others_and_can_be_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extraction = importlib.import_module("dflash_core.shards.extract")._Extraction
    calls, failed, fail = itertools.count(), threading.Event(), extraction._fail
    monkeypatch.setattr(extraction, "_fail", lambda self, error: (fail(self, error), failed.set()))

    def target(documents: Sequence[torch.Tensor]) -> torch.Tensor:
        if any(len(ids) == 39 for ids in documents):
            raise RuntimeError("out of memory")
        if next(calls) > 80:  # 40 shards: one of the devices is at the 23rd
            failed.wait(PATIENCE_S)
        return hidden_states(documents)

    samples = FakeSamples(lengths=[20] * 90 + [39] + [20] * 400)
    with pytest.raises(RuntimeError, match="out of memory"):
        run(tmp_path / "stopped", samples, target, devices=2)
    assert not list((tmp_path / "stopped").rglob("*.tmp"))
    assert len(list((tmp_path / "stopped").glob("shard-*"))) < 60
    run(tmp_path / "stopped", samples)
    run(tmp_path / "undisturbed", samples)
    assert contents(tmp_path / "stopped") == contents(tmp_path / "undisturbed")


def test_a_slow_disk_is_told_from_a_slow_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their clock goes forward by 100 s whenever one side waits for the other: what the machine itself takes does not count beside that."""
    clock, written, given = SimpleNamespace(ahead=0.0), [0], [0]
    fake = SimpleNamespace(monotonic=lambda: time.monotonic() + clock.ahead, sleep=time.sleep)
    for module in (importlib.import_module("dflash_core.shards.extract"), overlap):
        monkeypatch.setattr(module, "time", fake)

    def slow(documents: Sequence[torch.Tensor]) -> torch.Tensor:
        assert eventually(lambda: written[-1] == given[-1])  # no writer has work
        clock.ahead += 100.0
        given.append(given[-1] + sum(map(len, documents)))
        return hidden_states(documents)

    counts = run(tmp_path / "slow-target", FakeSamples(12), slow, progress=lambda done, total, unit: written.append(done))
    assert counts["waited_for_target_s"] >= 100.0 * (len(given) - 1)
    assert counts["waited_for_disk_s"] < 100.0

    class Watched(queue.SimpleQueue):  # of slots
        def get(self, *arguments: object) -> object:
            if self.empty():
                all_full.set()
            return super().get(*arguments)  # type: ignore[arg-type]

    all_full, original, units = threading.Event(), os.pwrite, []

    def slow_write(*arguments: object) -> int:
        if threading.current_thread().name.startswith("shard-writer") and not clock.ahead:
            assert all_full.wait(PATIENCE_S)
            clock.ahead = 100.0
        return original(*arguments)  # type: ignore[arg-type]

    clock.ahead = 0.0
    monkeypatch.setattr(overlap, "queue", SimpleNamespace(SimpleQueue=Watched))
    monkeypatch.setattr(os, "pwrite", slow_write)
    counts = run(tmp_path / "slow-disk", FakeSamples(40), progress=lambda done, total, unit: units.append(unit))
    assert counts["waited_for_disk_s"] >= 100.0
    assert counts["waited_for_target_s"] < 100.0
    assert "tokens, " in units[-1]
    assert "waiting for the disk" in units[-1]


@pytest.mark.parametrize(("function", "call"), [("posix_fallocate", 2), ("pwrite", 9), ("fsync", 1), ("fsync", 5)])
def test_a_full_disk_is_a_clear_error_that_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, call: int) -> None:
    original, calls = getattr(os, function), itertools.count(1)  # of several threads

    def full(*arguments: object) -> object:
        if next(calls) == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*arguments)

    monkeypatch.setattr(os, function, full)
    with pytest.raises(ShardError, match=r"is full \(No space left on device\).*bytes are free.*run the extraction again"):
        run(tmp_path / "full")
    monkeypatch.undo()
    assert not list((tmp_path / "full").rglob("*.tmp"))
    run(tmp_path / "full")
    run(tmp_path / "undisturbed")
    assert contents(tmp_path / "full") == contents(tmp_path / "undisturbed")


def test_a_target_that_returns_another_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="instead of"):
        run(tmp_path, target=lambda documents: hidden_states(documents)[..., 1:])


def test_no_samples_is_an_error(tmp_path: Path) -> None:
    class Nothing(FakeSamples):
        def __len__(self) -> int:
            return 0

    with pytest.raises(ShardError, match=r"rejected\.jsonl"):
        run(tmp_path, Nothing())


def test_progress_reaches_the_total_with_and_without_work_to_do(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    for _ in range(2):
        seen.clear()
        counts = run(tmp_path, progress=lambda done, total, unit: seen.append((done, total)))
        assert seen[-1] == (counts["tokens"], counts["tokens"])
        assert seen == sorted(seen)


def test_one_shard_that_is_not_full_is_enough(tmp_path: Path) -> None:
    counts = run(tmp_path, FakeSamples(lengths=[1, 200]), config=ExtractionConfig(samples_per_shard=256, batch_tokens=64))
    assert counts["shards"] == 1
    assert ShardDataset(tmp_path).sample(1).features.shape == (200, HIDDEN * len(TAPS))
