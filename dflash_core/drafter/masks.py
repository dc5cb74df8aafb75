"""Who sees whom, written once; the dense mask and flex_attention's block mask both come from it.

    B rows   T row length   N anchor slots   S block size   Q = N * S draft positions   X = T + Q keys: [context, blocks]

A draft position sees the context of its own document strictly before its anchor, and its own block both ways. Nothing else. Documents are
contiguous runs of a row, so "before the anchor, of its document" is the interval [start of the document, anchor). An empty slot (anchor -1) sees
only its own block, which keeps its softmax finite, and nothing sees it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def visible(query: Tensor, key: Tensor, start: Tensor, anchor: Tensor, context_length: int, block_size: int) -> Tensor:
    """The rule. All arguments broadcast against each other.

    Args:
        query:          index of the draft position, 0..Q-1
        key:            index of the key, 0..T+Q-1
        start, anchor:  context interval of the query's block, as ``context_intervals`` gives it
        context_length: T
        block_size:     S
    """
    context = (key >= start) & (key < anchor)
    own_block = (key >= context_length) & ((key - context_length) // block_size == query // block_size)
    return context | own_block


def context_intervals(anchors_BN: Tensor, document_ids_BT: Tensor) -> tuple[Tensor, Tensor]:
    """[B, N] twice, in the dtype of the anchors: each block sees context start <= t < anchor. Empty for an empty slot."""
    T = document_ids_BT.shape[1]
    index = torch.arange(T, device=document_ids_BT.device).expand_as(document_ids_BT)
    first = torch.ones_like(document_ids_BT, dtype=torch.bool)
    first[:, 1:] = document_ids_BT[:, 1:] != document_ids_BT[:, :-1]
    starts_BT = torch.where(first, index, 0).cummax(dim=1).values
    starts_BN = starts_BT.gather(1, anchors_BN.clamp(min=0))
    return starts_BN.to(anchors_BN.dtype), anchors_BN


def dflash_dense_mask(anchors_BN: Tensor, document_ids_BT: Tensor, block_size: int) -> Tensor:
    """[B, 1, Q, T + Q] bool, True where visible.

    Args:
        anchors_BN:      [B, N] int64 row indices, -1 for an empty slot
        document_ids_BT: [B, T] int, equal within a document, -1 for padding
    """
    T = document_ids_BT.shape[1]
    Q = anchors_BN.shape[1] * block_size
    start, anchor = (x.repeat_interleave(block_size, dim=1)[:, None, :, None] for x in context_intervals(anchors_BN, document_ids_BT))
    query = torch.arange(Q, device=anchors_BN.device)[:, None]
    key = torch.arange(T + Q, device=anchors_BN.device)
    return visible(query, key, start, anchor, T, block_size)
