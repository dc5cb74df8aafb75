"""The drafter's ``config.json``: one file that vLLM, SGLang, Transformers and speculators all read, and that reads back.

block_size, dflash_config, layer ids counted from 0   z-lab's native keys (vLLM, SGLang, Transformers)
speculators_*, layer ids counted from 1               speculators, and ``vllm serve`` with the folder alone

Sliding windows. A layer of type ``sliding_attention`` sees the last ``sliding_window`` positions up to the query's own: of its own block backwards
only. So it is computed by vLLM 0.33 (``qwen3_dflash``), SGLang 0.5.23 (``dflash_utils``), z-lab's ``dflash`` 0.1.0 and SpecForge 0.2, as long as
no key says otherwise for all layers at once (``CAUSAL_KEYS``). vLLM makes such a key of ``sliding_window_non_causal`` when it reads a folder by its
speculators keys: true for a drafter of full layers, false for one of sliding layers, and wrong either way for one that has both. That one has none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from dflash_core.drafter.config import DFlashConfig
from dflash_core.drafter.rope import rope_problem
from dflash_core.drafter.spec import SPECS
from dflash_core.errors import CheckpointError

CAUSAL_KEYS = ("is_causal", "dflash_config.causal")
"""Keys that must not be there: they override the attention of every layer."""

SPECULATORS_KEYS = ("speculators_config", "speculators_model_type", "transformer_layer_config")
"""Keys by which speculators, and vLLM with the folder alone, know a drafter as theirs."""


def fits_speculators(config: DFlashConfig) -> bool:
    """Whether speculators keys can say what the drafter's layers see: all of them the same."""
    return len(set(config.layer_types)) == 1


def to_serving(config: DFlashConfig, dtype: str, target_architectures: Sequence[str] = ()) -> dict[str, Any]:
    """The content of ``config.json``.

    Args:
        config:               the drafter
        dtype:                of the tensors beside it, such as "bfloat16"
        target_architectures: model classes of the target, which speculators wants to know
    """
    shape: dict[str, Any] = {
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": False,
        "layer_types": config.layer_types,
        "use_sliding_window": bool(config.sliding_layers),
        "rope_theta": config.rope_parameters["rope_theta"],  # Transformers 4 reads this, Transformers 5 and vLLM the next
        "rope_parameters": dict(config.rope_parameters),
    }
    if config.rope_parameters["rope_type"] != "default":
        shape["rope_scaling"] = dict(config.rope_parameters)  # Transformers 4 again
    if config.sliding_layers:
        shape["sliding_window"] = config.sliding_window
    taps = list(config.tap_layers)
    fields = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        **shape,
        "dtype": dtype,
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "dflash_config": {"target_layer_ids": taps, "mask_token_id": config.mask_token_id},
        "sample_from_anchor": config.spec.sample_from_anchor,
        "speculators_model_type": config.spec_name,
        "speculators_config": {
            "algorithm": config.spec_name,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}],
            "verifier": {"name_or_path": config.target_name, "architectures": list(target_architectures)},
        },
        "transformer_layer_config": dict(shape),
        "aux_hidden_state_layer_ids": [layer + 1 for layer in taps],
        "mask_token_id": config.mask_token_id,
        "draft_vocab_size": config.vocab_size,
        "target_hidden_size": config.hidden_size,
        "sliding_window_non_causal": not config.sliding_layers,
    }
    if not fits_speculators(config):
        fields = {key: value for key, value in fields.items() if key not in SPECULATORS_KEYS} | {"target_name_or_path": config.target_name}
    return fields


_Count = Annotated[int, Field(strict=True, ge=1, le=2**31 - 1)]


class _DFlashFields(BaseModel):
    target_layer_ids: Annotated[tuple[Annotated[int, Field(strict=True)], ...], Field(min_length=1)]  # in what range: the target knows
    mask_token_id: Annotated[int, Field(strict=True, ge=0)]


class _Verifier(BaseModel):
    name_or_path: str | None = None


class _SpeculatorsFields(BaseModel):
    verifier: _Verifier | None = None


class _Fields(BaseModel):
    """What is read of a ``config.json``; whatever else it holds is not looked at."""

    num_target_layers: _Count
    dflash_config: _DFlashFields
    hidden_size: _Count
    intermediate_size: _Count
    num_hidden_layers: Annotated[int, Field(strict=True, ge=1, le=10_000)]
    num_attention_heads: _Count
    num_key_value_heads: _Count
    head_dim: _Count
    vocab_size: _Count
    rms_norm_eps: Annotated[float, Field(gt=0.0, lt=1.0)]
    max_position_embeddings: _Count
    block_size: Annotated[int, Field(strict=True, ge=2, le=2**31 - 1)]
    rope_theta: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    attention_bias: bool | None = None
    sample_from_anchor: bool | None = None
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None
    use_sliding_window: bool | None = None
    sliding_window: _Count | None = None
    speculators_model_type: str = "dflash"
    speculators_config: _SpeculatorsFields | None = None
    target_name_or_path: str | None = None


def from_serving(fields: Mapping[str, Any], source: str) -> DFlashConfig:
    """Read a drafter's ``config.json``, ours or z-lab's.

    Raises:
        CheckpointError: a field is missing, of the wrong kind, or of a drafter that is not supported; names ``source`` and the field.
    """
    try:
        read = _Fields.model_validate(dict(fields))
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"])
        if first["type"] == "missing":
            raise CheckpointError(f"{source}: expected the field {path}, found none. Export the drafter again, or add the field.") from None
        message = f"{source}: {path} = {first['input']!r}: {first['msg']}. Export the drafter again, or correct the field."
        raise CheckpointError(message) from None
    name = read.speculators_model_type
    if name not in SPECS or bool(read.sample_from_anchor) != SPECS[name].sample_from_anchor:
        found = f"{name!r} with sample_from_anchor = {read.sample_from_anchor}"
        raise CheckpointError(f"{source}: expected a drafter of a variant in {', '.join(SPECS)}, found {found}. Train one with this project.")
    if read.attention_bias:
        raise CheckpointError(f"{source}: expected attention_bias = false, found true. Drafters with biases are not supported.")
    verifier = read.speculators_config.verifier if read.speculators_config else None
    window, sliding_layers = _window(read, source)
    return DFlashConfig(
        target_name=(verifier.name_or_path if verifier else read.target_name_or_path) or "",
        num_target_layers=read.num_target_layers,
        tap_layers=read.dflash_config.target_layer_ids,
        hidden_size=read.hidden_size,
        intermediate_size=read.intermediate_size,
        num_layers=read.num_hidden_layers,
        num_heads=read.num_attention_heads,
        num_kv_heads=read.num_key_value_heads,
        head_dim=read.head_dim,
        vocab_size=read.vocab_size,
        rms_norm_eps=read.rms_norm_eps,
        rope_parameters=_rope(read, source),
        max_position_embeddings=read.max_position_embeddings,
        block_size=read.block_size,
        mask_token_id=read.dflash_config.mask_token_id,
        sliding_window=window,
        sliding_layers=sliding_layers,
        spec_name=name,
    )


def _window(read: _Fields, source: str) -> tuple[int, tuple[int, ...]]:
    kinds = read.layer_types or ("full_attention",) * read.num_hidden_layers
    if len(kinds) != read.num_hidden_layers:
        message = f"{source}: layer_types = {list(kinds)}: expected one for each of {read.num_hidden_layers} layers"
        raise CheckpointError(f"{message}. Export the drafter again, or correct the field.")
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")
    if not layers:
        return 0, ()
    if read.sliding_window is None or read.use_sliding_window is False or read.sliding_window < read.block_size:
        found = f"sliding_window = {read.sliding_window}, use_sliding_window = {read.use_sliding_window}"
        message = f"{source}: layers {list(layers)} have sliding windows: expected one of at least block_size = {read.block_size}, found {found}"
        raise CheckpointError(f"{message}. Export the drafter again, or correct the fields.")
    return read.sliding_window, layers


def _rope(read: _Fields, source: str) -> dict[str, Any]:
    rope = dict(read.rope_parameters or read.rope_scaling or {})
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", "default")
    theta = rope.get("rope_theta", read.rope_theta)
    if theta is None:
        raise CheckpointError(f"{source}: expected the field rope_theta, found none. Export the drafter again, or add the field.")
    for key in ("rope_theta", "factor"):
        value = theta if key == "rope_theta" else rope.get(key, 1.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            message = f"{source}: {key} = {value!r}: a rope needs a positive number. Export the drafter again, or correct the field."
            raise CheckpointError(message)
    rope["rope_theta"] = float(theta)
    problem = rope_problem(rope, "rope_parameters")
    if problem:
        raise CheckpointError(f"{source}: {problem}")
    return rope
