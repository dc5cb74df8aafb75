"""Weights to begin training with: random, or taken from the target's own last layers.

A draft layer has the shape of a target layer, so it can begin as one: a layer that already reads the target's features and
writes what the target's head understands. With little data or time this is worth many steps (``benchmarks/RESULTS.md``).
The context starts as the deepest tap, passed through ``fc`` by an identity beside its random weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from dflash_core.drafter.config import DFlashConfig
from dflash_core.drafter.model import DFlashDrafter
from dflash_core.errors import ConfigError, Problem
from dflash_core.target.info import TargetInfo
from dflash_core.target.weights import StoredTensor, stored_tensors

_NORMS = ("q_norm", "k_norm")
_FREE_TO_CHANGE = {"block_size", "target_name"}  # between a drafter and the one that begins with its weights
_WINDOW = {"sliding_window", "sliding_layers"}


def shape_differences(found: DFlashConfig, wanted: DFlashConfig) -> list[str]:
    """Why a drafter's weights cannot be the start of another's, one phrase each.

    The block size may change: a drafter of 16 is a good start for one of 8. The name of the target is a matter of spelling. A drafter that sees
    everything may get a window; one that has a window keeps it.
    """
    has, wants = asdict(found), asdict(wanted)
    free = _FREE_TO_CHANGE if found.sliding_layers else _FREE_TO_CHANGE | _WINDOW
    return [f"{name} is {has[name]}, here {wants[name]}" for name in wants if has[name] != wants[name] and name not in free]


def start_from_target(config: DFlashConfig, info: TargetInfo, seed: int) -> DFlashDrafter:
    """A float32 drafter whose layers are the target's last ``config.num_layers`` layers.

    Norms of queries and keys that the target lacks are given the scale its queries and keys have for inputs of unit variance.

    Args:
        seed: of the random part of ``fc``

    Raises:
        ConfigError: the target's layers are of another shape; names the tensor.
    """
    drafter = DFlashDrafter(config).init_weights(seed)
    stored = stored_tensors(Path(info.path))
    first = info.num_layers - config.num_layers
    weights = dict(drafter.named_parameters())
    _check_same_parts(stored, f"layers.{first}.", weights)
    with torch.no_grad():
        for name, parameter in weights.items():
            parts = name.split(".")
            if parts[0] == "layers" and parts[3] not in _NORMS:
                parameter.copy_(_read(stored, f"layers.{first + int(parts[1])}.{'.'.join(parts[2:])}", parameter))
        for i in range(config.num_layers):
            norm = weights[f"layers.{i}.input_layernorm.weight"]
            for kind in ("q", "k"):
                own = f"layers.{first + i}.self_attn.{kind}_norm.weight"
                scale = weights[f"layers.{i}.self_attn.{kind}_norm.weight"]
                if _find(stored, own) is not None:
                    scale.copy_(_read(stored, own, scale))
                else:
                    scale.fill_((weights[f"layers.{i}.self_attn.{kind}_proj.weight"] * norm).square().sum(1).mean().sqrt())
        weights["hidden_norm.weight"].copy_(torch.stack([weights[f"layers.{i}.input_layernorm.weight"] for i in range(config.num_layers)]).mean(0))
        weights["norm.weight"].copy_(_read(stored, "norm.weight", weights["norm.weight"]))
        weights["fc.weight"].mul_(0.5)[:, -config.hidden_size :].add_(torch.eye(config.hidden_size))
    return drafter


def _check_same_parts(stored: dict[str, StoredTensor], layer: str, weights: Mapping[str, Tensor]) -> None:
    """A layer with further parts (biases, norms after the attention, experts) computes something that a draft layer cannot."""
    ours = {name.removeprefix("layers.0.") for name in weights if name.startswith("layers.0.")}
    further = sorted({name.partition(layer)[2] for name in stored if name.startswith(layer) or f".{layer}" in name} - ours)
    if further:
        raise _unfit(f"the target's layers have parts that draft layers lack: {', '.join(further[:4])}")


def _unfit(message: str) -> ConfigError:
    remedy = "Set drafter.initial_weights to 'random', or leave drafter.intermediate_size out"
    return ConfigError("drafter", [Problem("drafter.initial_weights", "target", message, remedy)])


def _find(stored: dict[str, StoredTensor], ending: str) -> str | None:
    """The stored name of a part of the language model."""
    prefixes = ("", "model.", "model.language_model.", "language_model.model.")
    return next((prefix + ending for prefix in prefixes if prefix + ending in stored), None)


def _read(stored: dict[str, StoredTensor], ending: str, like: Tensor) -> Tensor:
    name = _find(stored, ending)
    found = stored[name].shape if name is not None else None
    if name is None or found != tuple(like.shape):
        raise _unfit(f"the target has no tensor {ending} of shape {list(like.shape)}" + (f", but one of {list(found)}" if found else ""))
    with safe_open(stored[name].file, framework="pt") as file:
        return file.get_tensor(name).float()
