"""What a run finds done, and what a change asks for again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from dflash_core.pipeline import warm_up
from dflash_core.target import TargetModel, TargetVocabulary
from tests.pipeline.stages import AFTER, missing, plan_of
from tests.target.tiny import save_tiny_target
from tests.tiny_run import ON_DISK, PROMPTS, run_all, write_prompts

pytestmark = pytest.mark.slow


def test_a_second_run_finds_every_stage_and_loads_no_target(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("loaded for nothing")

    monkeypatch.setattr(TargetModel, "from_pretrained", refuse)
    monkeypatch.setattr(TargetVocabulary, "from_pretrained", refuse)
    plan = plan_of(config)
    results = run_all(plan)
    assert [name for name, result in results.items() if not result.cached] == []
    assert warm_up(plan) is None
    assert plan.stage("warm_up").why_not == "not needed, training is done"


@pytest.mark.parametrize(
    ("change", "again"),
    [
        ("data.max_rejected_fraction=0.5", AFTER["responses"]),
        ("data.generation.max_new_tokens=11", AFTER["responses"]),
        ("target.dtype=bfloat16", AFTER["responses"]),
        ("data.max_length=63", AFTER["responses"]),
        ("data.min_response_tokens=3", AFTER["responses"]),
        ("data.heldout_fraction=0.3", AFTER["samples"]),
        ("extraction.samples_per_shard=9", AFTER["shards"]),
        ("extraction.trim=true", AFTER["shards"]),
        ("drafter.tap_layers=[0, 2]", AFTER["shards"]),
        ("drafter.num_layers=2", AFTER["train"]),
        ("objective.weighting=uniform", AFTER["train"]),
        ("training.max_steps=9", AFTER["train"]),
        ("training.devices=[cpu]", AFTER["train"]),
        ("run.seed=2", AFTER["train"]),
        ("evaluation.num_prompts=2", AFTER["evaluate"]),
        ("run.name=renamed", []),
        ("extraction.devices=[cpu, cpu]", []),
        ("extraction.store=memory://shards", []),
        ("training.log_every=3", []),
        ("training.queue_rows=4", []),
        ("training.max_nonfinite_steps=5", []),
        ("training.checkpoint_every=4", []),
        ("tracking.experiment=other", []),
    ],
)
def test_a_changed_setting_asks_for_what_depends_on_it(config: Path, change: str, again: list[str]) -> None:
    plan = plan_of(config, change)
    assert missing(plan) == again
    assert all("no result for these settings" in (plan.stage(name).why_not or "") for name in again)


def test_runs_of_before_there_were_windows_are_still_found(config: Path) -> None:
    assert not {"sliding_window", "full_attention_layers"} & plan_of(config)._train_depends_on()["drafter"].keys()
    assert plan_of(config, "drafter.sliding_window=64").key("train") != plan_of(config).key("train")


def test_shards_depend_on_the_window_where_they_are_trimmed_for_it_and_not_otherwise(config: Path) -> None:
    assert "trim" not in plan_of(config)._shards_depends_on()["extraction"]  # runs of before there was trimming are still found
    trim, window = "extraction.trim=true", "drafter.sliding_window=8"
    keys = [plan_of(config, trim, *changes).key("shards") for changes in ((), (window,), ("drafter.sliding_window=9",))]
    assert len({plan_of(config).key("shards"), *keys}) == 4
    two_layers = ("drafter.num_layers=2", "drafter.num_taps=2")
    assert plan_of(config, trim, window, *two_layers, "drafter.full_attention_layers=[1]").key("shards") == plan_of(config, trim).key("shards")
    assert plan_of(config, window).key("shards") == plan_of(config).key("shards")


def test_what_is_about_disks_asks_for_nothing_again_where_targets_feed_the_training(config: Path) -> None:
    online = "training.feed=online"
    changes = ("extraction.store=memory://shards", "extraction.samples_per_shard=9", "extraction.devices=[cpu, cpu]", "extraction.trim=true")
    assert {plan_of(config, online, change).key("train") for change in changes} == {plan_of(config, online).key("train")}
    assert plan_of(config, online, "extraction.batch_tokens=1").key("train") != plan_of(config, online).key("train")


@pytest.mark.parametrize(
    ("change", "again"),
    [("data.heldout_fraction=0.3", AFTER["samples"]), ("drafter.tap_layers=[1, 2]", AFTER["shards"]), ("drafter.sliding_window=8", AFTER["train"])],
)
def test_a_run_with_a_changed_setting_does_that_and_going_back_finds_the_old_results(config: Path, change: str, again: list[str]) -> None:
    plan = plan_of(config, change)
    assert [name for name, result in run_all(plan).items() if not result.cached] == again
    assert missing(plan) == missing(plan_of(config)) == []


def test_a_seed_matters_to_responses_only_where_they_are_sampled(config: Path) -> None:
    sampled = "data.generation.temperature=0.7"
    assert plan_of(config, sampled).key("responses") != plan_of(config, sampled, "run.seed=2").key("responses")
    assert plan_of(config).key("responses") == plan_of(config, "run.seed=2").key("responses")


def test_other_prompts_in_the_same_file_run_all_but_the_target_again(config: Path) -> None:
    prompts = config.parent / "prompts.jsonl"
    before = prompts.read_bytes()
    write_prompts(prompts, PROMPTS - 1)
    try:
        results = run_all(plan_of(config))
    finally:
        prompts.write_bytes(before)
    assert [name for name, result in results.items() if not result.cached] == AFTER["responses"]
    assert results["samples"].manifest.counts["conversations"] == PROMPTS - 1
    assert missing(plan_of(config)) == []


def test_other_weights_in_the_same_folder_run_everything_again_and_the_old_ones_find_the_old_results(config: Path, tmp_path: Path) -> None:
    target = config.parent / "target"
    shutil.copytree(target, tmp_path / "old")
    save_tiny_target("llama", target, seed=9, num_hidden_layers=6)
    try:
        plan = plan_of(config)
        assert plan.stage("target").why_not == "the target's files have changed"
        results = run_all(plan)
    finally:
        shutil.copytree(tmp_path / "old", target, dirs_exist_ok=True)
    assert not any(result.cached for result in results.values())
    assert missing(plan_of(config)) == ["target"]
    assert [name for name, result in run_all(plan_of(config)).items() if not result.cached] == ["target"]


def test_another_chat_template_is_noticed_as_a_change_of_the_target(config: Path) -> None:
    path = config.parent / "target" / "chat_template.jinja"
    path = path if path.exists() else config.parent / "target" / "tokenizer_config.json"
    before = path.read_text()
    path.write_text(before.replace("<|end|>", "<|end|> ", 1))
    try:
        assert missing(plan_of(config)) == list(ON_DISK)
        assert plan_of(config).stage("target").why_not == "the target's files have changed"
    finally:
        path.write_text(before)
    assert missing(plan_of(config)) == []


def test_a_renamed_target_is_the_same_target(config: Path, tmp_path: Path) -> None:
    shutil.copytree(config.parent / "target", tmp_path / "renamed")
    plan = plan_of(config, f"target.model={tmp_path / 'renamed'}")
    assert missing(plan) == ["target", "export"]
    exported = run_all(plan)["export"].folder / "drafter" / "config.json"
    assert "renamed" in exported.read_text()
