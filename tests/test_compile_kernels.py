"""No kernel is found on the GPU to be one that does not compile there, or that runs out of registers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ASSEMBLER = Path(sys.modules["triton"].__file__ or "").parent / "backends" / "nvidia" / "bin" / "ptxas"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not ASSEMBLER.exists(), reason="this Triton has no assembler for NVIDIA's GPUs")]


def test_every_kernel_compiles_for_hopper_and_keeps_its_numbers_in_registers() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.compile_kernels", "--most-spilled", "256"]
    finished = subprocess.run(command, cwd=Path(__file__).parents[1], env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-2000:]
    assert finished.stdout.count(" registers ") > 40
