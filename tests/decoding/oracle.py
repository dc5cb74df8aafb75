"""A drafter that knows the future: it returns the hidden states with which the target itself would continue a known text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class OracleDrafter:
    """Stands in for a ``DFlashDrafter`` of one request; slot k at anchor a returns the target's final hidden state of position a + k - 1."""

    def __init__(self, model: Any, text: list[int], tap_layers: tuple[int, ...], block_size: int, mask_token_id: int = 259):
        self.config = SimpleNamespace(
            tap_layers=tap_layers, block_size=block_size, mask_token_id=mask_token_id, num_layers=0, num_kv_heads=0, head_dim=0
        )
        with torch.no_grad():
            self.hidden_BTH = model.base_model(torch.tensor([text])).last_hidden_state

    def new_cache(self, rows: int, capacity: int) -> SimpleNamespace:
        return SimpleNamespace(length=0)

    def read_context(self, features_RTF: Tensor, start_R: Tensor, cache: SimpleNamespace) -> None:
        assert int(start_R) <= cache.length or int(start_R) == 0, "no position is passed over"
        cache.length = int(start_R) + features_RTF.shape[1]

    def draft(self, block_embeddings_RSH: Tensor, anchor_R: Tensor, cache: SimpleNamespace) -> Tensor:
        assert cache.length >= int(anchor_R)
        places = int(anchor_R) + torch.arange(block_embeddings_RSH.shape[1])
        return self.hidden_BTH[:, (places - 1).clamp(0, self.hidden_BTH.shape[1] - 1)]
