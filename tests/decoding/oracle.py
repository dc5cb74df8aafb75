"""A drafter that knows the future: it returns the hidden states with which the target itself would continue a known text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class OracleDrafter:
    """Stands in for a ``DFlashDrafter``; slot k at anchor a returns the target's final hidden state of position a + k - 1."""

    def __init__(self, model: Any, text: list[int], tap_layers: tuple[int, ...], block_size: int, mask_token_id: int = 259):
        self.config = SimpleNamespace(tap_layers=tap_layers, block_size=block_size, mask_token_id=mask_token_id)
        with torch.no_grad():
            self.hidden_BTH = model.base_model(torch.tensor([text])).last_hidden_state
        self.context = 0

    def new_cache(self) -> SimpleNamespace:
        cache = SimpleNamespace(length=0)
        cache.append = lambda count: setattr(cache, "length", cache.length + count)
        return cache

    def context_keys_values(self, features_BTF: Tensor, positions_BT: Tensor) -> int:
        assert features_BTF.shape[1] == positions_BT.shape[1]
        return int(positions_BT.shape[1])

    def forward_cached(self, block_embeddings_BSH: Tensor, positions_BS: Tensor, cache: SimpleNamespace) -> Tensor:
        assert cache.length == int(positions_BS[0, 0])
        return self.hidden_BTH[:, (positions_BS[0] - 1).clamp(0, self.hidden_BTH.shape[1] - 1)]
