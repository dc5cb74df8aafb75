"""flex_attention over the drafter's heads: how they are laid out, and how many copies of its lists the block mask then holds."""

from __future__ import annotations

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dflash_core.drafter.config import DFlashConfig


def flex_copies(config: DFlashConfig, rows: int) -> int:
    """Copies of the lists that the block mask of ``rows`` rows should hold, which decides how ``flex`` lays the heads out."""
    return config.num_heads // config.num_kv_heads if rows == 1 else 1


def flex(q_BAQD: Tensor, k_BGXD: Tensor, v_BGXD: Tensor, mask: BlockMask) -> Tensor:
    """flex_attention [B, A, Q, D], laid out so that the longest program of its backward pass is short.

    Left to itself that pass walks all query heads of a group in one program, and the first tile of context, which nearly every query sees, keeps
    one multiprocessor busy for longer than an even share of all work (benchmarks/RESULTS.md). So of one row the heads of a group become a batch
    over the same keys and values, for which the mask holds copies; of several rows keys and values are repeated, since flex_attention shares
    them over a whole batch or not at all.
    """
    group = q_BAQD.shape[1] // k_BGXD.shape[1]
    if mask.kv_num_blocks.shape[0] == q_BAQD.shape[0]:
        if group > 1:
            k_BGXD, v_BGXD = k_BGXD.repeat_interleave(group, dim=1), v_BGXD.repeat_interleave(group, dim=1)
        return flex_attention(q_BAQD, k_BGXD, v_BGXD, block_mask=mask)
    q_RGQD = q_BAQD[0].unflatten(0, (-1, group)).transpose(0, 1)  # R query heads of a group
    return flex_attention(q_RGQD, k_BGXD, v_BGXD, block_mask=mask).transpose(0, 1).flatten(0, 1)[None]
