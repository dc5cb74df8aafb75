"""A drafter can begin as the target's own last layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflash_core.config import DrafterConfig
from dflash_core.drafter import DFlashConfig, start_from_target
from dflash_core.errors import ConfigError
from dflash_core.target import read_target_info
from tests.target.tiny import LAYERS, save_tiny_target

DRAFTER = DrafterConfig(num_layers=2, block_size=4, mask_token_id=259, tap_layers=(0, 2))


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_draft_layers_are_the_targets_last_layers(family: str, tmp_path: Path) -> None:
    info = read_target_info(save_tiny_target(family, tmp_path / family))
    config = DFlashConfig.from_target(info, DRAFTER)
    weights = start_from_target(config, info, seed=0).state_dict()
    target = {name.removeprefix("model."): tensor.float() for name, tensor in load_file(Path(info.path) / "model.safetensors").items()}
    own = [name for name in weights if name.startswith("layers.") and "_norm." not in name.replace("layernorm.", "")]
    assert len(own) == 2 * 9
    for name in own:
        _, layer, rest = name.split(".", 2)
        assert torch.equal(weights[name], target[f"layers.{LAYERS - 2 + int(layer)}.{rest}"]), name
    assert torch.equal(weights["norm.weight"], target["norm.weight"])
    if family == "qwen3":
        assert torch.equal(weights["layers.1.self_attn.k_norm.weight"], target[f"layers.{LAYERS - 1}.self_attn.k_norm.weight"])


def test_norms_that_the_target_lacks_keep_the_scale_of_its_queries(tmp_path: Path) -> None:
    info = read_target_info(save_tiny_target("llama", tmp_path / "llama"))
    drafter = start_from_target(DFlashConfig.from_target(info, DRAFTER), info, seed=0)
    attention = drafter.layers[0].self_attn
    x_NH = torch.randn(4096, info.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = attention.q_proj(x_NH * drafter.layers[0].input_layernorm.weight).unflatten(-1, (-1, info.head_dim))
    with torch.no_grad():
        normed = attention.q_norm(plain)
    assert normed.square().mean().sqrt() == pytest.approx(plain.square().mean().sqrt().item(), rel=0.1)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gemma2", {}, "parts that draft layers lack: .*feedforward_layernorm"),
        ("qwen2", {}, r"self_attn.k_proj.bias"),
        ("qwen3_moe", {}, "mlp.experts|mlp.gate"),
        ("llama", {"intermediate_size": 24}, r"no tensor layers.2.mlp.gate_proj.weight of shape \[24, 32\], but one of \[48, 32\]"),
    ],
)
def test_layers_of_another_shape_are_refused(family: str, changes: dict[str, int], message: str, tmp_path: Path) -> None:
    info = read_target_info(save_tiny_target(family, tmp_path / family))
    with pytest.raises(ConfigError, match=message):
        start_from_target(DFlashConfig.from_target(info, DRAFTER.model_copy(update=changes)), info, seed=0)
