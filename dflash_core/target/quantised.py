"""Targets whose weights are stored quantised: what their config.json says of it, and what it takes to run them.

Transformers loads them by the ``quantization_config`` of the checkpoint; nothing is quantised here.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_PACKAGES: dict[str, tuple[str, ...]] = {
    "aqlm": ("aqlm",),
    "auto-round": ("auto_round",),
    "awq": ("gptqmodel",),
    "bitsandbytes": ("bitsandbytes",),
    "compressed-tensors": ("compressed_tensors",),
    "gptq": ("optimum", "gptqmodel"),
    "hqq": ("hqq",),
    "quanto": ("optimum.quanto",),
    "torchao": ("torchao",),
}
_ON_CUDA = {"fp8": ("kernels",)}  # elsewhere Transformers makes bfloat16 of it
_INSTALL = {"auto_round": "auto-round", "compressed_tensors": "compressed-tensors", "optimum.quanto": "optimum-quanto"}


def quantisation_of(folder: str | Path) -> str | None:
    """How the weights of the model in ``folder`` are stored ('fp8', 'gptq', 'bitsandbytes', …); None where they are plain."""
    config: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    found = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    return None if not found else str(found.get("quant_method", "an unnamed method"))


def missing_packages(method: str, device: str) -> list[str]:
    """What has to be installed, by the name that pip knows, to run weights stored so on a device; methods that are not known here are tried."""
    wanted = _PACKAGES.get(method, ()) + (_ON_CUDA.get(method, ()) if device != "cpu" else ())
    return [_INSTALL.get(name, name) for name in wanted if not _is_there(name)]


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of a package that the name is within
        return False
