"""Threads, flex_attention and the guard on GPUs."""

import json
from pathlib import Path

import pytest
import torch

from dflash_core.training import DrafterTrainer
from tests.training.small import config, losses, run, warm_up

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("devices", [["cuda:0"], ["cuda:0", "cuda:0"], ["cuda:0", "cuda:1"]])
def test_compiled_replicas_train_in_threads_without_late_compilation_or_growth_of_memory(tmp_path: Path, devices: list[str]) -> None:
    if int(devices[-1][-1]) >= torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    report, session = warm_up(config(devices=devices, max_steps=30, checkpoint_every=10, precision="bfloat16"), tmp_path)
    assert all(device.graphs == 2 for device in report.devices)
    assert DrafterTrainer(session).run().finished
    curve = losses(tmp_path)
    assert curve[-1] < curve[0] - 0.1
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len({line["memory_reserved_0"] for line in lines}) == 1
    assert len({line["memory_retries_0"] for line in lines}) == 1


def test_flex_attention_and_the_dense_mask_give_the_same_losses(tmp_path: Path) -> None:
    run(config(devices=["cuda:0"], accumulation_steps=2, max_steps=4), tmp_path / "gpu")
    run(config(devices=["cpu"], accumulation_steps=2, max_steps=4), tmp_path / "cpu")
    assert losses(tmp_path / "gpu") == pytest.approx(losses(tmp_path / "cpu"), rel=2e-3)


def test_muon_trains_there_as_it_does_on_the_cpu_and_compiles_nothing_late(tmp_path: Path) -> None:
    for device in ("cpu", "cuda:0"):
        assert run(config(devices=[device], optimizer="muon", max_steps=6), tmp_path / device[:3]).finished
    assert losses(tmp_path / "cud") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-2)  # orthogonalised in bfloat16 and in float32
