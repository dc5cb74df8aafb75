"""The comparison of losses trains each on the same shards, and its table says what the newest results are."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.losses import IN_WORDS, LOSSES, ROOT, plan_for, table


@pytest.mark.slow
def test_all_losses_share_the_shards_and_none_the_training(tmp_path: Path) -> None:
    options = Namespace(workspace=tmp_path, config=ROOT / "configs" / "demo.yaml", steps=10, prompts=4, overrides=["training.row_length=544"])
    plans = [plan_for(options, "cpu", loss, "float32") for loss in LOSSES]
    assert len({plan.key("shards") for plan in plans}) == 1
    assert len({plan.key("train") for plan in plans}) == len(LOSSES)
    assert set(IN_WORDS) == set(LOSSES)


def test_the_table_has_one_row_for_the_newest_result_of_each_loss_precision_and_device(tmp_path: Path) -> None:
    detail = {"interval": [1.2, 1.5], "pooled": 1.3, "per_position": [0.31, 0.1], "ms_a_step": 1000.2, "steps": 160}
    lines = [
        {"name": name, "value": value, "gpu": gpu, "detail": detail}
        for name, value, gpu in (
            ("losses.decay.float32.acceptance", 1.1, "cpu"),
            ("losses.decay.float32.acceptance", 1.35, "cpu"),
            ("losses.half_dpace.bfloat16.acceptance", 2.5, "NVIDIA H200"),
        )
    ]
    path = tmp_path / "results.jsonl"
    path.write_text("\n".join(map(json.dumps, [*lines, {"name": "step.bf16.1x2048", "value": 1.0, "gpu": "cpu", "detail": {}}])))
    heading, _, *rows = table(path).splitlines()
    assert rows == [
        "| cross-entropy, decay | float32 | 1.35 (1.20–1.50) | 1.30 | 31% | 1000 | cpu, 160 steps |",
        "| half and half, D-PACE | bfloat16 | 2.50 (1.20–1.50) | 1.30 | 31% | 1000 | NVIDIA H200, 160 steps |",
    ]
    assert heading.count("|") == rows[0].count("|")
