"""Targets whose weights are stored quantised: what their config.json says of it, and what it takes to run them.

Transformers loads them by the ``quantization_config`` of the checkpoint; nothing is quantised here.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dflash_core.errors import TargetError
from dflash_core.target.weights import read_json

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
    """How the weights of the model in ``folder`` are stored ('fp8', 'gptq', 'bitsandbytes', …); None where they are plain.

    Raises:
        TargetError: in a way that Transformers does not know: it would take what is stored for plain weights.
    """
    path = Path(folder) / "config.json"
    config = read_json(path)
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    found: Any = next((part["quantization_config"] for part in parts if part.get("quantization_config") is not None), None)
    if found is None:
        return None
    from transformers.quantizers.auto import AutoHfQuantizer

    try:
        known = AutoHfQuantizer.supports_quant_method(found)
    except (ValueError, TypeError, AttributeError):  # it is no mapping, or names no method
        known = False
    if not known:
        raise TargetError(
            f"{path}: quantization_config = {str(found)[:120]}: it names no quant_method that the installed transformers knows. "
            "Name the unquantised model, or see whether a newer transformers knows it."
        )
    return str(found.get("quant_method", "bitsandbytes"))


def missing_packages(method: str, device: str) -> list[str]:
    """What has to be installed, by the name that pip knows, to run weights stored so on a device; methods that are not known here are tried."""
    wanted = _PACKAGES.get(method, ()) + (_ON_CUDA.get(method, ()) if device != "cpu" else ())
    return [_INSTALL.get(name, name) for name in wanted if not _is_there(name)]


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of a package that the name is within
        return False
