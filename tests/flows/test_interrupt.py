"""``dflashctl run`` that is interrupted or killed in the middle of training, and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from dflash_core.config import load_config
from tasks.store import open_client
from tests.tiny_run import write_tiny_run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
STEPS = 60
LONG = ["--set", f"training.max_steps={STEPS}", "--set", "training.checkpoint_every=5", "--set", "training.epochs=200"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_run(tmp_path_factory.mktemp("interrupt"))


def metric_file(config: Path) -> Path | None:
    found = sorted((config.parent / "workspace" / "stages").glob("train-*/metrics.jsonl"))
    return found[0] if found else None


def run_until_step(config: Path, step: int, sign: signal.Signals) -> tuple[int, str]:
    """Start the command, send a signal once training has recorded ``step``; returns (status, what it wrote to stderr). No process is left."""
    command = [sys.executable, "-m", "flows.cli", "run", str(config), *LONG]
    alone = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}  # not with another test's server
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=alone, start_new_session=True
    ) as process:
        assert wait_for_step(process, config, step), "training ended before the signal could be sent"
        started = psutil.Process(process.pid).children(recursive=True)
        assert started, "it starts a temporary Prefect server"
        process.send_signal(sign)
        _, errors = process.communicate(timeout=120)
    deadline = time.monotonic() + 30
    while any(map(lives, started)):
        assert time.monotonic() < deadline, f"left behind: {started}"
        time.sleep(0.1)
    return process.returncode, errors


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for_step(process: subprocess.Popen[str], config: Path, step: int) -> bool:
    while process.poll() is None:
        path = metric_file(config)
        if path is not None and len(path.read_text().splitlines()) >= step:
            return True
        time.sleep(0.02)
    return False


def stored_runs(config: Path) -> dict[str, Any]:
    """MLflow's runs by stage, the parent as ``parent``."""
    client, _ = open_client(load_config(config))
    runs = client.search_runs([client.get_experiment_by_name("dflash").experiment_id])
    assert len({run.data.tags.get("dflash.stage", "parent") for run in runs}) == len(runs)
    return {run.data.tags.get("dflash.stage", "parent"): run for run in runs}


def final_weights(workspace: Path) -> bytes:
    (path,) = (workspace / "stages").glob("train-*/final/model.safetensors")
    return path.read_bytes()


def test_an_interrupted_and_a_killed_run_go_on_in_the_same_mlflow_run_repeat_no_step_and_end_with_the_weights_of_an_undisturbed_one(
    config: Path, prefect_home: Path, tmp_path: Path
) -> None:
    status, errors = run_until_step(config, 7, signal.SIGINT)
    assert status == 130
    assert "Interrupted. The same command goes on from here." in errors
    assert "Traceback" not in errors
    runs = stored_runs(config)
    assert {name: runs[name].info.status for name in ("parent", "train", "shards")} == {"parent": "KILLED", "train": "KILLED", "shards": "FINISHED"}

    assert run_until_step(config, 14, signal.SIGKILL)[0] == -signal.SIGKILL
    assert stored_runs(config)["parent"].info.status == "RUNNING"  # a killed process says nothing

    command = [sys.executable, "-m", "flows.cli", "run", str(config), *LONG]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    summary = json.loads(Path(finished.stdout.splitlines()[-1]).read_text())
    assert {name for name, stage in summary["stages"].items() if stage["cached"]} == {"target", "responses", "samples", "shards"}
    assert summary["mlflow_run_id"] == runs["parent"].info.run_id
    after = stored_runs(config)
    assert {run.info.status for run in after.values()} == {"FINISHED"}
    assert len(after) == 9
    client, _ = open_client(load_config(config))
    assert [item.step for item in client.get_metric_history(runs["train"].info.run_id, "loss")] == list(range(1, STEPS + 1))

    undisturbed = [sys.executable, "-m", "dflash_core", "train", str(config), *LONG, "--set", f"run.workspace={tmp_path}"]
    subprocess.run(undisturbed, capture_output=True, cwd=ROOT, check=True)
    assert final_weights(config.parent / "workspace") == final_weights(tmp_path)
