"""``plan``, ``evaluate``, ``export``, ``shards verify`` and ``doctor`` on what a run of a tiny target has left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dflash_core import pipeline, runners
from dflash_core.config import load_config
from dflash_core.drafter import save_checkpoint
from dflash_core.plan import STAGES, Plan
from flows.cli import app
from tests.children import environment
from tests.drafter.small import small_drafter
from tests.tiny_run import STEPS, run_all, write_tiny_run

pytestmark = pytest.mark.slow


def dflashctl(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration whose stages are all done."""
    path = write_tiny_run(tmp_path_factory.mktemp("commands"))
    run_all(Plan(load_config(path)))
    return path


def test_plan_of_a_finished_run_says_that_all_is_done(config: Path) -> None:
    status, output, _ = dflashctl("plan", str(config))
    assert status == 0
    assert output.count("cached") == len(STAGES) - 1
    assert "All is done" in output


def test_plan_tells_what_a_changed_setting_runs_again_and_what_it_takes(config: Path) -> None:
    status, output, _ = dflashctl("plan", str(config), "--set", "drafter.num_layers=2")
    states = {line.split()[0]: line for line in output.splitlines() if line.split()[:1] and line.split()[0] in STAGES}
    assert status == 0
    assert [name for name in states if "cached" not in states[name]] == ["warm_up", "train", "evaluate", "export"]
    assert "no result for these settings" in states["train"]
    assert f"{STEPS} steps" in states["train"]
    assert "To do: about" in output


def test_plan_refuses_taps_beyond_the_target(config: Path) -> None:
    status, _, errors = dflashctl("plan", str(config), "--set", "drafter.num_taps=2", "--set", "drafter.tap_layers=[1, 5]")
    assert status == 2
    assert "drafter.tap_layers = [1, 5]" in errors


def test_plan_refuses_an_initial_checkpoint_of_another_shape(config: Path) -> None:
    drafter = pipeline.drafter_folder(Plan(load_config(config)).folder("export"))
    start = f"drafter.initial_checkpoint={drafter}"
    assert dflashctl("plan", str(config), "--set", start)[0] == 0
    status, _, errors = dflashctl("plan", str(config), "--set", start, "--set", "drafter.num_layers=2")
    assert status == 2
    assert "the drafter there has another shape: num_layers is 1, here 2" in errors


def test_plan_writes_nothing(tmp_path: Path) -> None:
    path = write_tiny_run(tmp_path)
    assert dflashctl("plan", str(path))[0] == 0
    assert not (tmp_path / "workspace").exists()


def test_shards_verify_accepts_whole_shards_and_names_a_damaged_one(config: Path) -> None:
    folder = Plan(load_config(config)).folder("shards")
    status, output, _ = dflashctl("shards", "verify", str(folder))
    assert status == 0
    assert "every byte as it was written" in output
    shard = sorted(folder.glob("*.safetensors"))[0]
    content = bytearray(shard.read_bytes())
    content[-100] ^= 1
    shard.write_bytes(content)
    try:
        status, _, errors = dflashctl("shards", "verify", str(folder))
    finally:
        content[-100] ^= 1
        shard.write_bytes(content)
    assert status == 1
    assert shard.name in errors


def test_evaluate_prints_losslessness_and_the_place_of_the_result(config: Path) -> None:
    status, output, _ = dflashctl("evaluate", str(config))
    assert status == 0
    assert "lossless on 100.0% of " in output
    assert json.loads(Path(output.splitlines()[-1]).read_text())["lossless"] == 1.0


def test_evaluate_measures_a_drafter_of_any_folder(config: Path) -> None:
    drafter = pipeline.drafter_folder(Plan(load_config(config)).folder("export"))
    status, output, _ = dflashctl("evaluate", str(config), "--drafter", str(drafter))
    assert status == 0
    assert "/evaluations/" in output.splitlines()[-1]


def test_evaluate_refuses_a_drafter_for_another_target(config: Path, tmp_path: Path) -> None:
    save_checkpoint(small_drafter(), tmp_path)
    status, _, errors = dflashctl("evaluate", str(config), "--drafter", str(tmp_path))
    assert status == 1
    assert f"{tmp_path} is not a drafter for target:" in errors
    assert "config.json: num_target_layers = 8, but target has 6" in errors


def test_evaluate_of_a_folder_that_is_not_there_says_what_else_there_is(config: Path) -> None:
    status, _, errors = dflashctl("evaluate", str(config), "--drafter", "no/such/folder")
    assert status == 2
    assert "drafter = 'no/such/folder': there is no such folder. Name a folder, 'champion' or the number of a version" in errors


def test_compare_measures_two_drafters_on_the_same_prompts_and_draws_them(config: Path, tmp_path: Path) -> None:
    plan = Plan(load_config(config))
    trained, chats = pipeline.drafter_folder(plan.folder("export")), tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"prompt": "Go on"}) + "\n" + json.dumps({"prompt": "And on"}) + "\n")
    save_checkpoint(runners.initial_drafter(plan.config, runners.drafter_config_of(plan), plan.info), tmp_path / "fresh")
    sets = ("--set", f"evaluation.sets=[{{name: chats, source: {chats}}}]")
    status, output, _ = dflashctl("compare", str(tmp_path / "fresh"), str(trained), "--config", str(config), *sets, "--to", str(tmp_path / "both"))
    assert status == 0
    assert [name for name in ("heldout", "chats", "overall") if f"\n {name} " in output] == ["heldout", "chats", "overall"]
    assert "drafter: lossless on 100.0% of the prompts" in output
    comparison = json.loads((tmp_path / "both" / "comparison.json").read_text())
    assert (comparison["first_name"], comparison["second_name"], len(comparison["rows"])) == ("fresh", "drafter", 5)
    assert (tmp_path / "both" / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_compare_measures_no_drafter_unless_both_can_be(config: Path, tmp_path: Path) -> None:
    plan = Plan(load_config(config))
    save_checkpoint(runners.initial_drafter(plan.config, runners.drafter_config_of(plan), plan.info), tmp_path / "other")
    changed = json.loads((tmp_path / "other" / "config.json").read_text()) | {"num_target_layers": 7}
    (tmp_path / "other" / "config.json").write_text(json.dumps(changed))
    trained = str(pipeline.drafter_folder(plan.folder("export")))
    for second, reason in ((tmp_path / "other", "is not a drafter for"), (tmp_path, "expected a drafter's configuration"), ("99", "no such version")):
        status, output, errors = dflashctl("compare", trained, str(second), "--config", str(config))
        assert status in (1, 2)
        assert reason in errors
        assert "evaluate: begins" not in output + errors


def test_compare_takes_evaluations_that_are_there_and_refuses_those_of_other_prompts(config: Path) -> None:
    folder = Plan(load_config(config)).folder("evaluate")
    status, output, _ = dflashctl("compare", str(folder), str(folder / "evaluation.json"))
    assert status == 0
    assert "the same" in output, output
    pipeline.run_stage(plan := Plan(load_config(config, ["evaluation.max_new_tokens=7"])), "evaluate")
    status, _, errors = dflashctl("compare", str(folder), str(plan.folder("evaluate")))
    assert status == 2
    assert "max_new_tokens = 7" in errors
    status, _, errors = dflashctl("compare", str(folder), str(folder.parent))
    assert status == 2
    assert f"second = '{folder.parent}/evaluation.json': holds no evaluation" in errors


def test_evaluate_takes_a_set_that_is_named_after_training(config: Path, tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text(json.dumps({"prompt": "Go on"}) + "\n")
    status, output, _ = dflashctl("evaluate", str(config), "--set", f"evaluation.sets=[{{name: chats, source: {tmp_path}/chats.jsonl}}]")
    assert status == 0
    assert "\n overall " in output


def test_evaluate_before_training_says_what_to_run(config: Path) -> None:
    status, _, errors = dflashctl("evaluate", str(config), "--set", "run.seed=9")
    assert status == 1
    assert f"Run: dflashctl run {config}" in errors


def test_export_copies_the_folder_and_does_not_overwrite(config: Path, tmp_path: Path) -> None:
    status, output, _ = dflashctl("export", str(config), "--to", str(tmp_path / "drafter"))
    assert (status, output.strip()) == (0, str(tmp_path / "drafter"))
    assert (tmp_path / "drafter" / "model.safetensors").is_file()
    status, _, errors = dflashctl("export", str(config), "--to", str(tmp_path / "drafter"))
    assert status == 2
    assert "is there already" in errors


def test_a_place_that_cannot_be_written_is_refused_before_the_work(config: Path, tmp_path: Path) -> None:
    kept, evaluation = tmp_path / "mine.jsonl", str(Plan(load_config(config)).folder("evaluate"))
    kept.write_text("mine")
    for arguments, reason in (
        (("prompts", str(config), str(kept)), f"OUT = '{kept}': is there already"),
        (("prompts", str(config), f"{kept}/out.jsonl"), f"{kept} is not a folder"),
        (("export", str(config), "--to", f"{kept}/drafter"), f"{kept} is not a folder"),
        (("compare", evaluation, evaluation, "--to", str(kept)), f"--to = '{kept}': {kept} is not a folder"),
    ):
        status, output, errors = dflashctl(*arguments)
        assert (status, output) == (2, ""), arguments
        assert reason in errors
    assert kept.read_text() == "mine"


def test_doctor_tells_what_this_machine_has() -> None:
    command = [sys.executable, "-c", "from flows.cli import app; app()", "doctor"]  # what tests leave in a process is no finding
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    for finding in ("torch 2.", "cores", "was compiled on", "available", "free in"):
        assert finding in done.stdout
