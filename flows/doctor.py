"""``dflashctl doctor``: what this machine has, found by trying it."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.text import Text

from dflash_core.words import in_bytes
from flows.show import standard_output

_PACKAGES = ("torch", "transformers", "triton", "prefect", "mlflow", "pyarrow", "safetensors")


def examine() -> bool:
    """Print one line for each finding. Returns whether everything that a run needs works."""
    console = standard_output()
    well = True
    for name, check in _CHECKS.items():
        try:
            finding, mark = check(), ("ok", "green")
        except Exception as error:  # whatever is broken on this machine is the finding
            cause = getattr(error, "inner_exception", error)  # of a compiler that torch.compile calls
            lines = str(cause).strip().splitlines() or [""]
            finding, mark, well = f"{type(cause).__name__}: {lines[0]}", ("no", "red"), False
        console.print(Text.assemble(mark, " ", (f"{name:<12}", "bold"), " ", finding))
    print("All that a run needs is here." if well else "A run would fail where it says 'no'.")
    return well


def _packages() -> str:
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} is not installed")
    return ", ".join(found)


def _python() -> str:
    return f"{platform.python_version()} on {platform.system()} {platform.machine()}"


def _processor() -> str:
    import torch

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{usable} cores, torch uses {torch.get_num_threads()} threads; bfloat16 is {'fast' if _fast_bfloat16() else 'slow: use float32'} here"


def _fast_bfloat16() -> bool:
    """Whether a bfloat16 matrix product is at least as fast as a float32 one."""
    import torch

    def seconds(dtype: torch.dtype) -> float:
        a = torch.randn(512, 512).to(dtype)
        best = float("inf")
        for _ in range(4):
            start = time.perf_counter()
            a @ a
            best = min(best, time.perf_counter() - start)
        return best

    return seconds(torch.bfloat16) <= 1.2 * seconds(torch.float32)


def _gpus() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none: the demo and tests run on the CPU, real drafters need a GPU"
    names = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        a = torch.ones(256, 256, device=f"cuda:{index}", dtype=torch.bfloat16)
        assert float((a @ a)[0, 0]) == 256.0, f"cuda:{index} computes wrongly"
        names.append(f"cuda:{index} {torch.cuda.get_device_name(index)}, {in_bytes(free)} of {in_bytes(total)} free")
    return "; ".join(names)


def _compilation() -> str:
    """Compile a function forward and backward where training would compile, and compare it with its plain twin."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"

    def gate(x: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.silu(x) * x).sum()

    start = time.perf_counter()
    plain = torch.linspace(-1, 1, 64, device=device, requires_grad=True)
    compiled = plain.detach().clone().requires_grad_()
    gate(plain).backward()
    torch.compile(gate)(compiled).backward()
    assert plain.grad is not None
    torch.testing.assert_close(compiled.grad, plain.grad)
    return f"a function was compiled on {device}, forward and backward, in {time.perf_counter() - start:.1f} s"


def _memory() -> str:
    import psutil

    memory = psutil.virtual_memory()
    return f"{in_bytes(memory.available)} of {in_bytes(memory.total)} available"


def _disk() -> str:
    usage = shutil.disk_usage(Path.cwd())
    return f"{in_bytes(usage.free)} of {in_bytes(usage.total)} free in {Path.cwd()}"


def _prefect() -> str:
    from flows.server import answers, configured_url

    url = configured_url()
    if url is None:
        return "no server is configured: runs start a temporary one"
    if not answers(url):
        raise ConnectionError(f"{url} does not answer; start it or unset PREFECT_API_URL")
    return f"{url} answers"


_CHECKS: dict[str, Callable[[], str]] = {
    "python": _python,
    "packages": _packages,
    "processor": _processor,
    "gpus": _gpus,
    "compilation": _compilation,
    "memory": _memory,
    "disk": _disk,
    "prefect": _prefect,
}
