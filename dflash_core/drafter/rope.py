"""Rotary positions: one flat set of parameters per drafter, and the frequencies that Transformers derives from it.

The runtimes agree only on a rope that depends on the position alone: ``default``, ``linear``, ``llama3`` and ``yarn``, over the whole head.
Anything else is refused, because a rope that differs between training and serving costs nearly all acceptance without any error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dflash_core.errors import ConfigError, Problem

if TYPE_CHECKING:
    from dflash_core.target.info import TargetInfo

SUPPORTED = ("default", "linear", "llama3", "yarn")


def flat_rope_parameters(info: TargetInfo) -> dict[str, Any]:
    """The target's rope as one flat mapping with at least rope_type and rope_theta.

    Raises:
        ConfigError: the rope is partial, has several axes, or changes with the length of the text.
    """
    parameters = {key: value for key, value in info.rope_parameters.items() if value is not None}
    parameters["rope_type"] = parameters.get("rope_type") or parameters.get("type") or "default"
    parameters["rope_theta"] = float(parameters.get("rope_theta") or info.rope_theta)
    problem = rope_problem(parameters, f"{info.name}: rope_parameters")
    if problem:
        raise ConfigError(f"drafter for {info.name}", [problem])
    if parameters["rope_type"] in ("llama3", "yarn"):
        parameters.setdefault("original_max_position_embeddings", info.max_position_embeddings)
    return {key: value for key, value in parameters.items() if key not in ("type", "partial_rotary_factor")}


def rope_problem(parameters: Mapping[str, Any], path: str) -> Problem | None:
    """Why a drafter cannot have this rope, or None."""
    remedy = f"A drafter can have a rope of type {', '.join(SUPPORTED)} over the whole head"
    if parameters["rope_type"] not in SUPPORTED:
        return Problem(path, parameters["rope_type"], "this rope type changes with the length of the text or is unknown", remedy)
    if parameters.get("partial_rotary_factor") not in (None, 1, 1.0):
        return Problem(path, parameters["partial_rotary_factor"], "a partial rotary factor means different things to different runtimes", remedy)
    if parameters.get("mrope_section"):
        return Problem(path, parameters["mrope_section"], "a rope of several axes (M-RoPE) is not supported", remedy)
    return None


def rope_frequencies(parameters: Mapping[str, Any], head_dim: int, max_position_embeddings: int) -> tuple[Tensor, float]:
    """Inverse frequencies [D/2] float32 on the CPU, and the factor on cosine and sine, as Transformers computes them for Qwen3."""
    rope_type = parameters["rope_type"]
    if rope_type == "default":
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
        return 1.0 / (parameters["rope_theta"] ** exponent), 1.0
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = Qwen3Config(head_dim=head_dim, max_position_embeddings=max_position_embeddings, rope_parameters=dict(parameters))
    inv_freq, factor = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
    return inv_freq.float(), float(factor)
