"""The drafter's memory while decoding: keys and values of the committed context, layer by layer.

It only ever grows: what the target has rejected never enters it, so there is nothing to crop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dflash_core.drafter.config import DFlashConfig


class DrafterCache:
    """Keys and values [B, G, capacity, D] per layer, of which the first ``length`` positions are context.

    The room behind the context is scratch for the block that is being drafted, so that a draft copies nothing.
    """

    def __init__(self, config: DFlashConfig, batch_size: int, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self.length = 0
        self._block_size = config.block_size
        shape = (batch_size, config.num_kv_heads, max(capacity, 1) + config.block_size, config.head_dim)
        self._buffers = [_empty_pair(shape, dtype, device) for _ in range(config.num_layers)]

    def append(self, keys_values: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Add newly committed positions, as ``DFlashDrafter.context_keys_values`` returns them."""
        count = keys_values[0][0].shape[2]
        self._reserve(self.length + count + self._block_size)
        for i, pair in enumerate(keys_values):
            self._write(i, pair)
        self.length += count

    def joined(self, layer: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """A function that puts the context of a layer before the keys and values of a block: two of [B, G, length + S, D]."""

        def join(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            end = self.length + k.shape[2]
            self._reserve(end)
            self._write(layer, (k, v))
            keys, values = self._buffers[layer]
            return keys[:, :, :end], values[:, :, :end]

        return join

    def _write(self, layer: int, pair: tuple[Tensor, Tensor]) -> None:
        for buffer, new in zip(self._buffers[layer], pair, strict=True):
            buffer[:, :, self.length : self.length + new.shape[2]] = new

    def _reserve(self, room: int) -> None:
        have = self._buffers[0][0].shape[2]
        if room <= have:
            return
        wanted = max(room, 2 * have)
        for i, pair in enumerate(self._buffers):
            grown = []
            for buffer in pair:
                larger = buffer.new_empty((*buffer.shape[:2], wanted, buffer.shape[3]))
                larger[:, :, : self.length] = buffer[:, :, : self.length]
                grown.append(larger)
            self._buffers[i] = (grown[0], grown[1])


def _empty_pair(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device)
