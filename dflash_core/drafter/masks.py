"""Who sees whom, written once: the dense mask, flex_attention's block mask and the intervals of our own kernels (``attention``) come from it.

    B rows   T row length   N anchor slots   S block size   Q = N * S draft positions   X = T + Q keys: [context, blocks]   W window

A draft position sees the context of its own document strictly before its anchor, and its own block both ways. Nothing else. Documents are
contiguous runs of a row, so "before the anchor, of its document" is the interval [start of the document, anchor). An empty slot (anchor -1) sees
only its own block, which keeps its softmax finite, and nothing sees it.

In a layer with a sliding window, the position p = anchor + k of slot k sees the W positions that end with its own, p - W + 1 .. p, as far as the
above lets it: context from anchor + k - W + 1 on, and of its own block the slots up to its own. That is what servers run in a drafter's layers of
type ``sliding_attention`` (``serving``). W is at least S, so that the window never cuts a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from dflash_core.drafter.blocks import valid_anchors
from dflash_core.drafter.config import DFlashConfig

TILE = 128
"""Side of a square tile of the attention grid; flex_attention's own default."""

M = TypeVar("M")


def visible(query: Tensor, key: Tensor, start: Tensor, anchor: Tensor, context_length: int, block_size: int, window: int = 0) -> Tensor:
    """The rule. All tensors broadcast against each other.

    Args:
        query:          index of the draft position, 0..Q-1
        key:            index of the key, 0..T+Q-1
        start, anchor:  context interval of the query's block, as ``context_intervals`` gives it
        context_length: T
        block_size:     S
        window:         W, 0 where all of the context is seen
    """
    own_block = (key >= context_length) & ((key - context_length) // block_size == query // block_size)
    if window:
        start = first_seen(start, anchor, query % block_size, window)
        own_block = own_block & (key - context_length <= query)
    return ((key >= start) & (key < anchor)) | own_block


def first_seen(start: Tensor, anchor: Tensor, slot: Tensor | int, window: int) -> Tensor:
    """Where the context that slot ``slot`` of a block sees begins, for blocks whose context begins at ``start``."""
    return torch.maximum(start, anchor + slot - (window - 1)) if window else start


def context_intervals(anchors_BN: Tensor, document_ids_BT: Tensor) -> tuple[Tensor, Tensor]:
    """[B, N] twice, in the dtype of the anchors: each block sees context start <= t < anchor. Empty for an empty slot."""
    T = document_ids_BT.shape[1]
    index = torch.arange(T, device=document_ids_BT.device).expand_as(document_ids_BT)
    first = torch.ones_like(document_ids_BT, dtype=torch.bool)
    first[:, 1:] = document_ids_BT[:, 1:] != document_ids_BT[:, :-1]
    starts_BT = torch.where(first, index, 0).cummax(dim=1).values
    starts_BN = starts_BT.gather(1, anchors_BN.clamp(min=0))
    return starts_BN.to(anchors_BN.dtype), anchors_BN


def seen_context(loss_mask_T: Tensor, document_ids_T: Tensor, window: int = 0) -> Tensor:
    """[T] bool: the positions that a block sees as context, at whichever valid anchor it begins. The features of all others are never read.

    Args:
        loss_mask_T:    [T] bool, supervised tokens
        document_ids_T: [T] int, equal within a document, -1 for padding
        window:         W where all draft layers have a sliding window, 0 where one sees everything
    """
    anchors_N = valid_anchors(loss_mask_T, document_ids_T).nonzero().flatten()
    start_N, anchor_N = (x[0] for x in context_intervals(anchors_N[None], document_ids_T[None]))
    edges = torch.zeros(len(loss_mask_T) + 1, dtype=torch.int32, device=loss_mask_T.device)
    one = torch.ones_like(anchor_N, dtype=torch.int32)
    edges.index_add_(0, first_seen(start_N, anchor_N, 0, window), one).index_add_(0, anchor_N, -one)
    return edges.cumsum(0)[:-1] > 0


def dflash_dense_mask(anchors_BN: Tensor, document_ids_BT: Tensor, block_size: int, window: int = 0) -> Tensor:
    """[B, 1, Q, T + Q] bool, True where visible.

    Args:
        anchors_BN:      [B, N] int64 row indices, -1 for an empty slot
        document_ids_BT: [B, T] int, equal within a document, -1 for padding
        window:          W of a sliding layer, 0 for full attention
    """
    T = document_ids_BT.shape[1]
    Q = anchors_BN.shape[1] * block_size
    start, anchor = (x.repeat_interleave(block_size, dim=1)[:, None, :, None] for x in context_intervals(anchors_BN, document_ids_BT))
    query = torch.arange(Q, device=anchors_BN.device)[:, None]
    key = torch.arange(T + Q, device=anchors_BN.device)
    return visible(query, key, start, anchor, T, block_size, window)


class LayerMasks(NamedTuple, Generic[M]):
    """The masks of a drafter that has layers with a sliding window; ``full`` is None where all have one."""

    full: M | None
    sliding: M


def layer_masks(build: Callable[[int], M], config: DFlashConfig) -> M | LayerMasks[M]:
    """What the layers of a drafter want: one mask, or ``LayerMasks``. ``build`` makes the mask of a window, 0 for full attention."""
    if not config.sliding_layers:
        return build(0)
    return LayerMasks(build(0) if config.full_layers else None, build(config.sliding_window))


class BlockMaskTensors(NamedTuple):
    """Everything a block mask is made of: what ``block_mask_tensors`` computes, inside torch.compile or not, and ``as_block_mask`` puts together.

    start, anchor: [B, N] context interval of each block, as it is without ``window``; the rest are flex_attention's lists of partly and entirely
    visible tiles, by query tile (kv) and by key tile (q).
    """

    start: Tensor
    anchor: Tensor
    window: int
    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor
    full_kv_indices: Tensor
    q_num_blocks: Tensor
    q_indices: Tensor
    full_q_num_blocks: Tensor
    full_q_indices: Tensor


def block_mask_tensors(
    anchors_BN: Tensor, document_ids_BT: Tensor, block_size: int, tile: int = TILE, copies: int = 1, window: int = 0
) -> BlockMaskTensors:
    """The tensors of ``dflash_block_mask``, arguments as there; the lists ``copies`` times over, one copy after the other.

    Copies of one row serve as many rows of queries over the same keys, which is how the model lays grouped heads out.
    """
    start_BN, anchor_BN = context_intervals(anchors_BN, document_ids_BT)
    partial, full = _tiles(start_BN.int(), anchor_BN.int(), document_ids_BT.shape[1], block_size, tile, window)
    lists = (*_lists(partial), *_lists(full), *_lists(partial.transpose(-2, -1)), *_lists(full.transpose(-2, -1)))
    return BlockMaskTensors(start_BN, anchor_BN, window, *(x.repeat(copies, 1, *[1] * (x.dim() - 2)) if copies > 1 else x for x in lists))


def as_block_mask(tensors: BlockMaskTensors, context_length: int, block_size: int, tile: int = TILE) -> BlockMask:
    """flex_attention's object around the tensors. It launches nothing."""
    B, N = tensors.anchor.shape
    Q = N * block_size
    start_BN, anchor_BN, window, *_ = tensors
    lists = {name: value for name, value in tensors._asdict().items() if name not in ("start", "anchor", "window")}

    def mask_mod(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        slot = query // block_size
        row = b % B  # copies of the lists share one row of intervals
        return visible(query, key, start_BN[row, slot], anchor_BN[row, slot], context_length, block_size, window)

    return BlockMask(seq_lengths=(Q, context_length + Q), BLOCK_SIZE=(tile, tile), mask_mod=mask_mod, **lists)


def dflash_block_mask(anchors_BN: Tensor, document_ids_BT: Tensor, block_size: int, tile: int = TILE, copies: int = 1, window: int = 0) -> BlockMask:
    """flex_attention's mask of the same rule, equal to what ``create_block_mask`` finds by evaluating all Q * (T + Q) pairs.

    Made from the context intervals alone: a tile of queries covers a few blocks, and whether their intervals miss, touch or fill a tile of keys
    is arithmetic on its bounds. That is a few operations per tile, on the device of the arguments, without host synchronisation, and every
    tensor has a size that depends on N, S and T alone. Ascending anchors give the fewest tiles; any order is correct.

    Args:
        anchors_BN:      [B, N] int64 row indices, -1 for an empty slot
        document_ids_BT: [B, T] int, equal within a document, -1 for padding
        block_size:      S
        tile:            side of a tile
        copies:          as in ``block_mask_tensors``
        window:          W of a sliding layer, 0 for full attention

    Returns:
        A BlockMask over [B * copies, 1, Q, T + Q], with the transposed lists that the backward pass walks.
    """
    tensors = block_mask_tensors(anchors_BN, document_ids_BT, block_size, tile, copies, window)
    return as_block_mask(tensors, document_ids_BT.shape[1], block_size, tile)


def _tiles(start_BN: Tensor, anchor_BN: Tensor, T: int, S: int, tile: int, window: int) -> tuple[Tensor, Tensor]:
    """Which tiles are visible in part and which entirely: two of [B, 1, query tiles, key tiles] bool.

    A tile of keys holds context [c0, c1) and draft keys [k0, k1); either may be empty, and with T no multiple of the tile one tile holds both.
    """
    N = anchor_BN.shape[1]
    Q, X, device = N * S, T + N * S, anchor_BN.device
    q0 = torch.arange(0, Q, tile, device=device)[:, None]  # [query tiles, 1]
    q1 = (q0 + tile).clamp(max=Q)
    x0 = torch.arange(0, X, tile, device=device)  # [key tiles]
    x1 = (x0 + tile).clamp(max=X)
    first, last = q0 // S, (q1 - 1) // S  # slots of a query tile

    # The slots of each query tile; a short list is filled up with its last slot.
    slot = torch.minimum(first + torch.arange((tile - 1) // S + 2, device=device), last)
    start, anchor = start_BN[:, slot, None], anchor_BN[:, slot, None]  # [B, query tiles, slots, 1]
    c0, c1 = x0, x1.clamp(max=T)
    farthest, nearest = start, start  # where the context begins that any, and that all, of a block's queries in the tile see
    if window:
        low, high = (q0 - slot * S).clamp(min=0), (q1 - 1 - slot * S).clamp(max=S - 1)  # the tile's first and last query of the block
        farthest, nearest = (first_seen(start, anchor, k[..., None].int(), window) for k in (low, high))
    touched = (torch.maximum(farthest, c0) < torch.minimum(anchor, c1)).any(dim=2)
    filled = (((nearest <= c0) & (anchor >= c1)) | (c0 >= c1)).all(dim=2)

    k0, k1 = (x0 - T).clamp(min=0), x1 - T
    key_first, key_last = k0 // S, (k1 - 1) // S
    no_draft_keys = k1 <= 0
    own_touched = ~no_draft_keys & (first <= key_last) & (key_first <= last)
    own_filled = no_draft_keys | ((first == last) & (key_first == first) & (key_last == first))
    if window:
        own_touched, own_filled = own_touched & (k0 < q1), no_draft_keys | (own_filled & (k1 - 1 <= q0))

    whole = (q1 - q0 == tile) & (x1 - x0 == tile)  # tiles over the edge are never called full
    full = filled & own_filled & whole
    partial = (touched | own_touched) & ~full
    return partial[:, None], full[:, None]


def _lists(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """For each row of [..., R, C] bool: how many columns are set, and all columns with the set ones first, both ascending, as int32."""
    rank = tiles.cumsum(dim=-1)
    count = rank[..., -1]
    column = torch.arange(tiles.shape[-1], device=tiles.device).expand_as(rank)
    place = torch.where(tiles, rank - 1, count[..., None] + column - rank)
    return count.int(), torch.empty_like(rank).scatter_(-1, place, column).int()
