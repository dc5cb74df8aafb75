"""What the stages leave for those after them and for the reader."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_core.config import load_config
from dflash_core.drafter import DFlashDrafter
from dflash_core.estimate import estimate
from dflash_core.evaluation import HeldoutJudge
from dflash_core.pipeline import drafter_folder, evaluation_of, run_stage
from dflash_core.stages import atomic_write
from dflash_core.summary import write_summary
from dflash_core.target import TargetModel
from dflash_core.training import read_metrics
from tests.pipeline.stages import AFTER, missing, plan_of
from tests.tiny_run import ON_DISK, STEPS, run_all

pytestmark = pytest.mark.slow


def test_the_summary_has_what_the_run_was_made_for(config: Path) -> None:
    plan = plan_of(config)
    path = write_summary(plan, run_all(plan), mlflow_run_id="abc")
    summary = json.loads(path.read_text())
    assert path == plan.run_folder / "summary.json"
    assert summary["lossless"] == 1.0
    assert set(summary["acceptance_length"]) == {"mean_of_requests", "pooled"}
    assert summary["acceptance_length_untrained"] >= 1.0
    assert summary["speedup"] > 0
    assert all(rate > 0 for rate in summary["tokens_per_second"].values())
    assert list(summary["stages"]) == list(ON_DISK)
    assert all(set(stage) == {"seconds", "cached"} and stage["cached"] for stage in summary["stages"].values())
    assert (summary["mlflow_run_id"], summary["config_digest"]) == ("abc", plan.config.digest)
    assert (Path(summary["export_path"]) / "model.safetensors").is_file()
    assert load_config(path.parent / "config.yaml") == plan.config


def test_the_card_states_the_run_its_drafter_came_from(config: Path) -> None:
    plan = plan_of(config)
    results = run_all(plan)
    card, figures = (drafter_folder(results["export"].folder) / "README.md").read_text(), evaluation_of(results["evaluate"].folder)
    length = figures.trained.acceptance
    for label, value in (
        ("training prompts", "prompts.jsonl (terms not known here)"),
        ("digest of the data", f"`{plan.key('samples')}`"),
        ("digest of the training's settings", f"`{plan.key('train')}`"),
        ("acceptance length", f"{length.mean_of_requests:.2f} (mean of requests), {length.pooled:.2f} (pooled)"),
        ("lossless", "100.0% of the prompts"),
    ):
        assert f"| {label} | {value} |" in card
    assert f"| training | {STEPS} steps of 2 rows of 64 tokens with 8 anchors, decay weighting, learning rate 0.001, cosine" in card
    assert f"| sha256 of the target's weights and configuration | `{plan.info.digest}` |" in card
    assert str(config.parent) not in card


def test_the_weights_that_were_accepted_best_during_training_are_evaluated_and_exported(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure, lengths = HeldoutJudge.measure, iter([1.0, 3.0, 2.5, 2.0])  # as if the first evaluation in training had found the most

    def measured(self: HeldoutJudge, drafter: DFlashDrafter, go_on: Callable[[], bool]) -> dict[str, float]:
        return {**(measure(self, drafter, go_on) or {}), "acceptance_length": next(lengths)}

    monkeypatch.setattr(HeldoutJudge, "measure", measured)
    during = ["training.evaluation.every_steps=4", "training.evaluation.prompts=2", "training.evaluation.max_new_tokens=6"]
    plan = plan_of(config, *during)
    assert missing(plan) == AFTER["train"]
    assert "3 evaluations" in estimate(plan).stages["train"].rows
    target = sum(path.stat().st_size for path in Path(plan.info.path).glob("*.safetensors"))
    assert estimate(plan).stages["train"].memory_bytes - estimate(plan_of(config)).stages["train"].memory_bytes > 0.9 * target  # type: ignore[operator]
    told: list[int] = []
    trained = run_stage(plan, "train", on_metrics=lambda step, metrics: told.append(step) if "eval/acceptance_length" in metrics else None)
    curve = {int(record["step"]): record for record in read_metrics(trained.folder / "evaluations.jsonl")}
    assert sorted(curve) == told
    assert {0, STEPS} <= curve.keys() <= {0, 4, 8, STEPS}  # one that comes while another goes on is left out
    assert {"eval/acceptance_length_pooled", "eval/accepted_slot_3"} <= curve[0].keys()
    assert (curve[0]["eval/acceptance_length"], curve[4]["eval/acceptance_length"]) == (1.0, 3.0)
    assert (trained.manifest.counts["best_acceptance_length"], trained.manifest.counts["best_step"]) == (3.0, 4)
    kept, last = (load_file(trained.folder / name / "model.safetensors") for name in ("best", "final"))
    assert any(not torch.equal(kept[name], last[name]) for name in kept)
    for change, weights in (([], kept), (["training.keep=last"], last)):
        chosen = plan_of(config, *during, *change)
        results = run_all(chosen)
        assert results["train"].cached
        exported = load_file(results["export"].folder / "drafter" / "model.safetensors")
        assert all(torch.equal(tensor, weights[name].bfloat16()) for name, tensor in exported.items())


def test_an_untrained_drafter_that_is_not_measured_is_no_figure(config: Path) -> None:
    plan = plan_of(config, "evaluation.untrained_prompts=0")
    assert json.loads(write_summary(plan, run_all(plan)).read_text())["acceptance_length_untrained"] is None


def test_sets_are_measured_beside_the_heldout_prompts_and_train_nothing_again_unless_they_are_in_the_data(config: Path, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    turns = [{"role": role, "content": text} for role, text in (("user", "Go on"), ("assistant", ""), ("user", "And on"))]
    chats.write_text(json.dumps({"messages": turns}) + "\n")
    change = f"evaluation.sets=[{{name: chats, source: {chats}}}]"
    results = run_all(plan_of(config, change))
    counts = results["evaluate"].manifest.counts
    assert counts["eval/chats/lossless"] == counts["eval/heldout/lossless"] == 1.0
    assert evaluation_of(results["evaluate"].folder).sets["chats"].prompts == 2
    assert [name for name, result in results.items() if not result.cached] == ["samples", "evaluate", "export"]
    assert missing(plan_of(config, change)) == []
    chats.write_text(json.dumps({"prompt": "Go on"}) + "\n")
    run_stage(plan_of(config, change), "samples")
    assert missing(plan_of(config, change)) == AFTER["evaluate"]
    prompts = [json.loads(line)["prompt"] for line in (config.parent / "prompts.jsonl").read_text().splitlines()]
    chats.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts[:3]))
    assert run_stage(plan_of(config, change), "samples").manifest.counts["in_evaluation_sets"] > 0
    assert missing(plan_of(config, change)) == AFTER["shards"]


def test_whoever_may_read_the_folder_may_read_the_exported_weights(config: Path) -> None:
    weights = plan_of(config).folder("export") / "drafter" / "model.safetensors"
    assert stat.S_IMODE(weights.stat().st_mode) == stat.S_IMODE((weights.parent / "config.json").stat().st_mode)


@pytest.mark.parametrize(("of_folder", "of_file"), [(0o755, 0o644), (0o700, 0o600)])
def test_a_file_is_as_readable_as_its_folder(tmp_path: Path, of_folder: int, of_file: int) -> None:
    tmp_path.chmod(of_folder)
    with atomic_write(tmp_path / "file") as temporary:
        temporary.touch(mode=0o600)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == of_file


def test_a_target_is_loaded_once_for_stages_that_want_the_same_and_let_go_before_training(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Any] = []
    original = TargetModel.from_pretrained.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(TargetModel, "from_pretrained", classmethod(lambda cls, *a, **k: loaded.append(k["dtype"]) or original(cls, *a, **k)))
    plan = plan_of(config, f"run.workspace={tmp_path}")
    run_all(plan)
    assert loaded == [torch.float32, torch.float32]  # for responses and shards; after training for the evaluation
