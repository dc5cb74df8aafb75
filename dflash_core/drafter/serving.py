"""The drafter's ``config.json``: one file that vLLM, SGLang, Transformers and speculators all read, and that reads back.

block_size, dflash_config, layer ids counted from 0   z-lab's native keys (vLLM, SGLang, Transformers)
speculators_*, layer ids counted from 1               speculators, and ``vllm serve`` with the folder alone
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_core.drafter.config import DFlashConfig
from dflash_core.drafter.rope import rope_problem
from dflash_core.drafter.spec import SPECS
from dflash_core.errors import CheckpointError

CAUSAL_KEYS = ("is_causal", "dflash_config.causal")
"""Keys that must not be there: they override the attention of every layer."""


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
        "layer_types": [config.spec.layer_type] * config.num_layers,
        "use_sliding_window": False,
        "rope_theta": config.rope_parameters["rope_theta"],  # Transformers 4 reads this, Transformers 5 and vLLM the next
        "rope_parameters": dict(config.rope_parameters),
    }
    if config.rope_parameters["rope_type"] != "default":
        shape["rope_scaling"] = dict(config.rope_parameters)  # Transformers 4 again
    taps = list(config.tap_layers)
    return {
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
        "sliding_window_non_causal": True,  # else vLLM's speculators parser makes full-attention layers causal
    }


def from_serving(fields: Mapping[str, Any], source: str) -> DFlashConfig:
    """Read a drafter's ``config.json``, ours or z-lab's.

    Raises:
        CheckpointError: a field is missing or of a drafter that is not supported; names ``source`` and the field.
    """

    def need(*path: str) -> Any:
        node: Any = fields
        for key in path:
            if not isinstance(node, Mapping) or key not in node:
                raise CheckpointError(f"{source}: expected the field {'.'.join(path)}, found none. Export the drafter again, or add the field.")
            node = node[key]
        return node

    spec_name = fields.get("speculators_model_type", "dflash")
    if spec_name not in SPECS or bool(fields.get("sample_from_anchor", False)) != SPECS[spec_name].sample_from_anchor:
        found = f"{spec_name!r} with sample_from_anchor = {fields.get('sample_from_anchor')}"
        raise CheckpointError(f"{source}: expected a drafter of a variant in {', '.join(SPECS)}, found {found}. Train one with this project.")
    if fields.get("attention_bias"):
        raise CheckpointError(f"{source}: expected attention_bias = false, found {fields['attention_bias']}. Drafters with biases are not supported.")
    rope = dict(fields.get("rope_parameters") or fields.get("rope_scaling") or {})
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", "default")
    rope["rope_theta"] = float(rope["rope_theta"] if "rope_theta" in rope else need("rope_theta"))
    problem = rope_problem(rope, "rope_parameters")
    if problem:
        raise CheckpointError(f"{source}: {problem}")
    verifier = (fields.get("speculators_config") or {}).get("verifier") or {}
    return DFlashConfig(
        target_name=verifier.get("name_or_path") or "",
        num_target_layers=need("num_target_layers"),
        tap_layers=tuple(need("dflash_config", "target_layer_ids")),
        hidden_size=need("hidden_size"),
        intermediate_size=need("intermediate_size"),
        num_layers=need("num_hidden_layers"),
        num_heads=need("num_attention_heads"),
        num_kv_heads=need("num_key_value_heads"),
        head_dim=need("head_dim"),
        vocab_size=need("vocab_size"),
        rms_norm_eps=need("rms_norm_eps"),
        rope_parameters=rope,
        max_position_embeddings=need("max_position_embeddings"),
        block_size=need("block_size"),
        mask_token_id=need("dflash_config", "mask_token_id"),
        spec_name=spec_name,
    )
