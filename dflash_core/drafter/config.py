"""The shape of a drafter: everything inherited from the target or chosen by the user, and the one list of its tensors.

``DFlashConfig.from_target(info, config.drafter)`` makes it for training. How it is spelled
for the serving runtimes, and read back, is in ``serving.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_core.drafter.rope import flat_rope_parameters
from dflash_core.drafter.spec import SPECS, DrafterSpec
from dflash_core.errors import ConfigError, Problem

if TYPE_CHECKING:
    from dflash_core.config import DrafterConfig
    from dflash_core.target.info import TargetInfo


def default_tap_layers(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """0-based target layers whose outputs are tapped, spread evenly (arXiv 2602.06036 and z-lab's released drafters).

    One tap: n // 2. Otherwise round(1 + i (n - 4) / (K - 1)) for i = 0..K-1, halves to even: n = 36, K = 5 gives 1, 9, 17, 25, 33.
    """
    if num_taps == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + i * (num_target_layers - 4) / (num_taps - 1)) for i in range(num_taps))


def chosen_tap_layers(drafter: DrafterConfig, num_target_layers: int) -> tuple[int, ...]:
    """0-based target layers that a drafter's settings tap: those they name, or else ``default_tap_layers``."""
    return drafter.tap_layers or default_tap_layers(num_target_layers, drafter.num_taps or drafter.num_layers)


@dataclass(frozen=True)
class DFlashConfig:
    """Dimensions and constants of one drafter.

    target_name:       the target it drafts for, as servers find it
    num_target_layers: layers of the target
    tap_layers:        0-based target layers whose outputs are its features, ascending (K of them)
    hidden_size:       H, the target's own
    vocab_size:        V, the target's own
    block_size:        S: one anchor and S - 1 drafted tokens
    mask_token_id:     stands for "to be drafted"
    rope_parameters:   flat: rope_type, rope_theta and whatever that type needs
    sliding_window:    positions that a query of a sliding layer sees, its own included; 0 where there is no such layer
    sliding_layers:    0-based draft layers with that window, ascending; all others have full attention
    spec_name:         the variant, a key of ``SPECS``
    """

    target_name: str
    num_target_layers: int
    tap_layers: tuple[int, ...]
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    block_size: int
    mask_token_id: int
    sliding_window: int = 0
    sliding_layers: tuple[int, ...] = ()
    spec_name: str = "dflash"

    @property
    def spec(self) -> DrafterSpec:
        """The variant."""
        return SPECS[self.spec_name]

    @property
    def feature_size(self) -> int:
        """F = K * H, width of the tapped features of one token."""
        return len(self.tap_layers) * self.hidden_size

    @property
    def layer_types(self) -> list[str]:
        """What each draft layer sees, as configurations of Transformers spell it."""
        return ["sliding_attention" if layer in self.sliding_layers else "full_attention" for layer in range(self.num_layers)]

    @property
    def full_layers(self) -> list[int]:
        """0-based draft layers with full attention, ascending."""
        return [layer for layer in range(self.num_layers) if layer not in self.sliding_layers]

    def window_of(self, layer: int) -> int:
        """Sliding window of a draft layer; 0 for full attention."""
        return self.sliding_window if layer in self.sliding_layers else 0

    @classmethod
    def from_target(cls, info: TargetInfo, drafter: DrafterConfig) -> DFlashConfig:
        """Inherit dimensions, rope and vocabulary from the target and take the rest from the user's settings.

        Raises:
            ConfigError: taps that are not layer outputs below the target's last layer, a mask token that is out of range, pad or eos, or a
                rope that the drafter cannot have.
        """
        taps = chosen_tap_layers(drafter, info.num_layers)
        problems = [*tap_problems(taps, info), *mask_token_problems(drafter.mask_token_id, info)]
        if problems:
            raise ConfigError(f"drafter for {info.name}", problems)
        return cls(
            target_name=info.served_as,
            num_target_layers=info.num_layers,
            tap_layers=taps,
            hidden_size=info.hidden_size,
            intermediate_size=drafter.intermediate_size or info.intermediate_size,
            num_layers=drafter.num_layers,
            num_heads=info.num_heads,
            num_kv_heads=info.num_kv_heads,
            head_dim=info.head_dim,
            vocab_size=info.vocab_size,
            rms_norm_eps=info.rms_norm_eps,
            rope_parameters=flat_rope_parameters(info),
            max_position_embeddings=info.max_position_embeddings,
            block_size=drafter.block_size,
            mask_token_id=drafter.mask_token_id,
            sliding_window=drafter.sliding_window or 0,
            sliding_layers=drafter.sliding_layers,
            spec_name=drafter.spec,
        )

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of a drafter, the one list that model, checkpoint and export are held to: 11 L + 3 of them."""
        H, I, D = self.hidden_size, self.intermediate_size, self.head_dim  # noqa: E741
        q, kv = self.num_heads * D, self.num_kv_heads * D
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (H,),
            "self_attn.q_proj.weight": (q, H),
            "self_attn.k_proj.weight": (kv, H),
            "self_attn.v_proj.weight": (kv, H),
            "self_attn.o_proj.weight": (H, q),
            "self_attn.q_norm.weight": (D,),
            "self_attn.k_norm.weight": (D,),
            "post_attention_layernorm.weight": (H,),
            "mlp.gate_proj.weight": (I, H),
            "mlp.up_proj.weight": (I, H),
            "mlp.down_proj.weight": (H, I),
        }
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, self.feature_size), "hidden_norm.weight": (H,), "norm.weight": (H,)}
        for i in range(self.num_layers):
            shapes.update({f"layers.{i}.{name}": shape for name, shape in layer.items()})
        return shapes

    def num_parameters(self) -> int:
        """Parameters of the drafter; embedding and head belong to the target."""
        return sum(math.prod(shape) for shape in self.tensor_shapes().values())


def mask_token_problems(mask_token_id: int, info: TargetInfo) -> Iterator[Problem]:
    """What is wrong with a mask token for this target: out of range, or a token that means something at the end of a text."""
    path = "drafter.mask_token_id"
    if not 0 <= mask_token_id < info.vocab_size:
        yield Problem(path, mask_token_id, f"outside the vocabulary of {info.name}, 0..{info.vocab_size - 1}", "Choose a spare special token")
    if mask_token_id == info.pad_token_id:
        yield Problem(path, mask_token_id, f"is the pad token of {info.name}", "Choose a spare special token")
    if mask_token_id in info.eos_token_ids:
        yield Problem(path, mask_token_id, f"is an end-of-text token of {info.name}", "Choose a spare special token")
    if mask_token_id == info.bos_token_id:
        yield Problem(path, mask_token_id, f"is the token that begins a text of {info.name}", "Choose a spare special token")


def tap_problems(taps: tuple[int, ...], info: TargetInfo) -> Iterator[Problem]:
    """What is wrong with tap layers for this target: out of order, repeated (as the default is for very shallow targets), or too deep."""
    last = info.num_layers - 2  # the last layer's output is only to be had after the final norm
    remedy = f"Name ascending layers from 0 to {last} in drafter.tap_layers"
    if not taps or list(taps) != sorted(set(taps)):
        yield Problem("drafter.tap_layers", list(taps), "must be ascending and without repetition", remedy)
    elif taps[0] < 0 or taps[-1] > last:
        yield Problem("drafter.tap_layers", list(taps), f"{info.name} has {info.num_layers} layers, of which 0 to {last} can be tapped", remedy)
