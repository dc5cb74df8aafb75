"""A temporary Prefect server for a run that has none, started fast and never left behind.

Prefect starts such a server by itself, but imports all of it into the run's own process first, runs services that a
single run has no use for, and leaves it behind when the run is killed. This one starts while the run is still importing,
and ends when its input closes, which the kernel sees to however the run dies.

    with prefect_api():
        train_drafter(config)

``python -m flows.server PORT`` is the server's side.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from dflash_core.errors import DFlashError

logger = logging.getLogger(__name__)

START_PATIENCE_S = 120.0

_SERVER_SETTINGS = {
    "PREFECT_UI_ENABLED": "false",
    "PREFECT_API_BLOCKS_REGISTER_ON_START": "false",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_LATE_RUNS_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_PAUSE_EXPIRATIONS_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_CANCELLATION_CLEANUP_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_FOREMAN_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_REPOSSESSOR_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "false",
    "PREFECT_LOGGING_SERVER_LEVEL": "ERROR",
}


class ServerError(DFlashError):
    """The Prefect server cannot be reached or started."""


class TemporaryServer:
    """A Prefect server of this process alone, on loopback, with Prefect's usual database (``PREFECT_HOME``)."""

    def __init__(self) -> None:
        """Start it; it needs some seconds, which ``wait`` waits for."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}/api"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "flows.server", str(port)],
            stdin=subprocess.PIPE,  # its end is the sign to stop, given by the kernel if need be
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd=Path(__file__).parent.parent,
            env={**os.environ, **_SERVER_SETTINGS},
            start_new_session=True,  # Ctrl-C is for the run, which still has to report how it ended
        )
        self._errors: list[str] = []
        threading.Thread(target=self._collect_errors, daemon=True).start()

    def wait(self) -> None:
        """Wait until it answers. Raises ``ServerError`` if it does not."""
        deadline = time.monotonic() + START_PATIENCE_S
        while not answers(self.url):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise ServerError(
                    f"The temporary Prefect server did not start (status {self._process.returncode}): {self._reason()}\n"
                    "Set PREFECT_API_URL to a running server, or run without Prefect: python -m dflash_core run CONFIG"
                )
            time.sleep(0.1)

    def stop(self) -> None:
        """End it and wait until it has ended."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _reason(self) -> str:
        """The exception in what the server wrote, or the last line of it."""
        named = [line for line in self._errors if re.match(r"[\w.]+(Error|Exception)\b", line)]
        return (named or self._errors or ["it said nothing"])[-1].strip()

    def _collect_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._errors = [*self._errors[-50:], line.decode(errors="replace")]


@contextlib.contextmanager
def prefect_api(meanwhile: Callable[[], object] = lambda: None) -> Iterator[str]:
    """Yield the URL of the Prefect API: the configured one, else that of a temporary server, for this process and its threads.

    Args:
        meanwhile: what this process does while the server starts.

    Raises:
        ServerError: the configured server does not answer, or the temporary one does not start.
    """
    configured = configured_url()
    if configured is not None:
        if not answers(configured):
            raise ServerError(
                f"The Prefect server {configured} does not answer. Start it (prefect server start), "
                "or unset PREFECT_API_URL (and 'prefect config unset PREFECT_API_URL') to run with a temporary one."
            )
        meanwhile()
        yield configured
        return
    server = TemporaryServer()
    try:
        from prefect.settings import PREFECT_API_URL, temporary_settings

        meanwhile()
        server.wait()
        os.environ["PREFECT_API_URL"] = server.url  # for threads and child processes, which do not inherit the context
        with temporary_settings({PREFECT_API_URL: server.url}):
            try:
                yield server.url
            finally:
                _deliver_logs_and_events()
    finally:
        os.environ.pop("PREFECT_API_URL", None)
        server.stop()


def _deliver_logs_and_events() -> None:
    """Prefect sends them in the background and would go on after the server has ended."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    EventsWorker.drain_all(timeout=5)
    APILogWorker.drain_all(timeout=5)


def configured_url() -> str | None:
    """The Prefect API that the environment or the active Prefect profile names."""
    from prefect.settings import PREFECT_API_URL

    return PREFECT_API_URL.value() or None


def answers(url: str) -> bool:
    """Whether a Prefect API at ``url`` is healthy."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=5) as response:
            return bool(response.status == 200)
    except urllib.error.HTTPError as error:
        return error.code in (401, 403)  # it is there and wants a key, which Prefect has
    except (OSError, ValueError, http.client.HTTPException):  # nobody, no address, or somebody who does not speak HTTP
        return False


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve(port: int) -> None:
    """Serve the Prefect API on loopback until standard input closes."""
    import uvicorn
    from prefect.server.api.server import create_app

    server = uvicorn.Server(uvicorn.Config(create_app, factory=True, host="127.0.0.1", port=port, log_level="error", timeout_graceful_shutdown=2))

    def stop_at_end_of_input() -> None:
        while os.read(0, 1024):
            pass
        server.should_exit = True
        time.sleep(8)
        os._exit(1)  # it hangs in its shutdown

    threading.Thread(target=stop_at_end_of_input, daemon=True).start()
    server.run()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
