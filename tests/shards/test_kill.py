from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.shards.fakes import contents, run

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def test_killed_before_any_call_into_the_disk_and_run_again_the_dataset_is_byte_identical(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.shards.kill_child", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["tried"] > 30
    assert result["different"] == []
    assert result["over_and_over"]


def test_killed_from_outside_while_a_shard_is_being_written_the_dataset_is_byte_identical(tmp_path: Path) -> None:
    slow = "import sys, time, pathlib; from tests.shards.fakes import run, hidden_states\n"
    slow += "def target(documents):\n    time.sleep(0.05); return hidden_states(documents)\n"
    slow += "run(pathlib.Path(sys.argv[1]), target=target)"
    folder = tmp_path / "killed"
    process = subprocess.Popen([sys.executable, "-c", slow, str(folder)], cwd=ROOT, env=ENVIRONMENT)
    try:
        deadline = time.monotonic() + 60
        while not (folder / "shard-00000.safetensors").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert (folder / "shard-00000.safetensors").exists()
    assert not (folder / "index.arrow").exists()
    run(folder)
    run(tmp_path / "undisturbed")
    assert contents(folder) == contents(tmp_path / "undisturbed")
