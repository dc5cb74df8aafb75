"""A DFlash drafter at work on a batch of requests: it takes in what was committed and drafts every request's next block in one pass.

Shapes: R requests, T positions, S = K + 1 slots of the block, F tapped features, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dflash_core.drafter import DFlashDrafter
    from dflash_core.target import TargetVocabulary


class Proposer(Protocol):
    """Whatever drafts. One instance serves one batch at a time, from whose first positions it begins anew, and keeps its own cache."""

    tap_layers: tuple[int, ...]

    def read(self, features_RTF: Tensor, start_R: Tensor) -> None:
        """Take in the target's features of T positions of each row from ``start_R`` on. Those that were not committed come again later."""
        ...

    def propose(self, last_R: Tensor, anchor_R: Tensor) -> Tensor:
        """Logits [R, K, V] for the K tokens after ``last_R``, which stand at the positions ``anchor_R``: all before them was read."""
        ...


class BlockDrafter:
    """Drafts blocks of one size with the target's own embedding and head."""

    def __init__(self, drafter: DFlashDrafter, vocabulary: TargetVocabulary, *, rows: int, capacity: int, block_size: int):
        self.tap_layers = drafter.config.tap_layers
        self._drafter, self._vocabulary = drafter, vocabulary
        self._cache = drafter.new_cache(rows, capacity)
        self._masks_RK = torch.full((rows, block_size - 1), drafter.config.mask_token_id, device=vocabulary.device)

    def read(self, features_RTF: Tensor, start_R: Tensor) -> None:
        """See ``Proposer``."""
        self._drafter.read_context(features_RTF, start_R, self._cache)

    def propose(self, last_R: Tensor, anchor_R: Tensor) -> Tensor:
        """See ``Proposer``: the block is the last token and mask tokens."""
        block_RS = torch.cat([last_R[:, None], self._masks_RK], dim=1)
        hidden_RSH = self._drafter.draft(self._vocabulary.embed(block_RS), anchor_R, self._cache)
        return self._vocabulary.logits(hidden_RSH[:, 1:])
