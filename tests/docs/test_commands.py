"""The commands and programs of README and docs work as they stand there, one after the other in one folder, on a tiny target."""

from __future__ import annotations

import contextlib
import glob
import io
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from flows.cli import app
from tests.docs.markdown import blocks
from tests.tiny_run import write_tiny_run

pytestmark = pytest.mark.slow

LISTED: dict[str, dict[str, str]] = yaml.safe_load((Path(__file__).parent / "not_run.yaml").read_text(encoding="utf-8"))
COMMANDS = list(dict.fromkeys(command for block in blocks("bash") for command in block.commands))
PROGRAMS = {block.where: block.text for block in blocks("python")}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory, prefect_url: str) -> Iterator[Path]:
    """A folder in which the files that the commands name are those of a tiny pipeline."""
    folder = tmp_path_factory.mktemp("checkout")
    tiny = write_tiny_run(folder).read_text(encoding="utf-8")
    retraining = tiny.replace("  max_steps: 12\n", "").replace("epochs: 50", "epochs: 2") + f"retrain: {{prompts: [{folder}/prompts.jsonl]}}\n"
    (folder / "configs").mkdir()
    for path, text in {"configs/demo.yaml": tiny, "configs/retrain-demo.yaml": retraining, "mine.yaml": tiny}.items():
        (folder / path).write_text(text.replace("name: tiny", f"name: {Path(path).stem}"), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("DFLASH_SERVICES", os.devnull)
        yield folder


def test_only_commands_that_stand_somewhere_are_listed() -> None:
    assert [command for command in LISTED["commands"] if command not in COMMANDS] == []


@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in LISTED["commands"]])
def test_every_command_works_or_is_listed_with_a_reason(command: str, checkout: Path) -> None:
    status, output = run(instead(command))
    assert status == 0, output


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("dflashctl ")])
def test_commands_and_their_options_exist(command: str) -> None:
    words = shlex.split(command.partition(">")[0])[1:]
    names = words[:2] if words[0] in ("shards", "config") else words[:1]
    helped = CliRunner().invoke(app, [*names, "--help"])
    assert helped.exit_code == 0, f"{command}: there is no such command"
    for option in (word for word in words if word.startswith("--")):
        assert option in helped.output, f"{command}: {option} is not an option"


@pytest.mark.parametrize("where", PROGRAMS)
def test_every_program_runs_or_is_listed_with_a_reason(where: str, checkout: Path) -> None:
    program = PROGRAMS[where]
    if program.splitlines()[0] in LISTED["python"]:
        return
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(instead(program), where, "exec"), {"__name__": "__main__"})


def instead(text: str) -> str:
    """The text with what takes minutes, or a GPU, replaced."""
    for there, here in LISTED["instead"].items():
        text = text.replace(there, here)
    return text


def run(command: str) -> tuple[int, str]:
    """Run a command in this process, which has imported everything already. Returns its status and what it printed."""
    command, _, to = command.partition(" > ")
    words = [found for word in shlex.split(command) for found in (sorted(glob.glob(word)) if "*" in word else [word])]
    if words[0] == "dflashctl":
        result = CliRunner().invoke(app, words[1:])
        status, output = result.exit_code, result.stdout + result.stderr + (f"\n{result.exception!r}" if result.exception else "")
        printed = result.stdout
    elif words[:3] == ["python", "-m", "dflash_core"]:
        status, printed = run_core(words[3:])
        output = printed
    else:
        return 1, "this test does not know how to run it: list it in not_run.yaml, or teach the test"
    if to:
        Path(to).write_text(printed, encoding="utf-8")
    return status, output


def run_core(arguments: list[str]) -> tuple[int, str]:
    from dflash_core.__main__ import main

    stream: Any = io.StringIO()
    with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        status = main(arguments)
    return status, stream.getvalue()
