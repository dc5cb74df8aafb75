"""Memory as it is estimated, against buffers as they are made, what autograd keeps, and steps that were measured on a GPU."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.common import RESULTS, SHAPES, Shape
from dflash_core.config import parse_config
from dflash_core.decoding import Room
from dflash_core.drafter import DFlashConfig, DFlashDrafter, DrafterCache
from dflash_core.estimate import Sizes
from dflash_core.estimate.memory import Ledger
from dflash_core.target import StaticTarget, TargetModel, loaded_bytes, static_cache_bytes
from dflash_core.training.replica import Replica
from tests.target.tiny import save_tiny_target
from tests.training.small import DISTILLED, INFO, TAPS, H, RowsOfATeacher, SmallRows, config, vocabulary

FLOAT32 = {"extraction": {"feature_dtype": "float32"}}


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Of all memory that some tensors lie in, counted once."""
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


@pytest.mark.parametrize(
    "training",
    [
        {"precision": "float32"},
        {"precision": "bfloat16"},
        {"precision": "bfloat16", "sync": "sharded"},
        {"precision": "float32", "sync": "sharded"},
        {"precision": "float32", "optimizer": "muon"},
        {"precision": "bfloat16", "optimizer": "muon", "accumulation_steps": 2},
    ],
    ids=str,
)
def test_weights_masters_moments_and_gradients_are_counted_to_the_byte(training: dict[str, Any]) -> None:
    settings = config(2, **training)
    sizes = Sizes(settings, INFO)
    found = 0
    for index in range(2):
        replica = Replica(index, torch.device("cpu"), settings, sizes.drafter, vocabulary())
        gradients = [parameter.grad for parameter in replica.drafter.parameters() if parameter.grad is not None]
        found += bytes_of([replica.weights, *replica.shards, *replica.summed, *gradients])
    parts = sizes.training(10, 99).parts["cpu"]
    assert sum(parts[name] for name in ("weights", "masters", "moments", "gradients")) == found


def test_sharding_saves_memory_and_so_do_muon_and_checkpointing() -> None:
    usual, *smaller = (
        Sizes(config(2, **{"precision": "bfloat16", **changes}), INFO).training(10, 99).needed()["cpu"]
        for changes in ({}, {"sync": "sharded"}, {"optimizer": "muon"}, {"activation_checkpointing": True})
    )
    assert all(size < usual for size in smaller)


@pytest.mark.parametrize(
    ("source", "changes"),
    [(SmallRows(), FLOAT32), (RowsOfATeacher(), {**DISTILLED, "extraction": {"teacher": "last_hidden", "feature_dtype": "float32"}})],
)
def test_a_row_is_counted_to_the_byte(source: SmallRows, changes: dict[str, Any]) -> None:
    assert Sizes(config(**changes), INFO).row() == sum(tensor.nbytes for tensor in source.row(0).tensors.values())


def test_the_feed_is_counted_with_as_many_rows_as_the_queue_and_the_replicas_hold_and_never_more_than_the_run_has() -> None:
    one = Sizes(config(), INFO).row()
    assert Sizes(config(2, queue_rows=8, rows_per_microstep=2), INFO).fed(1000) == (8 + 2 * 2) * one
    assert Sizes(config(2, queue_rows=8, launcher="torchrun"), INFO).fed(1000) == (2 * 8 + 2) * one
    assert Sizes(config(queue_rows=100_000), INFO).fed(12) == 12 * one


def test_on_gpus_the_host_pins_the_features_of_shards_in_powers_of_two_and_holds_none_of_a_live_target() -> None:
    cuda = {"devices": ["cuda:0"], "row_length": 48, "precision": "bfloat16"}
    features = 48 * TAPS * H * 2
    rest = Sizes(config(**cuda), INFO).row() - features
    assert Sizes(config(**cuda), INFO).fed(1) == 16384 + rest  # 12288 bytes of features
    assert Sizes(config(**cuda, feed="online", target_devices=["cuda:0"]), INFO).fed(1) == rest


@pytest.mark.parametrize(("row_length", "num_anchors"), [(128, 16), (512, 32), (128, 64)])
def test_what_a_forward_pass_keeps_on_the_cpu_is_what_autograd_keeps(row_length: int, num_anchors: int) -> None:
    info = replace(INFO, hidden_size=192, intermediate_size=512, num_heads=6, num_kv_heads=2, head_dim=32)
    settings = config(**FLOAT32, row_length=row_length, num_anchors=num_anchors)
    sizes = Sizes(settings, info)
    drafter, kept = DFlashDrafter(sizes.drafter), []
    own = {parameter.untyped_storage().data_ptr() for parameter in drafter.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept.append(tensor)
        return tensor

    Q = num_anchors * sizes.drafter.block_size
    rotations = [drafter.rotation(torch.arange(length)[None], torch.float32) for length in (row_length, Q)]
    features, anchors = torch.randn(1, row_length, sizes.drafter.feature_size), torch.randn(1, num_anchors, 192)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        drafter.forward_training(features, anchors, torch.randn(192), *rotations, torch.ones(1, 1, Q, row_length + Q, dtype=torch.bool))
    assert sizes.kept(on_cuda=False) == pytest.approx(bytes_of(kept), rel=0.1)


def of_shape(shape: Shape, **training: Any) -> Ledger:
    """The training that ``benchmarks.step`` measures, on cuda:0."""
    info = replace(
        INFO, num_layers=36, hidden_size=shape.H, intermediate_size=shape.I, num_heads=shape.heads, num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim, vocab_size=shape.V, tie_word_embeddings=False,
    )  # fmt: skip
    settings = {
        "devices": ["cuda:0"], "row_length": shape.T, "num_anchors": shape.N, "rows_per_microstep": shape.B, "queue_rows": 2 * shape.B, **training,
    }  # fmt: skip
    drafter = {"num_layers": shape.layers, "block_size": shape.S, "mask_token_id": shape.V - 1}
    data = {"sources": [{"source": "none.jsonl"}], "max_length": shape.T}
    tree = {"target": {"model": "none"}, "data": data, "drafter": drafter, "objective": {"chunk_slots": shape.chunk}, "training": settings}
    return Sizes(parse_config(tree), info).training(100, 10_000)


@pytest.mark.parametrize(
    ("name", "shape", "training"),
    [
        ("step.bf16.1x2048.peak", "1x2048", {}),
        ("step.bf16.1x2048.ungraphed.peak", "1x2048", {"cuda_graphs": False}),
        ("step.bf16.4x3072.peak", "4x3072", {}),
        ("step.fp8.1x2048.peak", "1x2048", {"precision": "fp8"}),
        ("step.fp8.4x3072.peak", "4x3072", {"precision": "fp8"}),
    ],
)
def test_the_memory_of_measured_steps_is_estimated_within_a_tenth(name: str, shape: str, training: dict[str, Any]) -> None:
    records = [record for line in RESULTS.read_text().splitlines() if (record := json.loads(line))["name"] == name and not record["dirty"]]
    ledger, record = of_shape(SHAPES[shape], **training), records[-1]  # of the step as it is
    assert ledger.needed()["cuda:0"] / 2**30 == pytest.approx(record["detail"]["reserved"], rel=0.1)
    if not training.get("cuda_graphs", True):  # of graphs the peak is all that is reserved
        assert ledger.parts["cuda:0"].total() / 2**30 == pytest.approx(record["value"], rel=0.05)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return TargetModel.from_pretrained(save_tiny_target("qwen3", tmp_path_factory.mktemp("target")), dtype=torch.bfloat16)


def test_a_target_takes_what_its_files_say_in_the_precision_it_is_loaded_in(target: TargetModel) -> None:
    weights = [*target.decoder.parameters(), target.vocabulary.embedding_weight, target.vocabulary.head_weight]
    assert loaded_bytes(Path(target.info.path), 2) == bytes_of(weights)


def test_caches_take_what_is_said_beforehand(target: TargetModel) -> None:
    static = StaticTarget(target, rows=3, capacity=20)
    assert static_cache_bytes(target.info, 3, 20, 2) == bytes_of(tensor for pair in static._cache.buffers.values() for tensor in pair)
    drafter = DFlashConfig.from_target(INFO, config().drafter)
    cache = DrafterCache(drafter, 3, 20, torch.float32, torch.device("cpu"))
    assert DrafterCache.bytes_needed(drafter, 3, 20, 4) == bytes_of(tensor for pair in cache._buffers for tensor in pair)


def test_targets_that_feed_or_judge_a_training_are_in_memory_once_for_each_device(target: TargetModel) -> None:
    weights = loaded_bytes(Path(target.info.path), 2)
    tree: dict[str, Any] = {
        "target": {"model": target.info.path}, "data": {"sources": [{"source": "none.jsonl"}], "max_length": 48}, "evaluation": {"dtype": "bfloat16"},
        "drafter": {"num_layers": 1, "num_taps": 1, "block_size": 4, "mask_token_id": 259},
    }  # fmt: skip

    def parts(**training: Any) -> Counter[str]:
        settings = {"row_length": 48, "num_anchors": 6, "queue_rows": 8, **training}
        return Sizes(parse_config({**tree, "training": settings}), target.info).training(20, 10_000).parts["cuda:0"]

    alone, judged = parts(devices=["cuda:0"]), parts(devices=["cuda:0"], evaluation={"every_steps": 1})
    fed = parts(devices=["cuda:0"], feed="online", target_devices=["cuda:0", "cuda:0"])
    both = parts(devices=["cuda:0"], feed="online", target_devices=["cuda:0"], evaluation={"every_steps": 1})
    spread = parts(devices=["cuda:0"], feed="online", target_devices=["cuda:0+cuda:1"])
    assert "target" not in alone
    assert spread["target"] == weights // 2
    assert judged["evaluation"] > weights
    assert fed["target"] == weights
    assert both["target"] + both["evaluation"] == judged["evaluation"]


def test_each_device_of_a_spread_target_holds_a_share_of_its_weights_and_a_whole_pass(target: TargetModel) -> None:
    def parts(device: str) -> Counter[str]:
        tree = {"target": {"model": target.info.path, "device": device}, "data": {"sources": [{"source": "none.jsonl"}]}}
        drafter = {"num_layers": 1, "num_taps": 1, "block_size": 4, "mask_token_id": 259}
        return Sizes(parse_config({**tree, "drafter": drafter}), target.info).shards().parts["cuda:0"]

    one, spread = parts("cuda:0"), parts("cuda:0+cuda:1")
    assert spread["target"] == one["target"] // 2
    assert spread["a pass of the target"] == one["a pass of the target"]


def test_decoding_takes_more_memory_the_more_requests_are_decoded_together() -> None:
    sizes = Sizes(config(), INFO)
    sizes._loaded["float32"] = 1000
    one, eight = (sizes.decoding(Room(rows, 20, 30, 4), "float32", drafters=1) for rows in (1, 8))
    drafter = sizes.drafter.num_parameters() * 4
    assert eight - drafter - 1000 == 8 * (one - drafter - 1000)
