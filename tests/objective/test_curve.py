"""The reference of ``benchmarks.curve`` belongs to the rows and settings of today."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import curve
from benchmarks.common import Recorder
from benchmarks.curve import REFERENCE, STEPS, check_comparable, plan_for, rows_digest, tail_of, windows
from dflash_core.config import load_config
from dflash_core.plan import Plan
from tests.tiny_run import write_tiny_run


@pytest.mark.slow
def test_the_reference_curve_was_trained_on_the_rows_and_settings_that_a_comparison_would_use_now(tmp_path: Path) -> None:
    reference = json.loads(REFERENCE.read_text())
    plan = plan_for(tmp_path, "cpu", "float32", reference["seed"])
    check_comparable(plan, rows_digest(plan), reference)
    with pytest.raises(ValueError, match="the rows have digest abc"):
        check_comparable(plan, "abc", reference)
    assert len(reference["losses"]) == STEPS
    assert tail_of(reference["losses"]) < 0.7 * windows(reference["losses"])[0]


def test_replicas_are_held_against_one_device_that_takes_the_same_rows_in_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_tiny_run(tmp_path)

    def tiny(workspace: Path, device: str, precision: str, seed: int, *, more: list[str]) -> Plan:
        return Plan(load_config(config, [f"run.workspace={workspace}", "training.log_every=1", *more]))

    monkeypatch.setattr(curve, "plan_for", tiny)
    recorder = Recorder(tmp_path / "results.jsonl", torch.device("cpu"), "abc", dirty=False)
    curve.measure_replicas(recorder, tmp_path / "runs", ["cpu", "cpu"], "float32", 6)
    gap, noise = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert (gap["name"], noise["name"]) == ("multi.curve_2gpu.gap", "multi.curve_2gpu.noise")
    assert gap["detail"]["alone"] > 3
    assert noise["value"] < 1e-4
    assert len(list((tmp_path / "runs" / "stages").glob("train-*"))) == 2
