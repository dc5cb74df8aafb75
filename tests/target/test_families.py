"""Targets that are built otherwise than a plain decoder: the text part of a vision-language model, and layers that carry a state."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_core.errors import TargetError
from dflash_core.target import TargetModel
from tests.target.tiny import HYBRID, LAYERS, save_tiny_target, save_tokenizer, tiny_config


@pytest.fixture(scope="module")
def wrapped(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    """Gemma 3 with its vision tower."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    text = tiny_config("gemma3_text").to_dict()
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision, bos_token_id=257, eos_token_id=258, pad_token_id=256)
    folder = tmp_path_factory.mktemp("gemma3")
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)
    save_tokenizer(folder)
    return TargetModel.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(params=list(HYBRID))
def hybrid(request: pytest.FixtureRequest, tiny_folder: Callable[[str], Path]) -> TargetModel:
    return TargetModel.from_pretrained(tiny_folder(request.param), dtype=torch.float32)


def _states(target: TargetModel, ids_BT: torch.Tensor) -> Any:
    return target._model(input_ids=ids_BT, output_hidden_states=True, use_cache=False).hidden_states


def test_the_text_part_of_a_vision_language_model_is_found_tapped_and_packed(wrapped: TargetModel) -> None:
    assert type(wrapped._model).__name__ == "Gemma3ForConditionalGeneration"
    assert (wrapped.info.num_layers, wrapped.info.hidden_size) == (LAYERS, 32)
    assert wrapped.info.embedding_scale == pytest.approx(32**0.5)
    ids_BT = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(0))
    states = _states(wrapped, ids_BT)
    features_BTF = wrapped.hidden_states(ids_BT, None, (0, 2))
    assert torch.equal(features_BTF, torch.cat([states[1], states[3]], dim=-1))
    assert wrapped.packs
    packed_TF = wrapped.packed_hidden_states([ids_BT[0].int(), ids_BT[1, :9].int()], (0, 2))
    torch.testing.assert_close(packed_TF, torch.cat([features_BTF[0], features_BTF[1, :9]]), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the weights stay in fp8")
def test_a_checkpoint_in_fp8_is_loaded_by_its_scales(tmp_path: Path) -> None:
    save_tiny_target("llama", tmp_path, hidden_size=64, intermediate_size=64, head_dim=16)
    weights, scaled = load_file(tmp_path / "model.safetensors"), {}
    for name, weight in list(weights.items()):
        if name.endswith("proj.weight"):
            blocks = weight.unflatten(0, (-1, 32)).unflatten(2, (-1, 32))
            scales = blocks.abs().amax((1, 3)) / 448
            weights[name] = (blocks / scales[:, None, :, None]).reshape(weight.shape).to(torch.float8_e4m3fn)
            weights[f"{name}_scale_inv"] = scales
            scaled[name] = (weights[name].float().view_as(blocks) * scales[:, None, :, None]).reshape(weight.shape)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    target = TargetModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    found = dict(target._model.named_parameters())
    assert all(torch.equal(found[name], value.to(torch.bfloat16)) for name, value in scaled.items())
    assert target.packed_hidden_states([torch.arange(9, dtype=torch.int32)], (0, 2)).isfinite().all()


def test_layers_with_a_state_are_tapped_bit_for_bit_up_to_the_deepest(hybrid: TargetModel) -> None:
    ids_BT = torch.randint(0, 256, (2, 21), generator=torch.Generator().manual_seed(0))
    states = _states(hybrid, ids_BT)
    assert torch.equal(hybrid.hidden_states(ids_BT, None, (0, 2)), torch.cat([states[1], states[3]], dim=-1))
    norm = getattr(hybrid._structure.decoder, hybrid._structure.norm_name)
    assert torch.equal(norm(hybrid.hidden_states(ids_BT, None, (LAYERS - 1,))), states[-1])


def test_a_target_whose_state_cannot_be_taken_back_is_told_so_before_it_decodes(hybrid: TargetModel) -> None:
    with pytest.raises(TargetError, match=r"layers of the kind linear_attention, whose state cannot be cropped"):
        hybrid.new_cache()
