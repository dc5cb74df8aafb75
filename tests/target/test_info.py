"""What is read of a target without loading it, and the errors for folders that cannot be used."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dflash_core.config import TargetConfig
from dflash_core.errors import TargetError
from dflash_core.target import TargetInfo, TargetModel, TargetVocabulary, read_target_info, resolve_target
from tests.target.tiny import save_tiny_target


@pytest.fixture
def folder(tiny_folder: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy that the test may damage."""
    return Path(shutil.copytree(tiny_folder("qwen3"), tmp_path / "tiny-qwen3"))


def test_the_dimensions_come_from_the_configuration(folder: Path) -> None:
    info = read_target_info(folder)
    assert (info.name, info.path, info.revision, info.model_type) == ("tiny-qwen3", str(folder), None, "qwen3")
    assert (info.num_layers, info.hidden_size, info.intermediate_size, info.vocab_size) == (4, 32, 48, 300)
    assert (info.num_heads, info.num_kv_heads, info.head_dim) == (4, 2, 8)
    assert (info.eos_token_ids, info.pad_token_id, info.bos_token_id) == ((258,), 256, 257)
    assert (info.embedding_scale, info.logit_softcap, info.logit_scale) == (1.0, None, 1.0)


def test_rotary_base_and_gemma_particulars_are_those_of_full_attention(tiny_folder: Callable[[str], Path]) -> None:
    assert read_target_info(tiny_folder("llama")).rope_theta == 5e4
    gemma = read_target_info(tiny_folder("gemma3_text"))
    assert gemma.rope_theta == 1e6  # sliding layers have 1e4
    assert gemma.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    assert gemma.embedding_scale == pytest.approx(32**0.5)
    assert read_target_info(tiny_folder("gemma2")).logit_softcap == 2.0


def test_info_survives_json(folder: Path) -> None:
    info = read_target_info(folder)
    facts = json.loads(json.dumps(info.to_dict()))
    assert TargetInfo(**{**facts, "eos_token_ids": tuple(facts["eos_token_ids"])}) == info


def test_each_digest_changes_with_its_own_files_and_with_nothing_else(folder: Path) -> None:
    before = read_target_info(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": "{{ messages }}"}))
    template = read_target_info(folder)
    assert (template.digest, template.tokenizer_digest) == (before.digest, before.tokenizer_digest)
    assert template.template_digest != before.template_digest
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"][-1]["lstrip"] = True
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    other = read_target_info(folder)
    assert (other.digest, other.template_digest) == (template.digest, template.template_digest)
    assert other.tokenizer_digest != before.tokenizer_digest
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    assert read_target_info(folder).digest != before.digest


def test_every_end_token_of_the_generation_settings_ends_an_answer(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [17, 258]}))
    assert read_target_info(folder).eos_token_ids == (17, 258)


@pytest.mark.parametrize("tied", [True, False])
def test_sharded_weights_are_read_and_hashed_as_one_model(tmp_path: Path, tied: bool) -> None:
    whole = save_tiny_target("llama", tmp_path / "whole", tie_word_embeddings=tied)
    shards = save_tiny_target("llama", tmp_path / "shards", max_shard_size="40KB", tie_word_embeddings=tied)
    assert len(list(shards.glob("*.safetensors"))) > 2
    one, many = (TargetVocabulary.from_pretrained(path, dtype=torch.float32) for path in (whole, shards))
    assert torch.equal(one.embedding_weight, many.embedding_weight)
    assert torch.equal(one.head_weight, many.head_weight)
    assert torch.equal(one.head_weight, one.embedding_weight) == tied
    target = TargetModel.from_pretrained(shards, dtype=torch.float32)
    assert torch.equal(target.vocabulary.head_weight, many.head_weight)
    next(shards.glob("*-00002-of-*.safetensors")).unlink()
    with pytest.raises(TargetError, match=r"model.safetensors.index.json names .* missing: model-00002-of-"):
        read_target_info(shards)


def _remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _write(name: str, text: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_text(text)

    return damage


def _setting(**changed: object) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, r"expected the folder of a model, found nothing at .*tiny-qwen3. Correct the path"),
        (_remove("config.json"), "expected config.json, found none"),
        (_write("config.json", "{"), "config.json cannot be used"),
        (_write("config.json", '{"model_type": "no-such-model"}'), "no-such-model.*trust_remote_code"),
        (_remove("model.safetensors"), r"expected weights as \*.safetensors, found none"),
        (_only_pickles, "pytorch_model.bin, which are pickles and are never loaded"),
        (_truncate, r"model.safetensors: expected \d+ bytes by its header, found \d+. The file is truncated"),
        (_write("model.safetensors", "not a model"), "11 bytes that do not begin with its header"),
        (_remove("tokenizer.json"), r"expected a tokenizer \(one of tokenizer.json, .*found none"),
        (_write("tokenizer.json", "{}"), "its tokenizer cannot be loaded"),
        (_write("generation_config.json", "{"), "generation_config.json cannot be read as JSON.*Fetch"),
        (_write("generation_config.json", "[]"), "generation_config.json: expected a JSON object, found list"),
        (_write("generation_config.json", '{"eos_token_id": "x"}'), r"eos_token_id = \['x', \d+\] in .*Correct it there"),
        (_write("model.safetensors.index.json", '{"weight_map": []}'), "expected a weight_map from tensors to files"),
        (_setting(text_config="x"), "text_config = x: expected the settings of a language model"),
        (_setting(quantization_config={"quant_method": "magic"}), "'magic'.*names no quant_method that the installed transformers knows"),
        (_setting(quantization_config={"bits": 4}), "'bits': 4.*names no quant_method"),
    ],
)
def test_a_folder_that_cannot_be_used_says_why(folder: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(folder)
    with pytest.raises(TargetError, match=message):
        resolve_target(TargetConfig(model=str(folder)))


def test_weights_that_do_not_fit_the_configuration_are_refused_instead_of_made_up(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(TargetError, match=r"tensors are missing .*model.layers.4"):
        TargetModel.from_pretrained(folder, dtype=torch.float32)


def test_code_of_a_model_does_not_run_unless_asked_for(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"import pathlib\npathlib.Path({str(folder / 'ran')!r}).touch()\nfrom transformers import Qwen3Config as Config\n")
    with pytest.raises(TargetError, match="trust_remote_code"):
        resolve_target(TargetConfig(model=str(folder)))
    assert not (folder / "ran").exists()


def test_a_hub_model_is_fetched_at_its_revision_and_named_by_its_commit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[dict[str, object]] = []
    commit = folder.rename(folder.parent / "0123abcd")

    def snapshot(name: str, **arguments: object) -> str:
        asked.append({"name": name, **arguments})
        return str(commit)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    info = resolve_target(TargetConfig(model="owner/tiny", revision="main"))
    assert (info.name, info.revision, info.path) == ("owner/tiny", "0123abcd", str(commit))
    assert asked[0]["revision"] == "main"
    assert "*.py" not in asked[0]["allow_patterns"]  # type: ignore[operator]


def test_a_hub_model_that_cannot_be_had_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def snapshot(name: str, **arguments: object) -> str:
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(TargetError, match=r"'owner/tiny' is not on this machine .*offline.*HF_TOKEN"):
        resolve_target(TargetConfig(model="owner/tiny"))
    with pytest.raises(TargetError, match="It is fetched when the pipeline runs"):
        read_target_info(TargetConfig(model="owner/tiny"))


def test_importing_the_facts_loads_neither_torch_nor_transformers() -> None:
    check = "import sys, dflash_core.target.info; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
