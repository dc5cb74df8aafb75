"""Processes that tests start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def environment(**variables: str) -> dict[str, str]:
    """This process's own, in which this checkout is found before whatever else packages are found in."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **variables}


def run_interpreted(script: Path) -> None:
    """Run a script that holds kernels against their twins in Triton's interpreter, which a process has from its beginning or not at all."""
    variables = environment(TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    finished = subprocess.run([sys.executable, str(script)], env=variables, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr[-2000:]
    assert finished.stdout.endswith("equal\n")
