"""The drafter's memory while decoding: keys and values of the committed context, layer by layer, in buffers that never move.

Each row of a batch has its own length. What is written behind it (candidates that the target then rejects, the block that is being drafted) is
never seen as context and is written over later, so that nothing is ever copied, cropped or known to the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_core.drafter.config import DFlashConfig
from dflash_core.target.static_attention import attend, store


class DrafterCache:
    """Keys and values [R, G, C, D] per layer: ``rows`` rows of ``capacity`` positions."""

    def __init__(self, config: DFlashConfig, rows: int, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (rows, config.num_kv_heads, capacity, config.head_dim)
        # Zeros, not whatever was there: a weight of zero times not-a-number would still be not-a-number.
        pairs = torch.zeros(config.num_layers, 2, *shape, dtype=dtype, device=device)
        self._buffers = [(pair[0], pair[1]) for pair in pairs]
        self._windows = [config.window_of(layer) for layer in range(config.num_layers)]

    @staticmethod
    def bytes_needed(config: DFlashConfig, rows: int, capacity: int, element: int) -> int:
        """Bytes of such a cache with ``element`` bytes a number."""
        return 2 * config.num_layers * rows * config.num_kv_heads * capacity * config.head_dim * element

    def write(self, layer: int, k_RTGD: Tensor, v_RTGD: Tensor, start_R: Tensor) -> None:
        """Put keys and values of T positions of each row, from ``start_R`` on, to their places."""
        store(k_RTGD.transpose(1, 2), v_RTGD.transpose(1, 2), *self._buffers[layer], start_R)

    def attend(self, layer: int, q_RSAD: Tensor, anchor_R: Tensor) -> Tensor:
        """[R, S, A, D] of the block that stands at positions ``anchor_R`` to ``anchor_R`` + S - 1, and has been written there.

        All queries of a row see all before the block's end; so they count as so many more heads of one query. In a layer with a sliding window
        each sees the positions up to its own alone, as tokens of the target do.
        """
        R, S, A, D = q_RSAD.shape
        if window := self._windows[layer]:
            return attend(q_RSAD.transpose(1, 2), *self._buffers[layer], anchor_R, scale=D**-0.5, window=window)
        q_RX1D = q_RSAD.transpose(1, 2).reshape(R, A * S, 1, D)
        return attend(q_RX1D, *self._buffers[layer], anchor_R + S - 1, scale=D**-0.5).view(R, A, S, D).transpose(1, 2)
