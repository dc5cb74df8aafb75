"""Building the mask: the intervals of the fused kernels and flex_attention's lists in O(tiles), against ``create_block_mask`` of the same rule.

python -m benchmarks.mask
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from benchmarks.common import SHAPES, Recorder, Shape, anchors_of, arguments, recorder_for
from dflash_core.drafter import dflash_block_mask, interval_mask

LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")


def lists_of(mask: object) -> tuple[Tensor, ...]:
    """The tensors of a block mask, so that compiled builders return tensors alone."""
    return tuple(getattr(mask, name) for name in LISTS)


def measure_mask(recorder: Recorder, shape: Shape) -> None:
    """Milliseconds to build one mask, eager and compiled."""
    device = recorder.device
    anchors_BN, documents_BT = anchors_of(shape, device)

    def build() -> tuple[Tensor, ...]:
        return lists_of(dflash_block_mask(anchors_BN, documents_BT, shape.S))

    compiled = torch.compile(lambda anchors, documents: lists_of(dflash_block_mask(anchors, documents, shape.S)), dynamic=False, fullgraph=True)
    intervals = torch.compile(lambda anchors, documents: interval_mask(anchors, documents, shape.S), dynamic=False, fullgraph=True)
    rule = dflash_block_mask(anchors_BN, documents_BT, shape.S).mask_mod
    Q, X = shape.Q, shape.T + shape.Q
    recorder.measure(f"mask.build.{shape.name}", build)
    recorder.measure(f"mask.build_compiled.{shape.name}", lambda: compiled(anchors_BN, documents_BT))
    recorder.measure(f"mask.intervals_compiled.{shape.name}", lambda: intervals(anchors_BN, documents_BT))
    recorder.measure(f"mask.create_block_mask.{shape.name}", lambda: create_block_mask(rule, shape.B, None, Q, X, device=device), repeats=5)


if __name__ == "__main__":
    options = arguments(__doc__ or "", ["mask"]).parse_args()
    measure_mask(recorder_for(options), SHAPES[options.shape])
