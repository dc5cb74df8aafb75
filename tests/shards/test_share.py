"""Several processes that extract into one folder share the work, and survive each other."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_core.shards.claims import Claims
from tests.shards.test_kill import ENVIRONMENT, ROOT

KILLS = 20


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ``share_child`` has seen."""
    command = [sys.executable, "-m", "tests.shards.share_child", str(tmp_path_factory.mktemp("shared")), str(KILLS)]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_a_machine_that_is_killed_loses_what_it_had_not_sent_and_another_makes_that_and_nothing_else(answer: dict[str, Any]) -> None:
    store = answer["store"]
    assert store["status"] == signal.SIGKILL
    assert 37 <= store["lost"] < 40  # it was in its third shard of 40
    assert store["equal"]
    assert store["again"] == 0


def test_processes_that_share_make_no_shard_twice_and_one_that_is_killed_loses_what_it_has_open_and_nothing_else(answer: dict[str, Any]) -> None:
    assert answer["equal"]
    assert answer["statuses"] == [0, 0]
    assert answer["twice"] == []
    assert answer["shards"] == 40
    assert answer["workers"] >= 2
    assert answer["begun"] <= 40 + 3 * KILLS  # one that the target fills, and those whose last batches are still being written


def test_a_claim_holds_against_other_processes(tmp_path: Path) -> None:
    code = f"import sys; from pathlib import Path; from dflash_core.shards.claims import Claims\nc = Claims(Path({str(tmp_path)!r}))\n"
    claims = Claims(tmp_path)
    assert claims.take(3)
    command = [sys.executable, "-c", code + "print([c.take(n) for n in (2, 3)])"]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert done.stdout == "[True, False]\n"
    claims.close()
