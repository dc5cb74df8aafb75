"""The served folder: complete, verified, and the same function when Transformers loads it with the code beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, LlamaConfig, LlamaForCausalLM

from dflash_core.config import DrafterConfig
from dflash_core.drafter import DFlashConfig, DFlashDrafter, default_tap_layers, export_drafter, load_checkpoint, target_problems, verify_export
from dflash_core.drafter.card import model_card
from dflash_core.errors import CheckpointError
from dflash_core.target.info import TargetInfo
from tests.drafter.small import WINDOWED, small_drafter, target_info
from tests.drafter.test_config import LLAMA3, YARN

INFO = target_info()


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    return export_drafter(small_drafter(), INFO, tmp_path / "drafter", {"acceptance length, mean of requests": 1.5, "prompts": "32 held out"})


def change_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    fields = json.loads((folder / "config.json").read_text())
    change(fields)
    (folder / "config.json").write_text(json.dumps(fields))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_the_configuration_says_what_every_runtime_asks_for(exported: Path) -> None:
    fields = json.loads((exported / "config.json").read_text())
    expected = {
        "model_type": "qwen3", "architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "dflash_config": {"target_layer_ids": [1, 5], "mask_token_id": 16}, "block_size": 4, "num_target_layers": 8,
        "layer_types": ["full_attention"] * 2, "rope_theta": 10000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8,
        "rms_norm_eps": 1e-5, "attention_bias": False, "hidden_act": "silu", "vocab_size": 64, "max_position_embeddings": 512,
        "tie_word_embeddings": False, "dtype": "bfloat16", "sample_from_anchor": False, "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": [2, 6], "mask_token_id": 16, "sliding_window_non_causal": True,
    }  # fmt: skip
    assert {key: fields.get(key) for key in expected} == expected
    speculators = fields["speculators_config"]
    assert speculators["algorithm"] == "dflash"
    assert speculators["proposal_methods"][0]["speculative_tokens"] == 3
    assert speculators["verifier"]["name_or_path"] == "paper-target"
    assert fields["transformer_layer_config"]["head_dim"] == 8
    assert "is_causal" not in fields
    assert "causal" not in fields["dflash_config"]


def test_the_tensors_are_bf16_unprefixed_and_complete(exported: Path) -> None:
    tensors = load_file(exported / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in tensors.items()} == small_drafter().config.tensor_shapes()
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}


def test_the_card_states_target_and_measurements(exported: Path) -> None:
    text = (exported / "README.md").read_text()
    assert "base_model: paper-target" in text
    assert "| acceptance length, mean of requests | 1.5 |" in text
    assert '"num_speculative_tokens": 3' in text


def test_the_commands_of_the_card_and_the_keys_of_the_configuration_name_the_targets_repository(tmp_path: Path) -> None:
    info = replace(INFO, name="built-in", repository="owner/original")
    folder = export_drafter(small_drafter(target_name="owner/original"), info, tmp_path, {})
    fields, card = json.loads((folder / "config.json").read_text()), (folder / "README.md").read_text()
    assert fields["speculators_config"]["verifier"]["name_or_path"] == "owner/original"
    assert "vllm serve owner/original --speculative-config" in card
    assert "--model-path owner/original --speculative-algorithm" in card
    assert "base_model: owner/original" in card
    assert "| target | owner/original; trained and measured with its conversion 'built-in'" in card


def test_the_card_states_the_targets_licence_where_that_is_known_and_keeps_its_table_whole(exported: Path, tmp_path: Path) -> None:
    assert "its licence, which is not stated in its folder, is theirs" in (exported / "README.md").read_text()
    (tmp_path / "README.md").write_text("---\ntags: [x]\nlicense: gemma\n---\n# A model\nlicense: none\n")
    card = model_card(small_drafter().config, replace(INFO, path=str(tmp_path)), {"a|b": "c|d"})
    assert card.startswith("---\nlibrary_name: transformers\nlicense: gemma\nbase_model: paper-target\n")
    assert "its licence, gemma, is theirs" in card
    assert "| a\\|b | c\\|d |" in card
    assert "license: apache-2.0\n" in model_card(small_drafter().config, replace(INFO, repository="HuggingFaceTB/SmolLM2-135M-Instruct"), {})


def test_the_commands_of_the_card_of_a_target_that_is_a_folder_say_so(exported: Path) -> None:
    assert "vllm serve <folder of paper-target> --speculative-config" in (exported / "README.md").read_text()


def test_an_exported_folder_can_be_trained_on(exported: Path) -> None:
    assert load_checkpoint(exported).config == small_drafter().config


ALL_SLIDE = {"sliding_window": 6, "sliding_layers": (0, 1)}


def test_a_drafter_whose_layers_all_slide_says_so_in_every_layout(tmp_path: Path) -> None:
    folder = export_drafter(small_drafter(**ALL_SLIDE), INFO, tmp_path, {})
    fields = json.loads((folder / "config.json").read_text())
    for part in (fields, fields["transformer_layer_config"]):
        assert (part["layer_types"], part["use_sliding_window"], part["sliding_window"]) == (["sliding_attention"] * 2, True, 6)
    assert fields["sliding_window_non_causal"] is False
    assert load_checkpoint(folder).config == small_drafter(**ALL_SLIDE).config
    card = (folder / "README.md").read_text()
    assert "sliding windows of 6 positions |" in card
    assert "`vllm serve <this folder>` computes it too" in card


def test_a_drafter_with_both_kinds_of_layers_is_not_offered_to_readers_that_would_compute_another(tmp_path: Path) -> None:
    folder = export_drafter(small_drafter(**WINDOWED), INFO, tmp_path, {})
    fields = json.loads((folder / "config.json").read_text())
    assert (fields["layer_types"], fields["sliding_window"]) == (["sliding_attention", "full_attention"], 6)
    assert not {"speculators_config", "speculators_model_type", "transformer_layer_config"} & fields.keys()
    assert load_checkpoint(folder).config == small_drafter(**WINDOWED).config
    card = (folder / "README.md").read_text()
    assert "sliding windows of 6 positions, full in 1 (from 0) |" in card
    assert "V2 model runner" in card
    change_config(folder, lambda c: c.update(speculators_config={"verifier": {"name_or_path": "paper-target"}}))
    with pytest.raises(CheckpointError, match="speculators_config must be left out"):
        verify_export(folder, INFO)


@pytest.mark.parametrize(
    "change", [{"sliding_window": None}, {"use_sliding_window": False}, {"sliding_window": 3}, {"layer_types": ["sliding_attention"]}]
)
def test_a_window_that_is_missing_off_or_smaller_than_a_block_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = export_drafter(small_drafter(**ALL_SLIDE), INFO, tmp_path, {})
    change_config(folder, lambda c: c.update(change))
    with pytest.raises(CheckpointError, match=r"layers \[0, 1\] have sliding windows|expected one for each of 2 layers"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("rope", "dtype", "window"),
    [
        (INFO.rope_parameters, torch.float32, {}), (INFO.rope_parameters, torch.bfloat16, {}), (LLAMA3, torch.float32, {}), (YARN, torch.float32, {}),
        (INFO.rope_parameters, torch.float32, {"sliding_window": 7}), (YARN, torch.float32, {"sliding_window": 30, "full_attention_layers": (1,)}),
    ],
    ids=["default-fp32", "default-bf16", "llama3", "yarn", "all-slide", "yarn-mixed"],
)  # fmt: skip
def test_transformers_loads_it_by_its_own_code_and_computes_the_same_hidden_states(
    tmp_path: Path, rope: dict[str, Any], dtype: torch.dtype, window: dict[str, Any]
) -> None:
    info = target_info(rope_parameters=rope, rope_theta=rope["rope_theta"])
    drafter = DFlashDrafter(
        DFlashConfig.from_target(info, DrafterConfig(num_layers=2, tap_layers=(1, 5), block_size=4, mask_token_id=16, **window))
    ).init_weights(3)
    export_drafter(drafter, info, tmp_path, {})
    ours = load_checkpoint(tmp_path, dtype=dtype)
    theirs = AutoModel.from_pretrained(tmp_path, trust_remote_code=True, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    features, block = (torch.randn(1, n, size, generator=generator).to(dtype) for n, size in ((90, 48), (4, 24)))
    positions = torch.arange(94)[None]
    cache = ours.new_cache()
    with torch.no_grad():
        ours.read_context(features, torch.tensor([0]), cache)
        want = ours.draft(block, torch.tensor([90]), cache)
        got = theirs(position_ids=positions, noise_embedding=block, target_hidden=features)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance)


@pytest.mark.parametrize("stop", [(), (7, 11, 30)], ids=["no-stop", "stops"])
@pytest.mark.parametrize("words", [64, 3, 1], ids=["nearly-none-accepted", "some-accepted", "all-accepted"])
def test_generation_by_the_exported_code_is_the_targets_own_greedy_output(tmp_path: Path, stop: tuple[int, ...], words: int) -> None:
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 8, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
    no_tokens = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    target = LlamaForCausalLM(LlamaConfig(**shape, **no_tokens, vocab_size=64, initializer_range=0.3)).eval()
    target.lm_head.weight.data[words:] = target.lm_head.weight.data[0]  # ties go to token 0, so that only so many tokens are ever said
    export_drafter(small_drafter(), INFO, tmp_path, {})
    drafter = AutoModel.from_pretrained(tmp_path, trust_remote_code=True, dtype=torch.float32)
    prompt = torch.tensor([[5, 9, 33, 21]])
    want = prompt
    with torch.no_grad():
        while want.shape[1] < 34 and (want.shape[1] == 4 or int(want[0, -1]) not in stop):
            want = torch.cat([want, target(input_ids=want).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(drafter.spec_generate(target, prompt, max_new_tokens=30, stop_token_ids=stop), want)


def set_nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors["layers.1.mlp.up_proj.weight"][0, 0] = float("nan")


CONFIG_DAMAGE: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda c: c.update(is_causal=True), "is_causal = True must be left out"),
    (lambda c: c["dflash_config"].update(causal=False), "dflash_config.causal = False must be left out"),
    (lambda c: c.update(aux_hidden_state_layer_ids=[1, 5]), "aux_hidden_state_layer_ids = [1, 5], expected [2, 6]"),
    (lambda c: c["dflash_config"].update(target_layer_ids=[1, 7]), "of which 0 to 6 can be tapped"),
    (lambda c: c["dflash_config"].update(target_layer_ids=[5, 1]), "must be ascending"),
    (lambda c: c.update(rope_theta=500000.0), "rope_theta = 500000.0, expected 10000.0"),
    (lambda c: c.update(rope_theta=5e5, rope_parameters={"rope_type": "default", "rope_theta": 5e5}), "inv_freq of the export differs"),
    (lambda c: c["dflash_config"].update(mask_token_id=0), "is the pad token of paper-target"),
    (lambda c: c["dflash_config"].update(mask_token_id=2), "is an end-of-text token"),
    (lambda c: c["dflash_config"].update(mask_token_id=64), "outside the vocabulary"),
    (lambda c: c.update(num_target_layers=9), "num_target_layers = 9, but paper-target has 8"),
    (lambda c: c.update(dtype="float32"), "dtype = 'float32', expected 'bfloat16'"),
    (lambda c: c.pop("auto_map"), "auto_map.AutoModel is missing"),
    (lambda c: c["speculators_config"]["proposal_methods"][0].update(speculative_tokens=4), "speculators_config.proposal_methods"),
    (lambda c: c.update(layer_types=["full_attention", "sliding_attention"]), "layers [1] have sliding windows"),
    (
        lambda c: c.update(layer_types=["sliding_attention"] * 2, use_sliding_window=True, sliding_window=6),
        "sliding_window_non_causal = True, expected False",
    ),
    (lambda c: c.update(sliding_window_non_causal=False), "sliding_window_non_causal = False, expected True"),
    (lambda c: c.update(head_dim=16), "head_dim = 16, but paper-target has 8"),
    (lambda c: c.update(sample_from_anchor=True), "sample_from_anchor = True"),
    (lambda c: c.update(dtype="x"), "Transformers cannot read it: AttributeError"),
    (lambda c: c["rope_parameters"].update(rope_type=""), "Transformers cannot read it: KeyError"),
]


@pytest.mark.parametrize(("damage", "message"), CONFIG_DAMAGE)
def test_verification_names_what_is_wrong_with_the_configuration(exported: Path, damage: Callable[[dict[str, Any]], object], message: str) -> None:
    verify_export(exported, INFO)
    change_config(exported, damage)
    with pytest.raises(CheckpointError) as caught:
        verify_export(exported, INFO)
    assert message in str(caught.value)


TENSOR_DAMAGE: list[tuple[Callable[[dict[str, torch.Tensor]], object], str]] = [
    (lambda t: t.pop("layers.1.self_attn.k_norm.weight"), "layers.1.self_attn.k_norm.weight: missing"),
    (lambda t: t.update(extra=torch.zeros(1)), "extra: unexpected"),
    (lambda t: t.update({"model.fc.weight": t.pop("fc.weight")}), "model.fc.weight: must be named fc.weight, without a prefix"),
    (lambda t: t.update({"norm.weight": torch.ones(25, dtype=torch.bfloat16)}), "norm.weight: shape [25], expected [24]"),
    (lambda t: t.update({"norm.weight": torch.ones(24)}), "norm.weight: dtype F32, expected BF16"),
    (lambda t: t.update({"norm.weight": torch.ones(24).to(torch.float8_e4m3fn)}), "norm.weight: dtype F8_E4M3, expected BF16"),
    (set_nan, "layers.1.mlp.up_proj.weight: has 1 values that are not finite"),
    (lambda t: t["fc.weight"].mul_(1.5), "fc.weight: differs from the trained weights"),
]


@pytest.mark.parametrize(("damage", "message"), TENSOR_DAMAGE)
def test_verification_names_every_wrong_tensor(exported: Path, damage: Callable[[dict[str, torch.Tensor]], object], message: str) -> None:
    change_tensors(exported, damage)
    with pytest.raises(CheckpointError) as caught:
        verify_export(exported, INFO, small_drafter())
    assert message in str(caught.value)


def shift_taps(fields: dict[str, Any]) -> None:
    fields["dflash_config"]["target_layer_ids"], fields["aux_hidden_state_layer_ids"] = [0, 4], [1, 5]


def change_mask(fields: dict[str, Any]) -> None:
    fields["dflash_config"]["mask_token_id"] = fields["mask_token_id"] = 17


@pytest.mark.parametrize(
    ("damage", "message"),
    [(shift_taps, "dflash_config.target_layer_ids = [0, 4], expected [1, 5]"), (change_mask, "dflash_config.mask_token_id = 17, expected 16")],
)
def test_a_configuration_that_is_right_for_another_drafter_is_held_against_the_trained_one(
    exported: Path, damage: Callable[[dict[str, Any]], None], message: str
) -> None:
    change_config(exported, damage)
    verify_export(exported, INFO)  # by itself it is a drafter as it should be
    with pytest.raises(CheckpointError, match=re.escape(message)):
        verify_export(exported, INFO, small_drafter())


@pytest.mark.parametrize("name", ["dflash.py", "README.md", "config.json", "model.safetensors"])
def test_verification_misses_no_file(exported: Path, name: str) -> None:
    (exported / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        verify_export(exported, INFO)


def test_another_targets_rope_is_found_by_its_frequencies(exported: Path) -> None:
    other: TargetInfo = target_info(rope_theta=1e6, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    with pytest.raises(CheckpointError, match="inv_freq of the export differs"):
        verify_export(exported, other)
    assert "gives other frequencies than that of paper-target" in "".join(target_problems(small_drafter().config, other))


def test_taps_of_the_default_are_accepted_for_every_depth() -> None:
    for layers in range(8, 80):
        assert default_tap_layers(layers, 5)[-1] <= layers - 2
