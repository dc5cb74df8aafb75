"""``dflashctl up``, ``down`` and ``status``: a Prefect server, an MLflow server and a worker, on this machine alone.

All three listen on loopback and keep data, logs and state in one folder, ``workspace/services``:

    prefect/   mlflow.db   mlflow-artifacts/   logs/   services.json (process ids and addresses)

Every process has the folder in its environment, and so has whatever it starts, flow runs above all. ``down`` finds all of
them by that mark, whoever else has died and however, so nothing is left behind.
"""

from __future__ import annotations

import contextlib
import datetime
import http.client
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from dflash_core.errors import DFlashError
from dflash_core.stages import stage_lock, write_json_atomic
from flows.server import answers, free_port

ROOT = Path(__file__).parent.parent
DEFAULT_FOLDER = Path("workspace/services")
POOL = "dflash"

START_PATIENCE_S = 180.0
RUN_PATIENCE_S = 60.0  # a flow run that is told to end writes a checkpoint and reports
STOP_PATIENCE_S = 15.0

_MARK = "DFLASH_SERVICE_OF"
_STATE = "services.json"
_ORDER = ("prefect", "mlflow", "worker")
_PREFERRED_PORTS = {"prefect": 4200, "mlflow": 5000}
_QUIET = {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "1"}


class ServicesError(DFlashError):
    """The services cannot be started, or are in a state that needs a decision. Says what to do."""


@dataclass(frozen=True)
class Service:
    """A process that ``up`` has started; for the worker, ``url`` is that of the API it works for."""

    name: str
    pid: int
    url: str


def up(folder: Path) -> dict[str, Service]:
    """Start what is needed for deployments and wait until all of it answers; if all runs already, that is all.

    Whatever goes wrong, and however this is interrupted, what was started is stopped again.

    Returns:
        'prefect', 'mlflow' and 'worker'.

    Raises:
        ServicesError: one of them does not start, with the end of its log; or only some are running.
        StageBusyError: another ``up`` or ``down`` of the same folder is at work.
        KeyboardInterrupt: of the user, or told to end.
    """
    folder = folder.resolve()
    with stage_lock(folder):
        running = services(folder)
        if len(running) == len(_ORDER):
            return running
        if marked(folder):
            missing = ", ".join(name for name in _ORDER if name not in running)
            raise ServicesError(f"Processes of {folder} are running, but not: {missing}. Stop the rest (dflashctl down), then start again.")
        with _ended_by_signals():
            try:
                return _start_all(folder)
            except BaseException:
                for number in _SIGNALS:
                    signal.signal(number, signal.SIG_IGN)  # stopping is not interrupted
                _stop_all(folder)
                raise


def down(folder: Path) -> int:
    """Stop all processes of a folder and wait until they have ended; a flow run that goes on saves its work first.

    Returns:
        How many processes there were.

    Raises:
        StageBusyError: another ``up`` or ``down`` of the same folder is at work.
    """
    folder = folder.resolve()
    if not folder.is_dir():
        return 0
    with stage_lock(folder):
        return _stop_all(folder)


def services(folder: Path) -> dict[str, Service]:
    """The services of a folder whose processes are there, by name."""
    known = _read_state(folder)
    pids = {process.pid for process in marked(folder)} if known else set()
    return {name: service for name, service in known.items() if service.pid in pids}


def healthy(service: Service) -> bool:
    """Whether a service answers."""
    if service.name == "prefect":
        return answers(service.url)
    if service.name == "mlflow":
        return _get(f"{service.url}/health") is not None
    return _worker_is_online(service)


def marked(folder: Path) -> list[psutil.Process]:
    """Every living process that belongs to the services of a folder, flow runs included."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # it has just ended, or is another user's
            if process.pid != os.getpid() and process.environ().get(_MARK) == str(folder.resolve()):
                found.append(process)
    return found


def environment(running: dict[str, Service]) -> dict[str, str]:
    """The variables by which Prefect's and MLflow's own commands find the services."""
    variables = {"prefect": "PREFECT_API_URL", "mlflow": "MLFLOW_TRACKING_URI"}
    return {variable: running[name].url for name, variable in variables.items() if name in running}


def use_running_services() -> None:
    """Make this process use the services that ``up`` has started here, where they answer and its environment names no others. Says so."""
    folder = Path(os.environ.get("DFLASH_SERVICES") or DEFAULT_FOLDER)
    found = {name: service for name, service in services(folder).items() if name != "worker" and healthy(service)}
    for variable, url in environment(found).items():
        if variable not in os.environ:
            os.environ[variable] = url
            print(f"{variable}={url} (from dflashctl up)", file=sys.stderr)


def _start_all(folder: Path) -> dict[str, Service]:
    ports = {name: _port(preferred) for name, preferred in _PREFERRED_PORTS.items()}
    api, tracking = f"http://127.0.0.1:{ports['prefect']}/api", f"http://127.0.0.1:{ports['mlflow']}"
    prefect, mlflow = [sys.executable, "-m", "prefect", "--no-prompt"], [sys.executable, "-m", "mlflow"]
    home = {"PREFECT_HOME": str(folder / "prefect")}
    started: dict[str, subprocess.Popen[bytes]] = {}
    state: dict[str, Service] = {}

    def start(name: str, url: str, command: Sequence[str], variables: dict[str, str]) -> None:
        started[name] = _spawn(folder, name, command, variables)
        state[name] = Service(name, started[name].pid, url)
        write_json_atomic(folder / _STATE, {key: asdict(service) for key, service in state.items()})

    start(
        "prefect", api, [*prefect, "server", "start", "--host", "127.0.0.1", "--port", str(ports["prefect"])],
        {**home, "PREFECT_SERVER_UI_API_URL": api, "PREFECT_API_URL": api},
    )  # fmt: skip
    start(
        "mlflow", tracking,
        [
            *mlflow, "server", "--host", "127.0.0.1", "--port", str(ports["mlflow"]), "--workers", "1",
            "--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder / "mlflow-artifacts"),
        ],
        {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
    )  # fmt: skip
    _wait_for(folder, started, state["prefect"])
    start(
        "worker", api, [*prefect, "worker", "start", "--pool", POOL, "--type", "process", "--name", socket.gethostname()],
        {**home, "PREFECT_API_URL": api, "MLFLOW_TRACKING_URI": tracking, "PREFECT_WORKER_QUERY_SECONDS": "3"},
    )  # fmt: skip
    _wait_for(folder, started, state["worker"])
    _wait_for(folder, started, state["mlflow"])
    return state


def _spawn(folder: Path, name: str, command: Sequence[str], variables: dict[str, str]) -> subprocess.Popen[bytes]:
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    inherited = {key: value for key, value in os.environ.items() if key not in ("PREFECT_API_URL", "PREFECT_PROFILE", "MLFLOW_TRACKING_URI")}
    with (folder / "logs" / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**inherited, **_QUIET, **variables, _MARK: str(folder)},
            start_new_session=True,  # Ctrl-C in this terminal, and its end, are not for the services
            preexec_fn=_heed_interrupts,
        )


def _heed_interrupts() -> None:
    """A shell starts what is put into the background with interrupts ignored, which is inherited; a worker is stopped by one."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _wait_for(folder: Path, started: dict[str, subprocess.Popen[bytes]], service: Service) -> None:
    """Wait until a service answers; give up as soon as any of those that were started has ended."""
    deadline = time.monotonic() + START_PATIENCE_S
    while not healthy(service):
        for name, process in started.items():
            if process.poll() is not None:
                raise ServicesError(f"{name} has ended with status {process.returncode}. {_end_of_log(folder, name)}")
        if time.monotonic() > deadline:
            raise ServicesError(f"{service.name} does not answer after {START_PATIENCE_S:.0f} s. {_end_of_log(folder, service.name)}")
        time.sleep(0.3)


def _end_of_log(folder: Path, name: str) -> str:
    path = folder / "logs" / f"{name}.log"
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
    return "\n".join([f"The end of {path}:", *(f"  {line}" for line in lines)])


def _stop_all(folder: Path) -> int:
    """Flow runs first, which save their work and report how they end; then the worker; then the servers; then what is left."""
    pids = {name: service.pid for name, service in _read_state(folder).items()}
    servers = {pids.get("prefect"), pids.get("mlflow")}
    count = len(marked(folder))
    runs = [process for process in marked(folder) if process.pid not in pids.values() and _leads_session(process)]
    _end(runs, signal.SIGTERM, RUN_PATIENCE_S)
    _end([process for process in marked(folder) if process.pid == pids.get("worker")], signal.SIGINT, RUN_PATIENCE_S)
    _wait([process for process in marked(folder) if not _descends_from(process, servers)], RUN_PATIENCE_S)  # the worker has told them
    _end([process for process in marked(folder) if process.pid in servers], signal.SIGTERM, STOP_PATIENCE_S)
    _end(marked(folder), signal.SIGTERM, STOP_PATIENCE_S)
    _end(marked(folder), signal.SIGKILL, STOP_PATIENCE_S)
    (folder / _STATE).unlink(missing_ok=True)
    return count


def _leads_session(process: psutil.Process) -> bool:
    """The services and flow runs do; what flow runs start for themselves does not, and ends with them."""
    try:
        return os.getsid(process.pid) == process.pid
    except OSError:
        return False


def _descends_from(process: psutil.Process, pids: Set[int | None]) -> bool:
    try:
        return any(one.pid in pids for one in [process, *process.parents()])
    except psutil.Error:  # it has just ended
        return True


def _end(processes: Sequence[psutil.Process], number: signal.Signals, patience_s: float) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)
    _wait(processes, patience_s)


def _wait(processes: Sequence[psutil.Process], patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while any(_lives(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.1)


def _lives(process: psutil.Process) -> bool:
    """A process that has ended stays as a zombie where nobody asks for its status, as in a container without an init."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _read_state(folder: Path) -> dict[str, Service]:
    try:
        return {name: Service(**facts) for name, facts in json.loads((folder / _STATE).read_bytes()).items()}
    except (OSError, ValueError, TypeError, AttributeError):  # none, or one that is damaged: what runs is found by its mark
        return {}


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Being told to end, and losing the terminal, are the same as Ctrl-C while inside."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before: dict[signal.Signals, Any] = {number: signal.signal(number, interrupt) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _port(preferred: int) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", preferred))
        except OSError:
            return free_port()
    return preferred


def _worker_is_online(worker: Service) -> bool:
    """Whether this worker, and not one of the same name before it, has told the server that it is there."""
    found = _get(f"{worker.url}/work_pools/{POOL}/workers/filter", b"{}")
    try:
        since = psutil.Process(worker.pid).create_time()
    except psutil.Error:
        return False
    return any(
        item["status"] == "ONLINE" and datetime.datetime.fromisoformat(item["last_heartbeat_time"]).timestamp() >= since
        for item in json.loads(found or b"[]")
    )


def _get(url: str, body: bytes | None = None) -> bytes | None:
    """What is at an address, or None."""
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=5) as response:
            return bytes(response.read())
    except (OSError, http.client.HTTPException):
        return None


def show(folder: Path, running: dict[str, Service]) -> bool:
    """Print each service, then the variables that other commands need. Returns whether all of them answer."""
    states = {name: name in running and healthy(running[name]) for name in _ORDER}
    for name, well in states.items():
        if name in running:
            where = f"pool '{POOL}'" if name == "worker" else running[name].url.removesuffix("/api")
            print(f"{name:<8} {where} (process {running[name].pid}){'' if well else ' does not answer'}")
        else:
            print(f"{name:<8} not running")
    if running:
        print(f"logs     {folder / 'logs'}\n")
        print("\n".join(f"export {variable}={shlex.quote(url)}" for variable, url in environment(running).items()))
    return all(states.values())
