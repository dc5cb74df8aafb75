"""A drafter on disk: ``model.safetensors`` and ``config.json``, the same two files whether it is a checkpoint or an export.

``config.json`` is written last, so a folder that has one is complete. Saving again over the same drafter replaces the weights in one
rename: whoever looks finds the old ones or the new ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from dflash_core.drafter.config import DFlashConfig
from dflash_core.drafter.model import DFlashDrafter
from dflash_core.drafter.serving import from_serving, to_serving
from dflash_core.errors import CheckpointError
from dflash_core.stages import atomic_write, save_tensors, write_json_atomic

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def save_checkpoint(drafter: DFlashDrafter, folder: str | Path) -> None:
    """Write a drafter's weights, in the dtype they have, and its configuration."""
    tensors = drafter.state_dict()
    dtype = str(tensors["norm.weight"].dtype).removeprefix("torch.")
    write_drafter(Path(folder), to_serving(drafter.config, dtype), tensors)


def load_checkpoint(
    folder: str | Path, *, config: DFlashConfig | None = None, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> DFlashDrafter:
    """Read a drafter from a checkpoint or an exported folder.

    Args:
        folder: holds ``model.safetensors`` and ``config.json``
        config: the drafter's shape where it is known; ``config.json`` is then not needed, and not read
        dtype:  of the loaded weights; by default as stored
        device: where they go

    Raises:
        CheckpointError: a file is missing or damaged, or the tensors are not those of the configuration, no floating-point
            numbers, or not finite; names every one that is wrong.
    """
    folder = Path(folder)
    config = config or read_drafter_config(folder)
    stored = stored_tensors(folder)
    problems = tensor_problems(config, {name: shape for name, (shape, _) in stored.items()})
    if problems:
        raise CheckpointError("\n  ".join([f"{folder / WEIGHTS}: not the tensors of this drafter:", *problems]))
    tensors = load_file(folder / WEIGHTS)
    if problems := list(value_problems(tensors)):
        raise CheckpointError("\n  ".join([f"{folder / WEIGHTS}: not the weights of a drafter; save or export it again:", *problems]))
    drafter = DFlashDrafter(config)
    drafter.load_state_dict(tensors, assign=True)
    return drafter.to(device=device, dtype=dtype)


def write_drafter(folder: Path, serving: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write both files so that a kill at any moment leaves either a complete drafter or one without ``config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(serving)
    try:
        unchanged = json.dumps(json.loads((folder / CONFIG).read_text(encoding="utf-8"))) == text
    except (OSError, ValueError):
        unchanged = False
    if not unchanged:
        (folder / CONFIG).unlink(missing_ok=True)
    with atomic_write(folder / WEIGHTS) as temporary:
        own = {name: tensor.detach().to("cpu").clone().contiguous() for name, tensor in tensors.items()}  # views of one buffer cannot be saved
        save_tensors(own, temporary, metadata={"format": "pt"})
    if not unchanged:
        write_json_atomic(folder / CONFIG, serving)


def read_drafter_config(folder: Path) -> DFlashConfig:
    """The drafter that ``config.json`` describes. Raises ``CheckpointError`` as ``read_serving_config`` and ``from_serving`` do."""
    return from_serving(read_serving_config(folder), str(folder / CONFIG))


def read_serving_config(folder: Path) -> dict[str, Any]:
    """The content of ``config.json``. Raises ``CheckpointError`` when there is none or it is no JSON object."""
    path = folder / CONFIG
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{path}: expected a drafter's configuration, cannot read it: {error.strerror}. Check the path, or save again."
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path}: expected JSON: {error}. Export the drafter again.") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(fields).__name__}. Export the drafter again.")
    return fields


def stored_tensors(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and safetensors dtype ("BF16", "F32") of every stored tensor. Raises ``CheckpointError`` when the file is missing or damaged."""
    path = folder / WEIGHTS
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: expected a drafter's weights, cannot read them: {error}. Check the path, or export again.") from error


def tensor_problems(config: DFlashConfig, found: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Every difference between the stored tensors' names and shapes and ``config.tensor_shapes()``, one line each."""
    expected = config.tensor_shapes()
    problems = [f"{name}: missing (expected shape {list(shape)})" for name, shape in expected.items() if name not in found]
    for name, shape in found.items():
        if name not in expected:
            bare = next((known for known in expected if name.endswith(f".{known}")), None)
            problems.append(f"{name}: must be named {bare}, without a prefix" if bare else f"{name}: unexpected, of shape {list(shape)}")
        elif shape != expected[name]:
            problems.append(f"{name}: shape {list(shape)}, expected {list(expected[name])}")
    return problems


def value_problems(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Tensors that no drafter computes with, one line each: of other types than float32, bfloat16 and float16, or with values that are not finite."""
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            yield f"{name}: dtype {tensor.dtype}, expected float32, bfloat16 or float16"
        elif not torch.isfinite(tensor).all():
            yield f"{name}: has {int((~torch.isfinite(tensor)).sum())} values that are not finite"
