"""What a drafter inherits from its target, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from dflash_core.config import DrafterConfig
from dflash_core.drafter import DFlashConfig, DFlashDrafter, default_tap_layers
from dflash_core.errors import ConfigError
from tests.drafter.small import drafter_config, target_info

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}


@pytest.mark.parametrize(
    ("layers", "taps", "expected"),
    [(36, 5, (1, 9, 17, 25, 33)), (30, 5, (1, 8, 14, 20, 27)), (30, 3, (1, 14, 27)), (28, 1, (14,)), (48, 5, (1, 12, 23, 34, 45))],
)
def test_default_taps_are_those_of_the_released_drafters(layers: int, taps: int, expected: tuple[int, ...]) -> None:
    assert default_tap_layers(layers, taps) == expected


def test_a_drafter_inherits_the_target_and_keeps_what_the_user_chose() -> None:
    config = DFlashConfig.from_target(target_info(num_layers=30), DrafterConfig(num_layers=3, block_size=8, mask_token_id=16, intermediate_size=48))
    assert (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (24, 6, 2, 8, 64)
    assert (config.tap_layers, config.intermediate_size, config.block_size, config.spec.name) == ((1, 14, 27), 48, 8, "dflash")
    assert config.feature_size == 72


@pytest.mark.parametrize(
    ("chosen", "info", "message"),
    [
        ({"mask_token_id": 64}, {}, "drafter.mask_token_id = 64: outside the vocabulary of paper-target, 0..63"),
        ({"mask_token_id": 0}, {}, "drafter.mask_token_id = 0: is the pad token"),
        ({"mask_token_id": 2}, {}, "drafter.mask_token_id = 2: is an end-of-text token"),
        ({"tap_layers": (1, 7)}, {}, "has 8 layers, of which 0 to 6 can be tapped"),
        ({"num_taps": 5}, {"num_layers": 4}, "must be ascending and without repetition"),
        ({}, {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "changes with the length of the text"),
        ({}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial rotary factor"),
        ({}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}, "M-RoPE"),
    ],
)
def test_what_a_drafter_cannot_be_is_refused_with_field_value_and_remedy(chosen: dict[str, Any], info: dict[str, Any], message: str) -> None:
    settings = DrafterConfig(**{"num_layers": 2, "mask_token_id": 16, **chosen})
    with pytest.raises(ConfigError) as caught:
        DFlashConfig.from_target(target_info(**info), settings)
    assert message in str(caught.value)


def test_the_model_holds_exactly_the_listed_tensors() -> None:
    config = drafter_config(num_layers=3)
    shapes = {name: tuple(tensor.shape) for name, tensor in DFlashDrafter(config).state_dict().items()}
    assert shapes == config.tensor_shapes()
    assert len(shapes) == 11 * 3 + 3
    assert config.num_parameters() == sum(p.numel() for p in DFlashDrafter(config).parameters())


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 1e5}, LLAMA3, YARN, LINEAR], ids=lambda rope: str(rope["rope_type"]))
def test_the_rotation_is_the_targets_own(rope: dict[str, Any]) -> None:
    info = target_info(rope_parameters=rope, rope_theta=rope["rope_theta"], head_dim=16)
    drafter = DFlashDrafter(DFlashConfig.from_target(info, DrafterConfig(num_layers=2, mask_token_id=16)))
    llama = LlamaConfig(hidden_size=96, num_attention_heads=6, head_dim=16, max_position_embeddings=512, rope_parameters=dict(rope))
    positions = torch.tensor([[0, 1, 2, 63, 300, 511]])
    want_cos, want_sin = LlamaRotaryEmbedding(llama)(torch.zeros(1), positions)
    cos, sin = drafter.rotation(positions, torch.float32)
    assert torch.equal(cos[:, :, 0], want_cos)
    assert torch.equal(sin[:, :, 0], want_sin)


def test_frequencies_stay_float32_when_the_drafter_is_cast() -> None:
    drafter = DFlashDrafter(drafter_config())
    exact = drafter.inv_freq.clone()
    drafter.to(torch.bfloat16)
    assert drafter.fc.weight.dtype == torch.bfloat16
    assert torch.equal(drafter.inv_freq, exact)
    assert drafter.inv_freq.dtype == torch.float32


def test_fresh_weights_depend_on_the_seed_and_each_tensors_name_alone() -> None:
    first, again, other = (DFlashDrafter(drafter_config()).init_weights(seed).state_dict() for seed in (1, 1, 2))
    deeper = DFlashDrafter(drafter_config(num_layers=4)).init_weights(1).state_dict()
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])
        assert torch.equal(tensor, deeper[name])
        assert tensor.dim() == 1 or not torch.equal(tensor, other[name])
