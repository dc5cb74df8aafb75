"""SIGKILL in every stage, and again before each stage is marked as finished: what is done is not done again, and nothing comes out differently."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kill_child import moments
from tests.tiny_run import ON_DISK, PROMPTS, STEPS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
TIMED = ("manifest.json", "metrics.jsonl", "state.json", "training.json", "evaluation.json", "prompts.jsonl", "README.md")  # say how long it took


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the workspaces ``calm-R`` and ``killed-R`` for R replicas."""
    folder = tmp_path_factory.mktemp("kills")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DFLASH_CACHE": str(tmp_path_factory.mktemp("cache"))}
    command = [sys.executable, "-m", "tests.kill_child", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(params=[1, 2], ids=["one replica", "two replicas"])
def replicas(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def calm(runs: Path, replicas: int) -> Path:
    return runs / f"calm-{replicas}"


@pytest.fixture
def killed(runs: Path, replicas: int) -> Path:
    return runs / f"killed-{replicas}"


def lives(workspace: Path) -> list[list[str]]:
    """What each process of a workspace has said, one after the other."""
    files = sorted((workspace / "lives").glob("*.txt"), key=lambda path: int(path.stem))
    return [path.read_text().splitlines() for path in files]


def inventories(workspace: Path) -> list[dict[str, list[int]]]:
    """Inode and time of change of every file after the death of each process."""
    return [json.loads((workspace / "lives" / f"{number}.json").read_text()) for number in range(len(lives(workspace)))]


def done(lines: Iterator[str] | list[str]) -> Counter[str]:
    """How often each kind of work was done."""
    return Counter(line.removeprefix("did ") for line in lines if line.startswith("did "))


def files(workspace: Path) -> dict[str, bytes]:
    stages = workspace / "stages"
    return {path.relative_to(stages).as_posix(): path.read_bytes() for path in stages.rglob("*") if path.is_file() and path.name != ".lock"}


def whole_shards(inventory: dict[str, list[int]]) -> list[tuple[str, str]]:
    """The shards of an inventory that have their index rows, which are written last: (shard, index rows)."""
    parts = [path for path in inventory if re.fullmatch(r"shards-[^/]*/index/shard-[0-9]+[.]arrow", path)]
    return [(path.replace("/index/", "/").replace(".arrow", ".safetensors"), path) for path in parts]


def lines_of(workspace: Path, pattern: str) -> list[dict[str, Any]]:
    (path,) = (workspace / "stages").glob(pattern)
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_times(item) for name, item in value.items() if "seconds" not in name}
    return value


def test_the_final_weights_and_every_file_on_the_way_are_those_of_an_undisturbed_run(calm: Path, killed: Path) -> None:
    expected, found = files(calm), files(killed)
    assert sorted(found) == sorted(expected)
    weights = [name for name in expected if name.endswith("final/model.safetensors")]
    assert len(weights) == 1
    assert found[weights[0]] == expected[weights[0]]
    assert [name for name in expected if found[name] != expected[name] and Path(name).name not in TIMED] == []


def test_losses_and_answers_are_those_of_an_undisturbed_run(calm: Path, killed: Path) -> None:
    curves = [[(line["step"], line["loss"]) for line in lines_of(workspace, "train-*/metrics.jsonl")] for workspace in (calm, killed)]
    assert curves[0] == curves[1]
    assert [step for step, _ in curves[0]] == list(range(1, STEPS + 1))
    answers = [[without_times(line) for line in lines_of(workspace, "evaluate-*/prompts.jsonl")] for workspace in (calm, killed)]
    assert answers[0] == answers[1]
    assert len(answers[0]) == 3


def test_no_response_no_shard_and_no_answer_is_made_twice_and_training_goes_back_to_its_checkpoint(calm: Path, killed: Path, replicas: int) -> None:
    calls, expected = done([line for life in lives(killed) for line in life]), done(lives(calm)[0])
    assert calls["append"] == expected["append"] == PROMPTS
    assert calls["measure"] == expected["measure"] == 3
    # It died in the 8th of 12 steps, after the checkpoint of the 5th.
    per_step = 2 // replicas
    assert expected["micro_step"] == STEPS * per_step
    assert calls["micro_step"] == (8 * per_step - 1) + (STEPS - 5) * per_step
    # Only the batches of the shards that were not whole are computed again.
    begun = moments(replicas).index(("give_back", 2))
    assert 2 <= len(whole_shards(inventories(killed)[begun])) < 4
    assert 0 < done(lives(killed)[begun + 1])["packed_hidden_states"] < expected["packed_hidden_states"]


def test_a_finished_stage_is_found_by_every_later_process_and_its_files_are_not_touched(killed: Path) -> None:
    told, seen = lives(killed), inventories(killed)
    for name in ON_DISK:
        states = [line.split()[1] for life in told for line in life if line.startswith(f"{name}: ")]
        first = next(number for number, life in enumerate(told) if any(line.startswith(f"{name}: ") for line in life))
        assert states[0] != "cached"
        assert states[1:] == ["cached"] * (len(told) - 1 - first)
        finished = {path: stat for path, stat in seen[first].items() if path.startswith(f"{name}-")}
        assert any(path.endswith("manifest.json") for path in finished)
        assert {path: stat for path, stat in seen[-1].items() if path.startswith(f"{name}-")} == finished
    assert done(told[-1]) == {"write_json_atomic": 1}  # the summary


def test_what_an_unfinished_stage_has_finished_is_kept_as_it_is(killed: Path, replicas: int) -> None:
    seen, deaths = inventories(killed), moments(replicas)
    at_death = seen[deaths.index(("give_back", 2))]
    assert not any(path.endswith("index.arrow") for path in at_death)
    kept = [path for pair in whole_shards(at_death) for path in pair]
    assert {path: seen[-1][path] for path in kept} == {path: at_death[path] for path in kept}
    begun = seen[deaths.index(("micro_step", 8 * 2 // replicas))]
    assert {path.split("/")[2] for path in begun if "/checkpoints/" in path} == {"step-00000005"}
