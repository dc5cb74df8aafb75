"""``dflashctl run`` that is interrupted or killed in the middle of training, and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_core.config import load_config
from tasks.store import open_client

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
STEPS = 24
LONG = ["--set", f"training.max_steps={STEPS}", "--set", "training.checkpoint_every=5", "--set", "training.epochs=200"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, write_run: Callable[[Path], Path]) -> Path:
    return write_run(tmp_path_factory.mktemp("interrupt"))


def run(config: Path, *runs: dict[str, Any]) -> list[dict[str, Any]]:
    """Run commands one after the other; see ``forked_runs``."""
    alone = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    command = [sys.executable, "-m", "tests.flows.forked_runs", str(config), json.dumps(runs)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=alone, check=False)
    assert done.returncode == 0, done.stderr
    lives: list[dict[str, Any]] = json.loads(done.stdout)
    return lives


def stored_runs(config: Path) -> dict[str, Any]:
    """MLflow's runs by stage, the parent as ``parent``; there is one of each."""
    client, _ = open_client(load_config(config))
    runs = client.search_runs([client.get_experiment_by_name("dflash").experiment_id])
    assert len({run.data.tags.get("dflash.stage", "parent") for run in runs}) == len(runs)
    return {run.data.tags.get("dflash.stage", "parent"): run for run in runs}


def final_weights(workspace: Path) -> bytes:
    (path,) = (workspace / "stages").glob("train-*/final/model.safetensors")
    return path.read_bytes()


def test_an_interrupted_and_a_killed_run_go_on_in_the_same_mlflow_run_repeat_no_step_and_end_with_the_weights_of_an_undisturbed_one(
    config: Path, prefect_url: str, tmp_path: Path
) -> None:
    command = ["run", str(config), *LONG]
    interrupted, killed, finished, undisturbed = run(
        config,
        {"arguments": command, "signal": signal.SIGINT, "step": 7, "server": prefect_url},
        {"arguments": command, "signal": signal.SIGKILL, "step": 14},  # with a temporary server of its own, which ends too
        {"arguments": command, "server": prefect_url},
        {"arguments": ["core", "train", str(config), *LONG, "--set", f"run.workspace={tmp_path}"]},
    )
    assert interrupted["status"] == 130
    assert "Interrupted. The same command goes on from here." in interrupted["errors"]
    assert "Traceback" not in interrupted["errors"]
    assert {name: interrupted["mlflow"][name] for name in ("parent", "train", "shards")} == {
        "parent": "KILLED", "train": "KILLED", "shards": "FINISHED"
    }  # fmt: skip
    assert (killed["status"], killed["left"]) == (-signal.SIGKILL, [])
    assert killed["started"] >= 1
    assert killed["mlflow"]["parent"] == "RUNNING", "a killed process says nothing"
    assert (finished["status"], undisturbed["status"]) == (0, 0), (finished["errors"], undisturbed["errors"])
    (path,) = (config.parent / "workspace" / "runs").glob("*/summary.json")
    summary = json.loads(path.read_text())
    assert {name for name, stage in summary["stages"].items() if stage["cached"]} == {"target", "responses", "samples", "shards"}
    runs = stored_runs(config)
    assert summary["mlflow_run_id"] == runs["parent"].info.run_id
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    assert len(runs) == 9
    client, _ = open_client(load_config(config))
    assert [item.step for item in client.get_metric_history(runs["train"].info.run_id, "loss")] == list(range(1, STEPS + 1))
    assert final_weights(config.parent / "workspace") == final_weights(tmp_path)
