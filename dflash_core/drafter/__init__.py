"""The DFlash drafter: its shape, its model, its attention masks, its blocks and its formats on disk."""

from dflash_core.drafter.attention import IntervalMask, attention_kind, block_attention, interval_mask, kernels_fit
from dflash_core.drafter.blocks import IGNORE, block_labels, block_positions, block_tokens, sample_anchors, teacher_states, valid_anchors
from dflash_core.drafter.cache import DrafterCache
from dflash_core.drafter.card import model_card
from dflash_core.drafter.checkpoint import load_checkpoint, save_checkpoint
from dflash_core.drafter.config import DFlashConfig, chosen_tap_layers, default_tap_layers
from dflash_core.drafter.export import export_drafter, target_problems, verify_export
from dflash_core.drafter.flex import flex_copies
from dflash_core.drafter.foreign import ImportedDrafter, import_drafter
from dflash_core.drafter.masks import (
    BlockMaskTensors,
    LayerMasks,
    as_block_mask,
    block_mask_tensors,
    dflash_block_mask,
    dflash_dense_mask,
    layer_masks,
    seen_context,
)
from dflash_core.drafter.model import DFlashDrafter
from dflash_core.drafter.spec import SPECS, DrafterSpec
from dflash_core.drafter.start import shape_differences, start_from_target

__all__ = [
    "IGNORE",
    "SPECS",
    "BlockMaskTensors",
    "DFlashConfig",
    "DFlashDrafter",
    "DrafterCache",
    "DrafterSpec",
    "ImportedDrafter",
    "IntervalMask",
    "LayerMasks",
    "as_block_mask",
    "attention_kind",
    "block_attention",
    "block_labels",
    "block_mask_tensors",
    "block_positions",
    "block_tokens",
    "chosen_tap_layers",
    "default_tap_layers",
    "dflash_block_mask",
    "dflash_dense_mask",
    "export_drafter",
    "flex_copies",
    "import_drafter",
    "interval_mask",
    "kernels_fit",
    "layer_masks",
    "load_checkpoint",
    "model_card",
    "sample_anchors",
    "save_checkpoint",
    "seen_context",
    "shape_differences",
    "start_from_target",
    "target_problems",
    "teacher_states",
    "valid_anchors",
    "verify_export",
]
