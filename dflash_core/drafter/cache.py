"""The drafter's memory while decoding: keys and values of the committed context, layer by layer, in buffers that never move.

Each row of a batch has its own length. What is written behind it (candidates that the target then rejects, the block that is being drafted) is
never seen as context and is written over later, so that nothing is ever copied, cropped or known to the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_core.drafter.config import DFlashConfig

ALIGNMENT = 16  # positions; masks of a width that is no multiple of 8 are copied by CUDA's attention


@dataclass(frozen=True)
class Window:
    """What a block looks at: the first ``end`` positions of the buffers, less what a mask (0 or -inf, [R, 1, 1, end]) hides where rows differ."""

    end: int
    mask: Tensor | None


class DrafterCache:
    """Keys and values [R, G, X, D] per layer, X at least ``capacity`` positions."""

    def __init__(self, config: DFlashConfig, rows: int, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self.capacity = -(-capacity // ALIGNMENT) * ALIGNMENT
        shape = (rows, config.num_kv_heads, self.capacity, config.head_dim)
        # Zeros, not whatever was there: a weight of zero times not-a-number would still be not-a-number.
        pairs = torch.zeros(config.num_layers, 2, *shape, dtype=dtype, device=device)
        self._buffers = [(pair[0], pair[1]) for pair in pairs]
        self._rows_R1 = torch.arange(rows, device=device)[:, None]
        self._places_X = torch.arange(self.capacity, device=device)

    def write(self, layer: int, k_RTGD: Tensor, v_RTGD: Tensor, positions_RT: Tensor) -> None:
        """Put keys and values of some positions to their places."""
        for buffer, new in zip(self._buffers[layer], (k_RTGD, v_RTGD), strict=True):
            buffer[self._rows_R1, :, positions_RT] = new

    def window(self, length_R: Tensor) -> Window:
        """What rows of these lengths see. On a CPU it ends where the longest row does; elsewhere its shape depends on nothing."""
        if length_R.device.type != "cpu":
            return Window(self.capacity, self._mask(length_R, self.capacity))
        end = int(length_R.max())
        return Window(end, None if int(length_R.min()) == end else self._mask(length_R, end))

    def seen(self, layer: int, window: Window) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer within the window: two of [R, G, end, D]."""
        keys, values = self._buffers[layer]
        return keys[:, :, : window.end], values[:, :, : window.end]

    def _mask(self, length_R: Tensor, end: int) -> Tensor:
        hidden_RX = self._places_X[:end] >= length_R[:, None]
        mask_RX = torch.zeros(hidden_RX.shape, dtype=self._buffers[0][0].dtype, device=length_R.device).masked_fill(hidden_RX, float("-inf"))
        return mask_RX[:, None, None]
