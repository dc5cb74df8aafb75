"""What is estimated and refused before any work is begun."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

from dflash_core.checks import check_schedule
from dflash_core.config import PipelineConfig
from dflash_core.errors import ConfigError, DFlashError, TargetError
from dflash_core.estimate import estimate
from dflash_core.pipeline import run_stage, warm_up
from dflash_core.plan import STAGES
from dflash_core.target import TargetModel
from tests.pipeline.stages import plan_of
from tests.tiny_run import PROMPTS, STEPS

pytestmark = pytest.mark.slow


def test_estimates_are_guesses_before_the_samples_are_there_and_exact_afterwards(config: Path, tmp_path: Path) -> None:
    before = estimate(plan_of(config, f"run.workspace={tmp_path}")).stages
    assert list(before) == list(STAGES)
    assert before["responses"].rows == f"about {PROMPTS} conversations"
    assert before["samples"].rows.startswith("about ")
    plan = plan_of(config)
    after = estimate(plan).stages
    counts = plan.stage("samples").manifest.counts  # type: ignore[union-attr]
    assert after["responses"].rows == f"{PROMPTS} conversations"
    assert after["samples"].rows == f"{counts['train_tokens']:,} tokens"
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
    why_not = plan.stage("target").why_not
    assert why_not is not None
    assert re.fullmatch(r"no result for these settings \(results for \d+ others? are kept\)", why_not)
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
