"""The stages of a run: what is found, what is run again and why, and what damage does."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_core import __main__ as core
from dflash_core import runners
from dflash_core.checks import check_schedule
from dflash_core.config import PipelineConfig, load_config
from dflash_core.drafter import DFlashDrafter
from dflash_core.errors import ConfigError, DFlashError, ShardError, TargetError
from dflash_core.estimate import estimate
from dflash_core.evaluation import HeldoutJudge
from dflash_core.pipeline import evaluation_of, run_stage, warm_up
from dflash_core.plan import STAGES, Plan
from dflash_core.stages import Manifest, StageBusyError, atomic_write, stage_lock
from dflash_core.summary import write_summary
from dflash_core.target import TargetModel, TargetVocabulary
from dflash_core.training import read_metrics
from tests.target.tiny import save_tiny_target
from tests.tiny_run import ON_DISK, PROMPTS, STEPS, run_all, write_prompts, write_tiny_run
from tests.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.slow

AFTER = {name: list(ON_DISK[index:]) for index, name in enumerate(ON_DISK)}


@pytest.fixture(scope="module", autouse=True)
def _cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration whose stages are all done. Tests put back what they change."""
    path = write_tiny_run(tmp_path_factory.mktemp("pipeline"))
    run_all(plan_of(path))
    return path


@pytest.fixture
def copy(config: Path, tmp_path: Path) -> Path:
    """A workspace of the same results, to be damaged."""
    for name in ON_DISK:
        folder = plan_of(config).folder(name)
        shutil.copytree(folder, tmp_path / "workspace" / "stages" / folder.name)
    return tmp_path / "workspace"


def plan_of(config: Path, *changes: str) -> Plan:
    return Plan(load_config(config, changes), str(config))


def missing(plan: Plan) -> list[str]:
    """Stages that would be run."""
    return [name for name in ON_DISK if not plan.stage(name).cached]


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


def results_of(workspace: Path, name: str) -> dict[str, bytes]:
    (folder,) = (workspace / "stages").glob(f"{name}-*")
    return {record.path: (folder / record.path).read_bytes() for record in (Manifest.read(folder) or pytest.fail(name)).files}


def delete(path: Path) -> None:
    path.unlink()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("name", "file", "damage"),
    [
        ("target", "target.json", flip),
        ("responses", "conversations.jsonl.gz", delete),
        ("responses", "conversations.jsonl.gz", flip),
        ("responses", "counts.json", cut),
        ("samples", "train.parquet", flip),
        ("samples", "heldout.parquet", delete),
        ("shards", "shard-00002.safetensors", cut),
        ("shards", "index.arrow", flip),
        ("shards", "index/shard-00001.arrow", flip),
        ("shards", "card.json", delete),
        ("train", "final/model.safetensors", flip),
        ("train", "final/model.safetensors", cut),
        ("train", "metrics.jsonl", delete),
        ("evaluate", "evaluation.json", flip),
        ("evaluate", "prompts.jsonl", cut),
        ("export", "drafter/model.safetensors", flip),
        ("export", "drafter/config.json", delete),
    ],
)
def test_a_damaged_file_of_a_finished_stage_is_noticed_named_and_made_anew_as_it_was(
    config: Path, copy: Path, caplog: pytest.LogCaptureFixture, name: str, file: str, damage: Callable[[Path], None]
) -> None:
    def comparable() -> dict[str, bytes]:
        timed = ("prompts.jsonl", "evaluation.json", "metrics.jsonl", "training.json", "README.md")
        return {path: content for path, content in results_of(copy, name).items() if Path(path).name not in timed}

    before = comparable()
    (path,) = (copy / "stages").glob(f"{name}-*/{file}")
    damage(path)
    change = f"run.workspace={copy}"
    assert missing(plan_of(config, change)) == [name]
    reason = plan_of(config, change).stage(name).why_not
    assert reason is not None
    assert file in reason
    with caplog.at_level(logging.WARNING):
        results = run_all(plan_of(config, change))
    assert f"{name} is run: {reason}" in caplog.messages
    assert [key for key, result in results.items() if not result.cached] == [name]
    assert comparable() == before
    assert missing(plan_of(config, change)) == []


def test_of_damaged_shards_only_the_lost_one_is_made_again(config: Path, copy: Path) -> None:
    (folder,) = (copy / "stages").glob("shards-*")
    shards = sorted(folder.glob("shard-*.safetensors"))
    before = [(path.read_bytes(), path.stat().st_mtime_ns) for path in shards]
    shards[1].unlink()
    assert run_stage(plan_of(config, f"run.workspace={copy}"), "shards").cached is False
    after = [(path.read_bytes(), path.stat().st_mtime_ns) for path in shards]
    assert [content for content, _ in after] == [content for content, _ in before]
    assert [index for index, (old, new) in enumerate(zip(before, after, strict=True)) if old != new] == [1]


def test_a_flipped_bit_in_a_shard_is_found_by_training_and_the_remedy_it_names_makes_that_shard_anew(config: Path, copy: Path) -> None:
    (path,) = (copy / "stages").glob("shards-*/shard-00001.safetensors")
    before = path.read_bytes()
    flip(path)
    changes = [f"run.workspace={copy}", "run.seed=3"]
    with pytest.raises(ShardError, match=r"shard-00001.safetensors.*CRC-32.*Delete that file and run the extraction again"):
        run_all(plan_of(config, *changes))
    path.unlink()
    results = run_all(plan_of(config, *changes))
    assert path.read_bytes() == before
    assert results["samples"].cached


def test_lost_weights_come_back_from_the_last_checkpoint_and_checkpoints_may_be_deleted(config: Path, copy: Path) -> None:
    (folder,) = (copy / "stages").glob("train-*")
    weights = folder / "final" / "model.safetensors"
    before = weights.read_bytes()
    weights.unlink()
    steps: list[int] = []
    run_stage(plan_of(config, f"run.workspace={copy}"), "train", on_metrics=lambda step, _: steps.append(step))
    assert weights.read_bytes() == before
    assert steps == []
    shutil.rmtree(folder / "checkpoints")
    assert missing(plan_of(config, f"run.workspace={copy}")) == []


def test_a_folder_that_another_process_works_in_is_left_alone(config: Path, tmp_path: Path) -> None:
    plan = plan_of(config, f"run.workspace={tmp_path}")
    run_stage(plan, "target")
    with stage_lock(plan.folder("responses")), pytest.raises(StageBusyError, match=r"responses-\w+ is being worked on by another process"):
        run_stage(plan, "responses")
    assert not run_stage(plan, "responses").cached
    with stage_lock(plan.folder("responses")):
        assert run_stage(plan, "responses").cached, "what is finished may be read by many"


def test_who_shares_the_extraction_helps_the_process_that_holds_it_and_takes_its_place_when_that_is_gone(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed: list[str] = []
    monkeypatch.setattr(runners, "push", lambda folder, address, progress: pushed.append(address))
    plan = plan_of(config, f"run.workspace={tmp_path}", f"extraction.store=file://{tmp_path}/store")
    for name in ("target", "responses", "samples"):
        run_stage(plan, name)
    with ThreadPoolExecutor(1) as threads:
        with stage_lock(plan.folder("shards")):
            helping = threads.submit(run_stage, plan, "shards", share=True)
            assert eventually((plan.folder("shards") / "index.arrow").exists)
            assert plan.stage("shards").manifest is None
            assert not helping.done()
        assert helping.result(PATIENCE_S).manifest == plan.stage("shards").manifest
    assert len(pushed) == 1, "by whoever holds the stage, and not by those who help"


def test_a_store_gives_the_shards_that_another_workspace_has_put_there(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = f"extraction.store=file://{tmp_path}/store"
    plans = [plan_of(config, f"run.workspace={tmp_path / name}", store) for name in ("one", "other")]
    for name in ("target", "responses", "samples"):
        run_stage(plans[0], name)
        run_stage(plans[1], name)
    made = run_stage(plans[0], "shards")
    monkeypatch.setattr(TargetModel, "packed_hidden_states", None)
    found = run_stage(plans[1], "shards")
    assert found.manifest.counts["digest"] == made.manifest.counts["digest"]
    assert found.manifest.files == made.manifest.files
    assert found.folder != made.folder


def test_what_was_begun_is_said_to_be_resumed(config: Path, tmp_path: Path) -> None:
    plan = plan_of(config, f"run.workspace={tmp_path}")
    assert plan.stage("responses").why_not == "never run"
    run_stage(plan, "target")
    with stage_lock(plan.folder("responses")):
        assert plan.stage("responses").why_not == "never run", "its own folder, made to be locked, is no result of other settings"
    (plan.folder("responses") / "journal.jsonl").touch()
    assert plan.stage("responses").why_not == "begun, will be resumed"


def test_files_that_a_killed_process_left_half_written_are_removed(config: Path, tmp_path: Path) -> None:
    plan = plan_of(config, f"run.workspace={tmp_path}")
    left = plan.folder("target") / "part" / ".weights.1234.tmp"
    left.parent.mkdir(parents=True)
    left.touch()
    run_stage(plan, "target")
    assert not left.exists()


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


def test_estimates_are_guesses_before_the_samples_are_there_and_exact_afterwards(config: Path, tmp_path: Path) -> None:
    before = estimate(plan_of(config, f"run.workspace={tmp_path}")).stages
    assert list(before) == list(STAGES)
    assert before["responses"].rows == f"about {PROMPTS} conversations"
    assert before["samples"].rows.startswith("about ")
    plan = plan_of(config)
    after = estimate(plan).stages
    counts = plan.stage("samples").manifest.counts  # type: ignore[union-attr]
    assert after["responses"].rows == f"{PROMPTS} conversations"
    assert after["samples"].rows == f"{counts['train_tokens']} tokens"
    assert after["shards"].rows == f"{len(list(plan.folder('shards').glob('shard-*.safetensors')))} shards"
    assert after["train"].rows == f"{STEPS} steps of 2 rows"
    assert after["evaluate"].rows == "3 prompts"
    for name in ("responses", "shards"):  # the guesses are of the right size
        assert 0.3 < before[name].disk_bytes / after[name].disk_bytes < 3  # type: ignore[operator]
    features = plan.stage("shards").manifest.counts["bytes"]  # type: ignore[union-attr]
    assert features == pytest.approx(after["shards"].disk_bytes, rel=0.1)
    final = (plan.folder("train") / "final" / "model.safetensors").stat().st_size
    assert after["train"].disk_bytes == pytest.approx(7 * final, rel=0.1)  # with two checkpoints of three times the weights
    assert all((item.seconds or 0.0) >= 0.0 for item in after.values())


def test_no_more_prompts_are_estimated_than_there_are(config: Path) -> None:
    plan = plan_of(config, "evaluation.num_prompts=1000")
    heldout = plan.stage("samples").manifest.counts["heldout"]  # type: ignore[union-attr]
    assert estimate(plan).stages["evaluate"].rows == f"{heldout} prompts"


def test_a_schedule_longer_than_the_data_is_refused_before_extraction_naming_the_file(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = ["extraction.samples_per_shard=7", "training.max_steps=1000000"]
    monkeypatch.setattr(TargetModel, "from_pretrained", lambda *_, **__: pytest.fail("loaded for nothing"))
    for refuse in (
        lambda: run_stage(plan_of(config, *changes), "shards"),
        lambda: estimate(plan_of(config, *changes)),
        lambda: run_stage(plan_of(config, changes[1]), "train"),
        lambda: warm_up(plan_of(config, changes[1])),
    ):
        with pytest.raises(ConfigError, match=rf"^{config}: 1 problem\n  training.max_steps = 1000000: the schedule is longer than the data"):
            refuse()


def test_dflashctl_names_the_file_in_what_the_flow_refuses(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flows import here, train_drafter

    def flow(settings: PipelineConfig) -> Path:
        check_schedule(settings, 1)
        return config

    monkeypatch.setattr(here, "prefect_api", lambda **_: contextlib.nullcontext())
    monkeypatch.setattr(train_drafter, "train_drafter", flow)
    with pytest.raises(ConfigError, match=rf"^{config}: 1 problem\n  training.max_steps = {STEPS}"):
        here.run_here(config, [])


def test_steps_that_are_not_given_are_as_many_as_the_epochs_hold(config: Path) -> None:
    plan = plan_of(config, "training.max_steps=null", "training.epochs=1")
    planned = estimate(plan).stages["train"].rows
    result = run_stage(plan, "train")
    assert planned == f"{result.manifest.counts['steps']} steps of 2 rows"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("data.sources.0.source=gone.jsonl", "data.sources.0.source = 'gone.jsonl': there is no such file"),
        ("drafter.tap_layers=[0, 5]", "drafter.tap_layers"),
        ("data.response_cache=gone.jsonl", "data.response_cache = 'gone.jsonl': there is no such file"),
        ("drafter.initial_checkpoint=FOLDER", "drafter.initial_checkpoint"),
        ("extraction.store=nowhere://xy", "extraction.store = 'nowhere://xy': Protocol not known: nowhere. Use an address that fsspec knows"),
        ("run.workspace=FOLDER/config.json", "run.workspace = "),
        ("run.workspace=FOLDER/config.json/deeper", "run.workspace = "),
        ("training.devices=['cuda:7']", "training.devices.0 = 'cuda:7': there is no such device"),
    ],
)
def test_what_does_not_fit_is_refused_at_once_naming_file_and_field(config: Path, tmp_path: Path, change: str, problem: str) -> None:
    (tmp_path / "config.json").write_text("{}")  # of a drafter whose weights are missing
    with pytest.raises(ConfigError) as caught:
        plan_of(config, change.replace("FOLDER", str(tmp_path)))
    assert str(caught.value).startswith(f"{config}: 1 problem\n  {problem}")


def test_a_target_that_is_not_fetched_yet_leaves_the_other_stages_unknown(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    plan = plan_of(config, "target.model=owner/not-here")
    assert plan.stage("target").why_not == "no result for these settings (results for 1 others are kept)"
    for name in STAGES[1:]:
        stage = plan.stage(name)
        assert (stage.key, stage.folder, stage.why_not) == (None, None, "the target has not been fetched")
    with pytest.raises(TargetError, match="owner/not-here is not here yet"):
        estimate(plan)
    with pytest.raises(DFlashError, match="not known before the stage 'target' has run"):
        plan.folder("samples")


def test_an_evaluation_that_no_memory_holds_is_refused_before_any_work(config: Path) -> None:
    expected = r"evaluation\.batch_sizes\.1 = 1000000000: keys and values of 1000000000 x 8 positions take .* GiB, and cpu has"
    with pytest.raises(ConfigError, match=expected):
        plan_of(config, "evaluation.batch_sizes=[1, 1000000000]")


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere/at/all"])
def test_a_mistyped_path_of_a_target_is_refused_at_once(config: Path, model: str) -> None:
    with pytest.raises(TargetError, match=rf"target.model = '{model}'.*Correct the path"):
        plan_of(config, f"target.model={model}")


def test_a_renamed_target_is_the_same_target(config: Path, tmp_path: Path) -> None:
    shutil.copytree(config.parent / "target", tmp_path / "renamed")
    plan = plan_of(config, f"target.model={tmp_path / 'renamed'}")
    assert missing(plan) == ["target", "export"]
    exported = run_all(plan)["export"].folder / "drafter" / "config.json"
    assert "renamed" in exported.read_text()


def test_a_target_is_loaded_once_for_stages_that_want_the_same_and_let_go_before_training(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Any] = []
    original = TargetModel.from_pretrained.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(TargetModel, "from_pretrained", classmethod(lambda cls, *a, **k: loaded.append(k["dtype"]) or original(cls, *a, **k)))
    plan = plan_of(config, f"run.workspace={tmp_path}")
    run_all(plan)
    assert loaded == [torch.float32, torch.float32]  # for responses and shards; after training for the evaluation


@pytest.mark.parametrize(
    ("command", "last"),
    [("extract", "shards"), ("train", "train"), ("evaluate", "evaluate")],
)
def test_a_command_of_the_core_runs_the_stages_up_to_its_own(config: Path, capsys: pytest.CaptureFixture[str], command: str, last: str) -> None:
    assert core.main([command, str(config)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("  ")]  # a table of the figures is set in
    assert [line.split(": ")[0] for line in lines] == list(ON_DISK[: ON_DISK.index(last) + 1])
    assert all(": cached" in line for line in lines)


def test_the_core_ends_with_the_path_of_the_summary_and_tells_errors_by_status(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert core.main(["run", str(config)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(plan_of(config).run_folder / "summary.json")
    assert core.main(["run", str(config), "--set", "training.max_steps=1000000"]) == 2
    assert str(config) in capsys.readouterr().err
    assert core.main(["run", str(config), "--set", "target.model=./nowhere"]) == 1
    assert "TargetError: target.model = './nowhere'" in capsys.readouterr().err
