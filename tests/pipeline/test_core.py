"""``python -m dflash_core``: stages up to a command's own, and its exit status."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_core import __main__ as core
from tests.pipeline.stages import plan_of
from tests.tiny_run import ON_DISK

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("command", "last"),
    [("extract", "shards"), ("train", "train"), ("evaluate", "evaluate")],
)
def test_a_command_of_the_core_runs_the_stages_up_to_its_own(config: Path, capsys: pytest.CaptureFixture[str], command: str, last: str) -> None:
    assert core.main([command, str(config)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("  ")]  # a table of the figures is set in
    assert [line.split(": ")[0] for line in lines] == list(ON_DISK[: ON_DISK.index(last) + 1])
    assert all(": cached" in line for line in lines)


def test_the_core_ends_with_what_came_out_and_tells_errors_by_status(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert core.main(["run", str(config)]) == 0
    told = capsys.readouterr().out
    lines = told.splitlines()
    assert lines[-1] == str(plan_of(config).run_folder / "summary.json")
    assert "lossless: 3 of 3 answers are the target's own, token for token, in float32" in lines
    assert [line.split(":")[0] for line in lines[-5:-1]] == ["lossless", "acceptance length", "speed", "to serve"]
    assert not set("{}[]'") & set(told.replace("target's", "")), "words, and no Python"
    assert core.main(["run", str(config), "--set", "training.max_steps=1000000"]) == 2
    assert str(config) in capsys.readouterr().err
    assert core.main(["run", str(config), "--set", "target.model=./nowhere"]) == 1
    assert "TargetError: target.model = './nowhere'" in capsys.readouterr().err
