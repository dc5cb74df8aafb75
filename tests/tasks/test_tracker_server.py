"""The tracker against a real MLflow server that goes away in the middle of a run."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dflash_core.config import PipelineConfig
from tasks.tracker import Tracker

pytestmark = pytest.mark.slow


class Server:
    """``mlflow server`` with one worker on loopback, over the session's store."""

    def __init__(self, store_uri: str, artifacts: Path, log: Path):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        self._command += ["--backend-store-uri", store_uri, "--artifacts-destination", str(artifacts)]
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, start_new_session=True, env=environment)
        deadline = time.monotonic() + 120
        while not self.answers():
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.2)

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def stop(self) -> None:
        """End the server and its workers."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@pytest.fixture
def server(store_uri: str, tmp_path: Path) -> Iterator[Server]:
    server = Server(store_uri, tmp_path / "artifacts", tmp_path / "server.log")
    server.start()
    try:
        yield server
    finally:
        server.stop()


def test_a_run_goes_on_while_the_server_is_away_and_everything_arrives_when_it_is_back(
    make_config: Callable[..., PipelineConfig], server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")  # each call fails at once, so that a short absence is a long one
    config = make_config(tracking={"uri": server.url})
    with Tracker.open(config, tmp_path / "run") as tracker:
        with tracker.stage("train") as record:
            record.log_metrics(1, {"loss": 3.0})
            assert record.flush()
            server.stop()
            for step in range(2, 400):
                record.log_metrics(step, {"loss": 1.0 / step})
            assert not record.flush(0.5)
            server.start()
            record.log_metrics(400, {"loss": 0.0})
        assert tracker.complete
        (tmp_path / "note.txt").write_text("kept by the server")
        tracker.log_artifact(tmp_path / "note.txt")
    steps = [item.step for item in tracker.client.get_metric_history(record.run_id, "loss")]
    assert steps == list(range(1, 401))
    assert tracker.client.get_run(record.run_id).info.status == "FINISHED"
    assert [item.path for item in tracker.client.list_artifacts(tracker.run_id)] == ["config.json", "note.txt"]
    assert str(tracker.page()).startswith(f"{server.url}/#/experiments/")
