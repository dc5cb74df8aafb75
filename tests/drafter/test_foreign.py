"""Drafters of other trainers come in with every tensor as it was and every layer where it was, or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3Config
from typer.testing import CliRunner

from dflash_core.config import DrafterConfig
from dflash_core.drafter import DFlashConfig, import_drafter, load_checkpoint, shape_differences
from dflash_core.errors import CheckpointError
from flows.cli import app
from tests.drafter.small import small_drafter, target_info
from tests.target.tiny import save_tiny_target

INFO = target_info()
CONFIG = small_drafter().config
BODY = {name: tensor.to(torch.bfloat16) for name, tensor in small_drafter().state_dict().items()}
SHAPE: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8,
    "vocab_size": 64, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip

Change = Callable[[dict[str, Any], dict[str, Tensor]], object]


def nothing(fields: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Leave the checkpoint as the package writes it."""


def written_by_transformers(**further: Any) -> dict[str, Any]:
    """What ``save_pretrained`` of a model with a Qwen3Config puts into config.json."""
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = Qwen3Config(**SHAPE, rope_parameters=rope, dtype="bfloat16", architectures=["DFlashDraftModel"], **further)
    return {**config.to_diff_dict(), "model_type": "qwen3"}


def zlab() -> dict[str, Any]:
    """As on the hub: written by Transformers 4.57, the rope's base at the top."""
    fields = written_by_transformers(block_size=4, num_target_layers=8, dflash_config={"mask_token_id": 16, "target_layer_ids": [1, 5]})
    del fields["rope_parameters"]
    return {**fields, "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "rope_theta": 10000.0, "rope_scaling": None}


def zlab_newer() -> dict[str, Any]:
    """Block size and depth among the drafter's own settings, as in those for Qwen3.5."""
    own = {"mask_token_id": 16, "target_layer_ids": [1, 5], "block_size": 4, "num_target_layers": 8}
    return written_by_transformers(dflash_config=own)


def specforge() -> dict[str, Any]:
    """``specforge export --to hf`` adds the rope's base for older readers."""
    own = {"mask_token_id": 16, "target_layer_ids": [1, 5], "projector_type": None}
    return {**written_by_transformers(block_size=4, num_target_layers=8, dflash_config=own), "rope_theta": 10000.0}


def speculators() -> dict[str, Any]:
    methods = [{"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}]
    verifier = {"name_or_path": "paper-target", "architectures": ["LlamaForCausalLM"]}
    return {
        "architectures": ["DFlashDraftModel"], "block_size": 4, "draft_vocab_size": 64, "dtype": "bfloat16", "mask_token_id": 16,
        "aux_hidden_state_layer_ids": [2, 6], "sample_from_anchor": False, "sliding_window_non_causal": False, "target_hidden_size": None,
        "speculators_config": {"algorithm": "dflash", "default_proposal_method": "greedy", "proposal_methods": methods, "verifier": verifier},
        "speculators_model_type": "dflash", "speculators_version": "0.9.0", "transformer_layer_config": written_by_transformers(),
    }  # fmt: skip


def checkpoint(folder: Path, fields: dict[str, Any], change: Change = nothing) -> Path:
    folder.mkdir()
    tensors = {name: tensor.clone() for name, tensor in BODY.items()}
    change(fields, tensors)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("write", [zlab, zlab_newer, specforge, speculators])
def test_every_layout_comes_in_with_the_same_shape_layers_and_tensors(tmp_path: Path, write: Callable[[], dict[str, Any]]) -> None:
    imported = import_drafter(checkpoint(tmp_path / "theirs", write()), tmp_path / "ours", INFO)
    drafter = load_checkpoint(tmp_path / "ours")
    assert drafter.config == imported.config == CONFIG
    assert (imported.dtype, imported.left_out) == ("bfloat16", ())
    assert all(torch.equal(tensor, BODY[name]) for name, tensor in drafter.state_dict().items())


def test_files_may_be_split_and_names_prefixed_and_what_is_the_targets_is_left_out(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "theirs", speculators())
    (source / "model.safetensors").unlink()
    named = {f"model.{name}": tensor for name, tensor in BODY.items()} | {"model.embed_tokens.weight": torch.zeros(64, 24), "t2d": torch.ones(64)}
    files = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(named)}
    for file in set(files.values()):
        save_file({name: named[name].clone() for name in named if files[name] == file}, source / file)
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    imported = import_drafter(source, tmp_path / "ours", INFO)
    assert imported.left_out == ("model.embed_tokens.weight", "t2d")
    assert all(torch.equal(tensor, BODY[name]) for name, tensor in load_checkpoint(tmp_path / "ours").state_dict().items())


def test_without_a_target_a_checkpoint_that_says_how_deep_its_target_is_comes_in(tmp_path: Path) -> None:
    assert import_drafter(checkpoint(tmp_path / "theirs", zlab()), tmp_path / "ours").config == replace(CONFIG, target_name="")
    with pytest.raises(CheckpointError, match="does not say how many layers the target has"):
        import_drafter(checkpoint(tmp_path / "speculators", speculators()), tmp_path / "other")


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 6}


@pytest.mark.parametrize("write", [zlab, specforge, speculators])
def test_sliding_windows_come_in_from_every_layout(tmp_path: Path, write: Callable[[], dict[str, Any]]) -> None:
    fields = write()
    fields.get("transformer_layer_config", fields).update(SLIDING)
    imported = import_drafter(checkpoint(tmp_path / "theirs", fields), tmp_path / "ours", INFO)
    windowed = replace(CONFIG, sliding_window=6, sliding_layers=(0,))
    assert load_checkpoint(tmp_path / "ours").config == imported.config == windowed
    settings = DrafterConfig.model_validate_json(json.dumps(yaml.safe_load(imported.settings())["drafter"]))
    assert shape_differences(windowed, DFlashConfig.from_target(INFO, settings)) == []
    assert shape_differences(windowed, CONFIG) == ["sliding_window is 6, here 0", "sliding_layers is (0,), here ()"]
    assert shape_differences(CONFIG, windowed) == [], "a drafter that sees everything may get a window"


REFUSED: list[tuple[str, Change, str]] = [
    ("no-window", lambda c, t: c.update(SLIDING, sliding_window=None), "layers [0] have sliding windows: expected one of at least block_size = 4"),
    ("linear", lambda c, t: c.update(layer_types=["full_attention", "linear_attention"]), "layer_types.1 = 'linear_attention'"),
    ("both-ways", lambda c, t: c.update(SLIDING, is_causal=False), "is_causal lets the sliding layers [0] see their block both ways"),
    ("swa", lambda c, t: c["dflash_config"].update(use_swa=True, swa_window_size=6), "dflash_config.use_swa = True"),
    ("bias", lambda c, t: c.update(attention_bias=True), "expected attention_bias = false"),
    ("causal", lambda c, t: c.update(is_causal=True), "is_causal is true"),
    ("causal-inside", lambda c, t: c["dflash_config"].update(causal=True), "dflash_config.causal is true"),
    ("domino", lambda c, t: c["dflash_config"].update(projector_type="domino"), "projector_type = 'domino'"),
    ("dflash2", lambda c, t: c["dflash_config"].update(conv_kernel_size=4, conv_group_size=8), "conv_kernel_size = 4"),
    ("too-deep", lambda c, t: c["dflash_config"].update(target_layer_ids=[1, 7]), "of which 0 to 6 can be tapped"),
    ("unordered", lambda c, t: c["dflash_config"].update(target_layer_ids=[5, 1]), "must be ascending"),
    ("no-mask", lambda c, t: c["dflash_config"].pop("mask_token_id"), "expected the field dflash_config.mask_token_id"),
    ("mask-is-pad", lambda c, t: c["dflash_config"].update(mask_token_id=0), "is the pad token of paper-target"),
    ("rope-base", lambda c, t: c.update(rope_theta=5e5), "gives other frequencies than that of paper-target"),
    ("other-target", lambda c, t: c.update(num_target_layers=9), "num_target_layers = 9, but paper-target has 8"),
    ("heads", lambda c, t: c.update(num_attention_heads=3), "num_attention_heads = 3, but paper-target has 6"),
    ("missing", lambda c, t: t.pop("layers.1.self_attn.q_norm.weight"), "layers.1.self_attn.q_norm.weight: missing"),
    ("fused", lambda c, t: t.update({"layers.0.self_attn.qkv_proj.weight": t["fc.weight"].clone()}), "qkv_proj.weight: unexpected"),
    ("fewer-taps", lambda c, t: t.update({"fc.weight": torch.zeros(24, 24, dtype=torch.bfloat16)}), "fc.weight: shape [24, 24], expected [24, 48]"),
    ("nan", lambda c, t: t["norm.weight"].fill_(float("nan")), "norm.weight: has 24 values that are not finite"),
    ("integers", lambda c, t: t.update({"norm.weight": torch.ones(24, dtype=torch.int8)}), "norm.weight: dtype torch.int8"),
    ("dtypes", lambda c, t: t.update({"norm.weight": torch.ones(24)}), "of several dtypes, torch.bfloat16, torch.float32"),
]


@pytest.mark.parametrize(("change", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_does_not_fit_is_named_and_nothing_is_written(tmp_path: Path, change: Change, message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        import_drafter(checkpoint(tmp_path / "theirs", zlab(), change), tmp_path / "ours", INFO)
    assert message in str(caught.value)
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c, t: c.update(sample_from_anchor=True), "'dflash' with sample_from_anchor = True"),
        (
            lambda c, t: c.update(sliding_window_non_causal=True, transformer_layer_config={**c["transformer_layer_config"], **SLIDING}),
            "sliding_window_non_causal lets the sliding layers [0] see their block both ways",
        ),
        (lambda c, t: c.update(speculators_model_type="eagle3"), "expected a drafter of a variant in dflash, found 'eagle3'"),
        (lambda c, t: c.update(aux_hidden_state_layer_ids=None), "aux_hidden_state_layer_ids = None"),
        (lambda c, t: c.update(aux_hidden_state_layer_ids=[0, 6]), "of which 0 to 6 can be tapped"),
    ],
    ids=["anchor", "both-ways", "eagle", "no-layers", "embedding-tapped"],
)
def test_what_speculators_can_be_and_we_cannot_is_named(tmp_path: Path, change: Change, message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        import_drafter(checkpoint(tmp_path / "theirs", speculators(), change), tmp_path / "ours", INFO)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("write", "key", "value"),
    [
        (zlab, "dflash_config", "x"), (zlab, "layer_types", 3), (zlab, "num_attention_heads", "x"), (zlab, "rope_parameters", [1]),
        (speculators, "transformer_layer_config", [1]), (speculators, "aux_hidden_state_layer_ids", ["a"]), (speculators, "speculators_config", 1),
    ],
)  # fmt: skip
def test_settings_of_the_wrong_kind_are_named(tmp_path: Path, write: Callable[[], dict[str, Any]], key: str, value: object) -> None:
    source = checkpoint(tmp_path / "theirs", write() | {key: value})
    with pytest.raises(CheckpointError, match=f"{key}.* = .*{value if isinstance(value, int | str) else value[0]}"):  # type: ignore[index]
        import_drafter(source, tmp_path / "ours", INFO)


def test_layouts_that_contradict_each_other_in_one_file_are_refused(tmp_path: Path) -> None:
    both = {**zlab(), **speculators()}
    assert import_drafter(checkpoint(tmp_path / "both", both), tmp_path / "ours", INFO).config == CONFIG
    shifted = both | {"dflash_config": {**both["dflash_config"], "target_layer_ids": [0, 4]}, "rms_norm_eps": 0.5}
    with pytest.raises(CheckpointError) as caught:
        import_drafter(checkpoint(tmp_path / "shifted", shifted), tmp_path / "other", INFO)
    assert "dflash_config.target_layer_ids = [0, 4], but speculators reads [1, 5]" in str(caught.value)
    assert "rms_norm_eps = 0.5, but speculators reads" in str(caught.value)


def test_pickles_are_never_loaded_and_the_way_around_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "training_state.pt").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match="specforge export --to hf"):
        import_drafter(tmp_path / "run", tmp_path / "ours")
    source = checkpoint(tmp_path / "bin", zlab())
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickles and are never loaded"):
        import_drafter(source, tmp_path / "ours")


def test_the_command_writes_the_folder_once_and_prints_the_settings_to_go_on_with(tmp_path: Path) -> None:
    arguments = ["import", str(checkpoint(tmp_path / "theirs", zlab())), str(tmp_path / "ours")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    settings = yaml.safe_load(done.stdout[done.stdout.index("drafter:") :])["drafter"]
    wanted = DFlashConfig.from_target(INFO, DrafterConfig.model_validate_json(json.dumps(settings)))
    assert settings["initial_checkpoint"] == str(tmp_path / "ours")
    assert shape_differences(load_checkpoint(tmp_path / "ours").config, wanted) == [], "training with these settings begins with it"
    again = CliRunner().invoke(app, arguments)
    assert (again.exit_code, "is there already" in again.stderr) == (1, True)


def test_the_command_holds_the_drafter_against_the_target_that_is_named(tmp_path: Path) -> None:
    target = save_tiny_target("llama", tmp_path / "target")
    arguments = ["import", str(checkpoint(tmp_path / "theirs", zlab())), str(tmp_path / "ours"), "--target", str(target)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1
    assert "config.json: hidden_size = 24, but target has 32" in done.stderr
    assert "config.json: num_target_layers = 8, but target has 4" in done.stderr
    assert not (tmp_path / "ours").exists()
