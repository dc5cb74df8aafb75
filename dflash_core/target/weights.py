"""The weight files of a target, looked at without loading them: which there are, whether they are whole, their digests.

A safetensors file says in its header how long it is, so a truncated download is found in microseconds instead of as an
obscure failure after minutes of loading.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from dflash_core.data.packages import default_cache_dir
from dflash_core.errors import TargetError
from dflash_core.stages import file_sha256, write_json_atomic

INDEX = "model.safetensors.index.json"
_LARGEST_HEADER = 100 * 2**20
_CAST = {"F64", "F32", "F16", "BF16"}


class StoredTensor(NamedTuple):
    """Where a tensor is, its shape, and its type as safetensors calls it ('BF16')."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def weight_files(folder: Path) -> list[Path]:
    """Safetensors files of the model in ``folder``, in order of name.

    Raises:
        TargetError: there is none, or one that the index names is missing.
    """
    index = folder / INDEX
    if index.is_file():
        files = [folder / name for name in sorted(set(_weight_map(index).values()))]
        missing = [path.name for path in files if not path.is_file()]
        if missing:
            raise TargetError(
                f"{index} names {len(files)} weight files, of which {len(missing)} are missing: {', '.join(missing[:5])}. Fetch the model again."
            )
    else:
        files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        found = f"only {', '.join(pickled[:3])}, which are pickles and are never loaded" if pickled else "none"
        raise TargetError(
            f"{folder}: expected weights as *.safetensors, found {found}. Save the model with save_pretrained, which writes safetensors."
        )
    return files


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of the model in ``folder`` by name, from the files' headers alone.

    Raises:
        TargetError: a file is truncated or is not safetensors.
    """
    return {
        name: StoredTensor(path, tuple(entry["shape"]), entry["dtype"])
        for path in weight_files(folder)
        for name, entry in _header(path).items()
        if name != "__metadata__"
    }  # fmt: skip


def loaded_bytes(folder: Path, element: int) -> int:
    """Bytes of all weights in ``folder`` once they are loaded with ``element`` bytes a number; what is quantised stays as it is stored.

    Raises:
        TargetError: as ``stored_tensors`` does.
    """
    total = 0
    for path in weight_files(folder):
        for name, entry in _header(path).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                total += math.prod(entry["shape"]) * element if entry["dtype"] in _CAST else end - begin
    return total


def _header(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size, _LARGEST_HEADER):
            raise TargetError(f"{path}: expected a safetensors file, found {size} bytes that do not begin with its header. Fetch it again.")
        try:
            header = json.loads(file.read(length))
            expected = 8 + length + max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TargetError(f"{path}: the header of this safetensors file cannot be read ({error}). Fetch it again.") from error
    if size != expected:
        raise TargetError(f"{path}: expected {expected} bytes by its header, found {size}. The file is truncated or damaged; fetch it again.")
    return header


def cached_sha256(path: Path) -> str:
    """sha256 (hex) of a file, remembered in the cache folder for as long as its path, size and time of change stay the same."""
    path = path.resolve()
    status = path.stat()
    seen = {"path": str(path), "bytes": status.st_size, "modified_ns": status.st_mtime_ns}
    record = default_cache_dir() / "digests" / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(record.read_text())
        if {name: known[name] for name in seen} == seen:
            return str(known["sha256"])
    digest = file_sha256(path)
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time, not correctness
        write_json_atomic(record, {**seen, "sha256": digest})
    return digest


def _weight_map(index: Path) -> dict[str, str]:
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise TargetError(f"{index}: expected a weight_map from tensors to files, found {str(found)[:60]}. Fetch the model again.")
    return found


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model. Raises ``TargetError`` where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TargetError(f"{path} cannot be read as JSON: {error}. Fetch the model again.") from error
    if not isinstance(value, dict):
        raise TargetError(f"{path}: expected a JSON object, found {type(value).__name__}. Fetch the model again.")
    return value
