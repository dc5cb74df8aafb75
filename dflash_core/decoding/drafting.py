"""A DFlash drafter at work on one request: it takes in what was committed and drafts the next block in one pass.

Shapes: B = 1 request, T newly committed positions, S = K + 1 slots of the block, F tapped features, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dflash_core.drafter import DFlashDrafter
    from dflash_core.target import TargetVocabulary


class BlockDrafter:
    """Drafts for one request with the target's own embedding and head. A ``Proposer`` of ``generate.py``."""

    def __init__(self, drafter: DFlashDrafter, vocabulary: TargetVocabulary):
        self.tap_layers = drafter.config.tap_layers
        self._drafter = drafter
        self._vocabulary = vocabulary
        self._cache = drafter.new_cache()

    def propose(self, features_BTF: Tensor, last_B: Tensor, anchor: int, count: int) -> Tensor:
        """Logits [B, count, V] for the tokens after ``last_B`` at position ``anchor``; the block is that token and ``count`` mask tokens."""
        device = features_BTF.device
        context_BT = torch.arange(self._cache.length, anchor, device=device)[None]
        self._cache.append(self._drafter.context_keys_values(features_BTF, context_BT))
        masks_BK = last_B.new_full((len(last_B), count), self._drafter.config.mask_token_id)
        block_BS = torch.cat([last_B[:, None], masks_BK], dim=1)
        positions_BS = torch.arange(anchor, anchor + 1 + count, device=device)[None]
        hidden_BSH = self._drafter.forward_cached(self._vocabulary.embed(block_BS), positions_BS, self._cache)
        return self._vocabulary.logits(hidden_BSH[:, 1:])
