"""Compiled code is kept on disk, so that the next start of the same training does not compile again.

    ~/.cache/dflash-pipeline/compiled/<torch>-<triton>-<python>-<devices>/      or under $DFLASH_CACHE
        aotautograd/ fxgraph/ triton/ …                                         what torch and Triton keep there

Dynamo traces again at every start; what it traces is looked up by content: forward and backward graphs in torch's AOT autograd and FX graph
caches, kernels in Triton's. Whoever sets TORCHINDUCTOR_CACHE_DIR or TRITON_CACHE_DIR decides alone. A damaged entry is passed over by torch with a
warning; if compiling fails nevertheless, the folder is put aside and everything is compiled once more.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import torch
import torch._dynamo.utils
from torch._inductor.runtime.cache_dir_utils import default_cache_dir as torch_default
from torch._inductor.utils import clear_caches

from dflash_core.data.packages import default_cache_dir
from dflash_core.errors import DFlashError

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

_INDUCTOR, _TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
_set: dict[str, str] = {}  # what this module has set in the environment of the process


def with_compile_cache(devices: Sequence[torch.device], build: Callable[[], Result]) -> Result:
    """``build()`` with what earlier starts have compiled, and what it compiles kept for later ones.

    Where that fails, and the reason is neither memory nor an error of this project's own, once more without: ``build`` begins anew then.
    """
    folder = _choose_folder(devices)
    if folder is None or not any(folder.iterdir()):
        return build()
    try:
        return build()
    except (DFlashError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        aside = folder.with_name(f"{folder.name}.damaged")
        logger.warning(
            "Warm-up failed with the compiled code of earlier runs (%s: %s). It is put aside, in %s, and everything is compiled once more.",
            type(error).__name__, str(error).partition("\n")[0], aside,
        )  # fmt: skip
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    folder.mkdir()
    torch.compiler.reset()
    clear_caches()
    return build()


def found_graphs() -> int:
    """Graphs that this process has found compiled, forward and backward together counting once."""
    return int(torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"])


def _choose_folder(devices: Sequence[torch.device]) -> Path | None:
    """Point torch and Triton to the folder of these versions and devices; None if the user has pointed them elsewhere."""
    folder = default_cache_dir() / "compiled" / _key(devices)
    for name in (_INDUCTOR, _TRITON):
        # torch sets the first by itself, to its own default, when it compiles
        if os.environ.get(name) not in (None, _set.get(name), torch_default()):
            return None
    folder.mkdir(parents=True, exist_ok=True)
    _set.update({_INDUCTOR: str(folder), _TRITON: str(folder / "triton")})
    os.environ.update(_set)
    return folder


def _key(devices: Sequence[torch.device]) -> str:
    """Versions and devices. The caches look at the code themselves, but not at everything that it was compiled with."""
    names = sorted({torch.cuda.get_device_name(device) if device.type == "cuda" else _processor() for device in devices})
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = "none"
    versions = f"torch{torch.__version__}-triton{triton}-python{platform.python_version()}"
    return f"{versions}-{hashlib.sha256(' '.join(names).encode()).hexdigest()[:12]}"


def _processor() -> str:
    """The CPU's instruction set, which compiled kernels use."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
