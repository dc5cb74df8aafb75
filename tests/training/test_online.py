"""Training that live targets feed, from prompts to final weights: the outcome of training from shards, and what becomes of targets that fail."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_core import __main__ as core
from dflash_core.config import load_config
from dflash_core.errors import LateCompilationError, TrainingError
from dflash_core.estimate import estimate
from dflash_core.pipeline import run_stage
from dflash_core.plan import ONLINE, Plan
from dflash_core.target import TargetModel
from dflash_core.training import read_metrics
from tests.tiny_run import ON_DISK, STEPS, run_all, write_tiny_run
from tests.training.small import losses, stall_once
from tests.waiting import ended, eventually

ALONE = "extraction.batch_tokens=1"  # each sample in a pass of its own, wherever it is run
ONLINE_ALONE = ["training.feed=online", "training.target_devices=[cpu, cpu]", ALONE]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def from_shards(config: Path) -> Path:
    """The folder of a training from shards."""
    plan = plan_of(config, ALONE)
    return [run_stage(plan, name) for name in ON_DISK[: ON_DISK.index("train") + 1]][-1].folder


def plan_of(config: Path, *changes: str) -> Plan:
    return Plan(load_config(config, changes), str(config))


def online(config: Path, number: int, *changes: str) -> Plan:
    """A training of its own from two targets, which run each sample alone, as they do with ``ALONE``."""
    return plan_of(config, *ONLINE_ALONE[:2], f"extraction.batch_tokens={number}", *changes)


def outcome(folder: Path) -> tuple[list[float], bytes]:
    return losses(folder), (folder / "final" / "model.safetensors").read_bytes()


def plant(monkeypatch: pytest.MonkeyPatch, call: int, fault: Callable[[], object]) -> None:
    """Let the pass number ``call`` of the targets' threads do something else first."""
    original, calls = TargetModel.packed_hidden_states, iter(range(10**6))

    def planted(self: TargetModel, *arguments: Any) -> torch.Tensor:
        if threading.current_thread() is not threading.main_thread() and next(calls) == call:
            fault()
        return original(self, *arguments)

    monkeypatch.setattr(TargetModel, "packed_hidden_states", planted)


def test_training_from_live_targets_is_training_from_shards_bit_for_bit(config: Path, from_shards: Path) -> None:
    plan = plan_of(config, *ONLINE_ALONE)
    assert (plan.stage("shards").why_not, plan.stage("shards").folder) == (ONLINE, None)
    results = run_all(plan)
    assert outcome(results["train"].folder) == outcome(from_shards)
    assert len(list((plan.workspace / "stages").glob("shards-*"))) == 1  # those of the other run
    last = read_metrics(results["train"].folder / "metrics.jsonl")[-1]
    assert last["feed_bottleneck"] == last["data_wait_share"] - last["source_wait_share"]


def test_the_plan_has_no_disk_for_features_and_memory_for_the_targets(config: Path) -> None:
    online, shards = (estimate(plan_of(config, *changes)).stages for changes in (ONLINE_ALONE, [ALONE]))
    assert online["shards"].disk_bytes is None
    assert (online["train"].memory_bytes or 0) > (shards["train"].memory_bytes or 0)


def test_the_core_skips_extraction_and_refuses_it_by_name(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = [word for change in ONLINE_ALONE for word in ("--set", change)]
    assert core.main(["train", str(config), *changes]) == 0
    assert "shards" not in capsys.readouterr().out
    assert core.main(["extract", str(config), *changes]) == 2
    assert "training.feed = 'online': there is nothing to extract" in capsys.readouterr().err


def test_a_dying_target_ends_all_promptly_and_the_same_run_goes_on_to_the_same_weights(
    config: Path, from_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = ["training.checkpoint_every=2", "training.queue_rows=2"]
    folder = online(config, 2).folder("train")

    def die() -> None:
        assert eventually(lambda: list(folder.glob("checkpoints/step-*")))
        raise SystemExit("the target is gone")

    with monkeypatch.context() as patched:
        plant(patched, 16, die)  # of the fifth row or a later one, so that two steps have theirs
        with pytest.raises(SystemExit, match="the target is gone") as caught:
            run_stage(online(config, 2, *changes), "train")
    assert any("In target " in note and "(cpu), while it makes row" in note for note in caught.value.__notes__)
    assert ended("target", "replica")
    steps = [json.loads((path / "state.json").read_text())["state"]["step"] for path in (folder / "checkpoints").iterdir()]
    assert 0 < max(steps) < STEPS
    assert outcome(run_stage(online(config, 2, *changes), "train").folder) == outcome(from_shards)


def test_a_stalled_target_ends_the_run_and_is_named(config: Path, from_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released, stuck = threading.Event(), threading.Event()
    plant(monkeypatch, 12, lambda: (stuck.set(), released.wait()))

    def everybody_waits(who: str) -> bool:
        """For the row that is being made: whoever needs it waits for it, and the other replica waits for that one."""
        steps = re.findall(r"replica \d \(cpu\) waits for the (?:rows of micro-step 0|other replicas) (?:of|in) step (\d+)", who)
        rows = re.findall(r"target \d \(cpu\) makes row (\d+)", who)
        return stuck.is_set() and len(rows) == 1 and steps == [str(int(rows[0]) // 2 + 1)] * 2

    stall_once(monkeypatch, everybody_waits)
    try:
        with pytest.raises(TrainingError, match=r"stall_timeout_s = 0.2 seconds: replica 0 .* waits .*; target \d \(cpu\) makes row \d+, since"):
            run_stage(online(config, 3, "training.stall_timeout_s=300"), "train")
    finally:
        released.set()
    assert ended("target", "replica")


def test_a_target_that_compiles_after_warm_up_is_refused(config: Path, from_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, 12, lambda: torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)))
    with pytest.raises(LateCompilationError, match=r"tried to compile after warm-up, in thread 'target \d \(cpu\)'"):
        run_stage(online(config, 4), "train")
