"""Which process and which code a run comes from, and what becomes of runs whose process is gone."""

from __future__ import annotations

import getpass
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import psutil


def settle_dead_runs(client: Any, experiment_id: str) -> None:
    """Set runs to KILLED whose process on this machine is gone without having said so."""
    where = f"attributes.status = 'RUNNING' and tags.`dflash.host` = '{socket.gethostname()}'"
    for run in client.search_runs([experiment_id], where):
        if not _alive(run.data.tags.get("dflash.process", "")):
            client.set_terminated(run.info.run_id, "KILLED")


def process_tags() -> dict[str, str]:
    """Tags that name this process and its user."""
    process = psutil.Process()
    return {
        "mlflow.user": _user(),
        "mlflow.source.name": "dflashctl",
        "dflash.host": socket.gethostname(),
        "dflash.process": f"{process.pid}@{process.create_time():.0f}",  # ids are used again, starting times tell them apart
    }


def git_tags() -> dict[str, str]:
    """Commit and branch of the code, where it runs from a checkout."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, timeout=5, check=True).stdout.strip()

    try:
        return {"mlflow.source.git.commit": git("rev-parse", "HEAD"), "mlflow.source.git.branch": git("rev-parse", "--abbrev-ref", "HEAD")}
    except (OSError, subprocess.SubprocessError):
        return {}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # containers run as users that have no name
        return str(os.getuid())


def _alive(process: str) -> bool:
    pid, _, started = process.partition("@")
    try:
        return abs(psutil.Process(int(pid)).create_time() - float(started)) < 2
    except (psutil.Error, ValueError):
        return False
