"""Documents side by side in one row, none of which sees another: a pass of the target without padding.

    packed = PackedDecoder(structure, depth)          # the target's own layers under an attention of ours
    packed(Documents.of([ids_a, ids_b], device))      # hooks on the layers see [1, T, H]

Linear layers and norms do not mind whose token is whose, positions begin anew with every document, and attention is told where documents end.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from dflash_core.target.attention import Documents, packed_attention
from dflash_core.target.fused import fused, with_fused_attention
from dflash_core.target.structure import Structure, truncated_decoder

ATTENTION = "dflash_packed"
FAMILIES = frozenset({"gemma2", "gemma3_text", "gpt_oss", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe"})
"""Model types of which a test shows that packed equals unpacked. Layers that carry a state from token to token can never be among them."""


def can_pack(structure: Structure) -> bool:
    """Whether the target is of a family that is known to give the same packed."""
    from transformers import AttentionInterface

    config: Any = structure.decoder.config
    AttentionInterface.register(ATTENTION, packed_attention)
    return config.model_type in FAMILIES and not getattr(config, "use_bidirectional_attention", None)


class PackedDecoder:
    """The first ``depth`` layers of a target, for documents side by side. Shares all weights; the target itself is left as it is."""

    def __init__(self, structure: Structure, depth: int) -> None:
        self._decoder = _copy_of_modules(truncated_decoder(structure, depth), {})

    def __call__(self, documents: Documents) -> None:
        """Run. The layers' hooks get what they put out, [1, T, H]."""
        self._decoder(input_ids=documents.ids, position_ids=documents.positions, use_cache=False, documents=documents)


def _copy_of_modules(module: torch.nn.Module, configs: dict[int, Any]) -> Any:
    """The same weights and hooks under new modules whose configuration names our attention: other threads may use the old ones meanwhile."""
    if (fast := fused(module)) is not None:
        return fast
    clone = copy.copy(module)
    clone._modules = {name: child if child is None else _copy_of_modules(child, configs) for name, child in module._modules.items()}
    config = getattr(module, "config", None)
    if config is not None:
        if id(config) not in configs:
            configs[id(config)] = copy.copy(config)
            configs[id(config)]._attn_implementation = ATTENTION  # unknown to the makers of masks, so none is made
        clone.config = configs[id(config)]
    return with_fused_attention(clone)
