"""The two functions of a step that torch.compile translates: what a batch comes to before its features are looked at, and the drafter.

    B rows   T row length   N anchor slots   S block size   Q = N * S   H hidden   F features of a token

They are apart because the embedding of the blocks' tokens lies between them, which is the target's own code.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from dflash_core.drafter import (
    BlockMaskTensors,
    DFlashDrafter,
    IntervalMask,
    LayerMasks,
    as_block_mask,
    block_labels,
    block_mask_tensors,
    block_positions,
    block_tokens,
    dflash_dense_mask,
    flex_copies,
    interval_mask,
    layer_masks,
)
from dflash_core.drafter.layers import Mask, Masks, Rotation

PreparedMask = Tensor | BlockMaskTensors | IntervalMask


class Prepared(NamedTuple):
    """What a batch comes to before any of its features are looked at.

    Labels [B, N, S] of the blocks, ids [B, N] of their first tokens and [] of the others, rotations, and who sees whom.
    """

    labels: Tensor
    anchor_ids: Tensor
    mask_id: Tensor
    context_rotation: Rotation
    block_rotation: Rotation
    mask: PreparedMask | LayerMasks[PreparedMask]


def prepare(
    drafter: DFlashDrafter, tokens_BT: Tensor, loss_mask_BT: Tensor, document_ids_BT: Tensor, positions_BT: Tensor, anchors_BN: Tensor, attention: str
) -> Prepared:  # fmt: skip
    """Compiled on CUDA, where it would be a hundred small kernels."""
    config = drafter.config
    S, dtype = config.block_size, drafter.fc.weight.dtype
    positions_BQ = block_positions(positions_BT, anchors_BN, S).flatten(1)

    def mask(window: int) -> PreparedMask:
        if attention == "fused":
            return interval_mask(anchors_BN, document_ids_BT, S, window=window)
        if attention == "flex":
            return block_mask_tensors(anchors_BN, document_ids_BT, S, copies=flex_copies(config, len(anchors_BN)), window=window)
        return dflash_dense_mask(anchors_BN, document_ids_BT, S, window)

    return Prepared(
        block_labels(tokens_BT, loss_mask_BT, document_ids_BT, anchors_BN, S, config.spec),
        block_tokens(tokens_BT, anchors_BN, config)[..., 0],
        tokens_BT.new_full((), config.mask_token_id),
        drafter.rotation(positions_BT, dtype),
        drafter.rotation(positions_BQ, dtype),
        layer_masks(mask, config),
    )


def draft(
    drafter: DFlashDrafter, features_BTF: Tensor, anchors_BNH: Tensor, mask_H: Tensor, context: Rotation, block: Rotation, mask: Masks
) -> Tensor:  # fmt: skip
    """The drafter, from features to hidden states. The loss stays outside of what is compiled; it brings kernels of its own."""
    return drafter.forward_training(features_BTF, anchors_BNH, mask_H, context, block, mask)


def as_drafter_takes(mask: PreparedMask | LayerMasks[PreparedMask], T: int, S: int) -> Masks:
    """The prepared masks as the drafter takes them, made outside of what is compiled."""
    if isinstance(mask, LayerMasks):
        full, sliding = (part if part is None else _of_one_kind(part, T, S) for part in mask)
        assert sliding is not None
        return LayerMasks(full, sliding)
    return _of_one_kind(mask, T, S)


def _of_one_kind(mask: PreparedMask, T: int, S: int) -> Mask:
    return as_block_mask(mask, T, S) if isinstance(mask, BlockMaskTensors) else mask
