"""Tiny random targets of the supported families, saved as Hugging Face folders with a byte-level tokenizer.

folder = save_tiny_target("qwen3", tmp_path)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 300
LAYERS = 4
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 257,
    "eos_token_id": 258,
    "pad_token_id": 256,
}
_WINDOWED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
_ROPE = {"rope_type": "default", "rope_theta": 5e4}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False, "rope_parameters": _ROPE},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1, "tie_word_embeddings": False},
    "mistral": {"sliding_window": 8, "tie_word_embeddings": False},
    "gemma2": {**_WINDOWED, "query_pre_attn_scalar": 8, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 5.0},
    "gemma3_text": {**_WINDOWED, "query_pre_attn_scalar": 8},
    "gpt_oss": {**_WINDOWED, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": _ROPE, "tie_word_embeddings": False},
}
HYBRID: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "tie_word_embeddings": False,
    },
}
"""Families with layers that carry a state from token to token. They can be tapped, and not decoded with a cache that is cropped."""
TEMPLATE = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def tiny_config(family: str, **changes: Any) -> Any:
    """The Transformers configuration of a family."""
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **{**_COMMON, **(FAMILIES | HYBRID)[family], **changes})


def tiny_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A float32 model whose weights are such that its layers matter: generated tokens vary."""
    from transformers import AutoModelForCausalLM

    config = tiny_config(family, **changes)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3)
            else:
                parameter.add_(torch.rand_like(parameter) * 0.1)
        if family.startswith("gemma"):  # embeddings that are scaled up and tied would make it repeat itself
            model.get_input_embeddings().weight.mul_(0.1)
    return model


def save_tiny_target(family: str, folder: Path, *, seed: int = 0, max_shard_size: str = "1GB", **changes: Any) -> Path:
    """Write model, tokenizer and generation settings into ``folder``."""
    tiny_model(family, seed, **changes).save_pretrained(folder, max_shard_size=max_shard_size)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """One token per byte (ids 0 to 255 by the byte-level alphabet), then pad 256, start 257, end 258 and spare ones."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|pad|>", "<|start|>", "<|end|>", "<|mask|>"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": len(alphabet) + index, "content": token, **flags} for index, token in enumerate(special)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {token: index for index, token in enumerate([*alphabet, *special])}, "merges": []},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|start|>",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
