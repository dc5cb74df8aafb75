"""The temporary Prefect server ends with the run, however the run ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from flows.server import ServerError, TemporaryServer, answers, prefect_api

ROOT = Path(__file__).parent.parent.parent


def test_a_configured_server_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.server.configured_url", lambda: "http://127.0.0.1:9/api")
    with pytest.raises(ServerError, match=r"http://127\.0\.0\.1:9/api does not answer.*unset PREFECT_API_URL"), prefect_api():
        pass


def test_a_server_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file where a folder has to be")
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "home"))
    server = TemporaryServer()
    with pytest.raises(ServerError, match=r"did not start \(status [1-9].*unable to open database file"):
        server.wait()


def test_the_server_of_a_killed_run_ends_by_itself(prefect_home: Path) -> None:
    code = """
import time
from flows.server import TemporaryServer
server = TemporaryServer()
print(server._process.pid, flush=True)
server.wait()
print(server.url, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT) as run:
        assert run.stdout is not None
        server = psutil.Process(int(run.stdout.readline()))
        url = run.stdout.readline().strip()
        assert answers(url)
        run.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while server.is_running() and server.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not answers(url)
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE
