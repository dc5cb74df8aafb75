"""Extractions that are killed, alone and when they share a folder, leave what an undisturbed one does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_core.shards.claims import Claims

ROOT = Path(__file__).parents[2]
KILLS = 20


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.shards.kill_child", str(tmp_path_factory.mktemp("killed")), str(KILLS)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_killed_before_any_call_into_the_disk_or_from_outside_and_run_again_the_dataset_is_byte_identical(told: dict[str, Any]) -> None:
    assert told["tried"] > 30
    assert told["different"] == []
    assert told["equal"] == [True, True], "over and over at one folder, and from outside"


def test_processes_that_share_make_no_shard_twice_and_one_that_is_killed_loses_what_it_has_open_and_nothing_else(told: dict[str, Any]) -> None:
    shared = told["shared"]
    assert shared["equal"]
    assert shared["statuses"] == [0, 0]
    assert shared["twice"] == []
    assert shared["shards"] == 40
    assert shared["together"], "the first two were at work at once"
    assert shared["killed"] == KILLS, "each in the middle of a shard"
    assert shared["begun"] <= 40 + 3 * KILLS  # one that the target fills, and those whose last batches are still being written


def test_a_machine_that_is_killed_loses_what_it_had_not_sent_and_another_makes_that_and_nothing_else(told: dict[str, Any]) -> None:
    store = told["shared"]["store"]
    assert store["status"] == signal.SIGKILL
    assert 37 <= store["lost"] < 40  # it was in its third shard of 40
    assert store["equal"]
    assert store["again"] == 0


def test_a_claim_holds_against_other_processes(tmp_path: Path) -> None:
    claims = Claims(tmp_path)
    assert claims.take(3)
    child = os.fork()
    if child == 0:
        try:
            others = Claims(tmp_path)
            os._exit(0 if [others.take(shard) for shard in (2, 3)] == [True, False] else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    claims.close()
