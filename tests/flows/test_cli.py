"""``dflashctl``: what it prints and with which status it ends."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dflash_core.config import load_config
from dflash_core.errors import ShardError
from flows.cli import app, told
from flows.console import PlainConsole

ROOT = Path(__file__).parent.parent.parent
MINIMAL = str(ROOT / "configs" / "valid" / "minimal.yaml")
COMMANDS = [
    "run",
    "retrain",
    "plan",
    "validate",
    "evaluate",
    "compare",
    "export",
    "import",
    "doctor",
    "up",
    "down",
    "status",
    "deploy",
    "submit",
    "shards",
    "config",
]
BAD = str(ROOT / "configs" / "invalid" / "drafter-misspelt.yaml")


def dflashctl(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def test_help_of_every_command_fits_a_screen() -> None:
    for command in (["--help"], *([name, "--help"] for name in COMMANDS)):
        status, output, _ = dflashctl(*command)
        assert status == 0
        assert len(output.splitlines()) <= 30


def test_the_version_is_that_of_the_distribution() -> None:
    assert dflashctl("--version") == (0, f"dflashctl {version('dflash-pipeline')}\n", "")


def test_validate_accepts_a_good_config_and_names_its_digest() -> None:
    status, output, _ = dflashctl("validate", MINIMAL)
    assert status == 0
    assert load_config(MINIMAL).digest[:12] in output


def test_validate_refuses_a_bad_config_with_path_value_and_remedy_and_status_2() -> None:
    status, output, errors = dflashctl("validate", BAD)
    assert (status, output) == (2, "")
    assert "drafter.blocksize = 8" in errors
    assert "Did you mean 'block_size'?" in errors
    assert "Traceback" not in errors


def test_the_configuration_of_a_retraining_is_known_by_its_section_and_is_not_one_of_a_run() -> None:
    weekly = str(ROOT / "configs" / "retrain-demo.yaml")
    assert dflashctl("validate", weekly)[0] == 0
    status, _, errors = dflashctl("validate", weekly, "--set", "retrain.margins=0.1")
    assert (status, "Did you mean 'margin'?" in errors) == (2, True)
    status, _, errors = dflashctl("export", weekly)
    assert status == 2
    assert "retrain = " in errors
    status, _, errors = dflashctl("retrain", MINIMAL)
    assert (status, "retrain = None: is required" in errors) == (2, True)


def test_overrides_are_repeatable_and_checked() -> None:
    status, output, _ = dflashctl("validate", MINIMAL, "--set", "run.name=other", "--set", "training.epochs=3")
    assert status == 0
    assert "run 'other'" in output
    status, _, errors = dflashctl("validate", MINIMAL, "--set", "training.epochs=0")
    assert status == 2
    assert "training.epochs = 0" in errors


def test_a_missing_argument_or_an_unknown_command_is_bad_input() -> None:
    assert dflashctl("validate")[0] == 2
    assert dflashctl("no-such-command")[0] == 2


@pytest.mark.parametrize(
    "error", [ShardError("shard 3 is damaged"), OSError(errno.ENOSPC, "No space left on device", "workspace"), KeyboardInterrupt()]
)
def test_failures_and_interrupts_are_told_without_a_traceback(error: BaseException, capsys: pytest.CaptureFixture[str]) -> None:
    import typer

    def command() -> None:
        raise error

    with pytest.raises(typer.Exit) as caught:
        told(command)()
    expected = {
        "OSError": (1, "OSError: No space left on device: workspace\n"),
        "ShardError": (1, "ShardError: shard 3 is damaged\n"),
        "KeyboardInterrupt": (130, "Interrupted. The same command goes on from here.\n"),
    }
    assert (caught.value.exit_code, capsys.readouterr().err) == expected[type(error).__name__]


def test_a_bug_is_not_hidden() -> None:
    def command() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        told(command)()


def test_annotate_prints_a_config_that_loads_back(tmp_path: Path) -> None:
    status, output, _ = dflashctl("config", "annotate", MINIMAL, "--set", "training.epochs=3")
    (tmp_path / "annotated.yaml").write_text(output)
    assert status == 0
    assert load_config(tmp_path / "annotated.yaml") == load_config(MINIMAL, ["training.epochs=3"])


@pytest.mark.parametrize("state", ['{"prefect": {"na', '{"prefect": {"port": 4200}}', "[]"])
def test_a_damaged_state_of_the_services_is_as_none(tmp_path: Path, state: str) -> None:
    (tmp_path / "services.json").write_text(state)
    status, output, _ = dflashctl("status", "--folder", str(tmp_path))
    assert (status, output.count("not running")) == (1, 3)
    assert dflashctl("down", "--folder", str(tmp_path))[0] == 0
    assert not (tmp_path / "services.json").exists()


def test_verify_of_a_folder_without_shards_fails_with_status_1(tmp_path: Path) -> None:
    status, _, errors = dflashctl("shards", "verify", str(tmp_path))
    assert status == 1
    assert "card.json" in errors


def test_validate_needs_neither_torch_nor_prefect_nor_mlflow() -> None:
    code = (
        "import sys; sys.argv = ['dflashctl', 'validate', sys.argv[1]]\n"
        "from flows.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'transformers', 'prefect', 'mlflow', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code, MINIMAL], check=True, cwd=ROOT)


def test_the_module_runs_as_a_program_and_passes_its_status_on() -> None:
    finished = subprocess.run([sys.executable, "-m", "flows.cli", "validate", BAD], capture_output=True, text=True, cwd=ROOT, check=False)
    assert finished.returncode == 2
    assert finished.stderr.startswith(f"{BAD}: 1 problem")


def test_the_console_keeps_the_last_acceptance_length_beside_the_metrics_of_later_steps() -> None:
    stream = io.StringIO()
    console = PlainConsole(stream)
    console.begin("train")
    for step, metrics in ((4, {"loss": 2.5}), (4, {"eval/acceptance_length": 1.5}), (5, {"loss": 2.25})):
        console.metrics("train", step, metrics)
    console.end("train", "done")
    assert stream.getvalue().splitlines()[-1] == "train: done  loss 2.375 (mean of 2 steps), acceptance length 1.50"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_gone_ends_a_command_without_a_word(unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "flows.cli", "validate", MINIMAL]
    finished = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ | {"PYTHONUNBUFFERED": unbuffered}, check=False
    )
    os.close(writer)
    assert (finished.returncode, finished.stderr) == (1, "")


def test_a_reader_that_has_gone_does_not_end_a_run() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1, encoding="utf-8") as stream:
        console = PlainConsole(stream)
        console.begin("train")
        console.end("train", "done")
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)  # what is left in the buffer can be written when it is closed


@pytest.mark.parametrize("command", [["validate"], ["run"], ["plan"], ["retrain"], ["config", "annotate"]], ids=" ".join)
def test_a_configuration_that_is_not_there_is_named_with_the_nearest_that_is(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "demo.yaml").touch()
    status, _, errors = dflashctl(*command, str(tmp_path / "demmo.yaml"))
    assert status == 2
    assert errors == (
        f"{tmp_path}/demmo.yaml: 1 problem\n  (file) = '{tmp_path}/demmo.yaml': there is no such file. Did you mean {tmp_path}/demo.yaml?\n"
    )
