"""The tracker against a real MLflow server that cannot be reached in the middle of a run."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dflash_core.config import PipelineConfig
from tasks.tracker import Tracker
from tests.waiting import eventually

pytestmark = pytest.mark.slow


class Server:
    """``mlflow server`` with one worker on loopback, over the session's store, behind a door: shut, it answers nobody and keeps nobody waiting."""

    def __init__(self, store_uri: str, artifacts: Path, log: Path):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._kept = socket.socket()  # keeps the door's port while it is shut
        self._kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._kept.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._kept.getsockname()[1]}"
        self._door: socket.socket | None = None
        self._open: list[socket.socket] = []
        self._command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        self._command += ["--backend-store-uri", store_uri, "--artifacts-destination", str(artifacts)]
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, start_new_session=True, env=environment)
        self.let_in()
        assert eventually(lambda: self.answers() or self._process.poll() is not None, 0.2)
        assert self._process.poll() is None, self._log.read_text()

    def let_in(self) -> None:
        door = self._door = socket.socket()
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind(self._kept.getsockname())
        door.listen()
        threading.Thread(target=self._lead_in, args=(door,), daemon=True).start()

    def shut(self) -> None:
        """Let nobody in, and end what is going on."""
        assert self._door is not None
        for connection in (self._door, *self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._open.clear()

    def _lead_in(self, door: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the door is shut
            while True:
                outside, _ = door.accept()
                try:
                    inside = socket.create_connection(("127.0.0.1", self.port))
                except OSError:  # the server has not begun to listen
                    outside.close()
                    continue
                self._open += [outside, inside]
                for one, other in ((outside, inside), (inside, outside)):
                    threading.Thread(target=_pass_on, args=(one, other), daemon=True).start()

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def stop(self) -> None:
        """End the server and its workers."""
        if self._process is not None:
            self.shut()
            self._kept.close()
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


def _pass_on(one: socket.socket, other: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := one.recv(65536):
            other.sendall(data)
        other.shutdown(socket.SHUT_WR)


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
            server.shut()
            for step in range(2, 400):
                record.log_metrics(step, {"loss": 1.0 / step})
            assert not record.flush(0.5)
            server.let_in()
            record.log_metrics(400, {"loss": 0.0})
        assert tracker.complete
        (tmp_path / "note.txt").write_text("kept by the server")
        tracker.log_artifact(tmp_path / "note.txt")
    steps = [item.step for item in tracker.client.get_metric_history(record.run_id, "loss")]
    assert steps == list(range(1, 401))
    assert tracker.client.get_run(record.run_id).info.status == "FINISHED"
    assert [item.path for item in tracker.client.list_artifacts(tracker.run_id)] == ["config.json", "note.txt"]
    assert str(tracker.page()).startswith(f"{server.url}/#/experiments/")
