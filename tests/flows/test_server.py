"""A Prefect server that is not there or cannot start. That a temporary one ends with its run, killed or not, is in ``test_interrupt``."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from flows.server import ServerError, TemporaryServer, answers, prefect_api

ROOT = Path(__file__).parent.parent.parent


def test_a_configured_server_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.server.configured_url", lambda: "http://127.0.0.1:9/api")
    with pytest.raises(ServerError, match=r"http://127\.0\.0\.1:9/api does not answer.*unset PREFECT_API_URL"), prefect_api():
        pass


def test_somebody_else_at_the_address_and_a_wrong_address_are_no_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=_greet_and_hang_up, args=(other,)).start()
        assert not answers(f"http://127.0.0.1:{other.getsockname()[1]}/api")
    assert not answers("127.0.0.1/api")
    assert not answers("http://host:port/api")


def _greet_and_hang_up(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        connection.recv(1000)
        connection.sendall(b"SSH-2.0-somebody\r\n")


def test_a_server_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file where a folder has to be")
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "home"))
    server = TemporaryServer()
    with pytest.raises(ServerError, match=r"did not start \(status [1-9].*unable to open database file"):
        server.wait()
