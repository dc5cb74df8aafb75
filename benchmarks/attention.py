"""Attention forward and backward in the DFlash layout: this project's kernels, and flex_attention over layouts of the heads, options and tiles.

python -m benchmarks.attention
python -m benchmarks.attention --shape 1x16384 --window 2048      # the product's two layouts, with full attention and with a sliding window

Layouts
  grouped   one program owns a tile of keys for all query heads of its group (enable_gqa)
  expanded  keys and values are repeated for every query head, so that each program has a quarter of the work
  batched   the query heads of a group become a batch over shared keys and values: as even as expanded, without the copies; one row only
  fused     ``drafter.block_attention``: no tile lists, but intervals; on CUDA alone
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from benchmarks.common import SHAPES, Recorder, Shape, anchors_of, arguments, recorder_for
from dflash_core.drafter import IntervalMask, block_attention, dflash_block_mask, interval_mask


def bwd(m1: int, n1: int, m2: int, n2: int, warps: int, stages: int) -> dict[str, Any]:
    """Kernel options of the backward pass: tiles of the dk/dv part, of the dq part, warps and stages."""
    names = ("bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_BLOCK_M2", "bwd_BLOCK_N2", "bwd_num_warps", "bwd_num_stages")
    return dict(zip(names, (m1, n1, m2, n2, warps, stages), strict=True))


def fwd(m: int, n: int, warps: int, stages: int) -> dict[str, Any]:
    """Kernel options of the forward pass."""
    return {"fwd_BLOCK_M": m, "fwd_BLOCK_N": n, "fwd_num_warps": warps, "fwd_num_stages": stages}


# name: (layout, tile of the block mask, kernel options)
VARIANTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "grouped": ("grouped", 128, {}),
    "batched": ("batched", 128, {}),
    "expanded": ("expanded", 128, {}),
    "fused": ("fused", 128, {}),
    "batched.bwd64": ("batched", 128, bwd(64, 64, 64, 64, 4, 2)),
    "batched.fwd128x128": ("batched", 128, fwd(128, 128, 8, 2)),
    "batched.tile64": ("batched", 64, fwd(64, 64, 4, 3) | bwd(64, 64, 64, 64, 4, 3)),
}


def attend(layout: str, q_BAQD: Tensor, k_BGXD: Tensor, v_BGXD: Tensor, mask: BlockMask | IntervalMask, options: Any) -> Tensor:
    """Attention in one of the layouts; the result is [B, A, Q, D] in each."""
    if isinstance(mask, IntervalMask):
        T, (q, k, v) = k_BGXD.shape[2] - q_BAQD.shape[2], (x.transpose(1, 2) for x in (q_BAQD, k_BGXD, v_BGXD))
        return block_attention(q, k[:, :T], v[:, :T], k[:, T:], v[:, T:], mask).transpose(1, 2)
    group = q_BAQD.shape[1] // k_BGXD.shape[1]
    if layout == "grouped":
        return flex_attention(q_BAQD, k_BGXD, v_BGXD, block_mask=mask, enable_gqa=group > 1, kernel_options=options)
    if layout == "expanded":
        k_BAXD, v_BAXD = k_BGXD.repeat_interleave(group, 1), v_BGXD.repeat_interleave(group, 1)
        return flex_attention(q_BAQD, k_BAXD, v_BAXD, block_mask=mask, kernel_options=options)
    q_RGQD = q_BAQD[0].unflatten(0, (-1, group)).transpose(0, 1)
    out_RGQD = flex_attention(q_RGQD, k_BGXD, v_BGXD, block_mask=mask, kernel_options=options)
    return out_RGQD.transpose(0, 1).flatten(0, 1)[None]


def mask_for(layout: str, shape: Shape, anchors_BN: Tensor, documents_BT: Tensor, tile: int = 128, window: int = 0) -> BlockMask | IntervalMask:
    """The mask for a layout; with batched heads the one row is there once for each query head of a group."""
    if layout == "fused":
        return interval_mask(anchors_BN, documents_BT, shape.S, window=window)
    if layout == "batched":
        group = shape.heads // shape.kv_heads
        anchors_BN, documents_BT = anchors_BN.repeat(group, 1), documents_BT.repeat(group, 1)
    return dflash_block_mask(anchors_BN, documents_BT, shape.S, tile, window=window)


def visible_pairs(shape: Shape, anchors_BN: Tensor, window: int) -> float:
    """Pairs of query and key of all rows, each of which is one document."""
    if not window:
        return float((anchors_BN + shape.S).sum()) * shape.S
    slot = torch.arange(shape.S, device=anchors_BN.device)
    return float((torch.minimum(anchors_BN[..., None], window - 1 - slot) + slot + 1).sum())


def measure_attention(recorder: Recorder, shape: Shape, names: list[str] | None = None, window: int = 0) -> None:
    """Forward, and forward with backward, of every variant. On the CPU the forward pass alone, uncompiled: flex_attention has no more there."""
    device = recorder.device
    on_gpu = device.type == "cuda"
    torch.manual_seed(0)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    X = shape.T + shape.Q
    q, k, v = (
        torch.randn(shape.B, length, heads, shape.head_dim, device=device, dtype=dtype).transpose(1, 2).requires_grad_(on_gpu)
        for length, heads in ((shape.Q, shape.heads), (X, shape.kv_heads), (X, shape.kv_heads))
    )
    grad = torch.randn_like(q)
    anchors_BN, documents_BT = anchors_of(shape, device)
    tflop = 4 * visible_pairs(shape, anchors_BN, window) * shape.heads * shape.head_dim / 1e12
    expected: list[Tensor] = []
    for name in names or list(VARIANTS):
        layout, tile, options = VARIANTS[name]
        if (layout == "batched" and shape.B > 1) or (layout == "fused" and not on_gpu):
            continue
        mask = mask_for(layout, shape, anchors_BN, documents_BT, tile, window)
        name = f"{name}.window{window}" if window else name
        torch._dynamo.reset()  # or one code object would collect a cache entry for each variant
        run = torch.compile(attend, dynamic=False, fullgraph=True) if on_gpu else attend

        def variant(
            name: str = name, layout: str = layout, mask: BlockMask | IntervalMask = mask, options: dict[str, Any] = options, run: Any = run
        ) -> None:
            def forward() -> Tensor:
                return run(layout, q, k, v, mask, options)

            def both() -> tuple[Tensor, ...]:
                return torch.autograd.grad(forward(), (q, k, v), grad)

            result = [forward().detach(), *(both() if on_gpu else ())]
            expected.extend(result if not expected else [])
            errors = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(result, expected, strict=True)]
            if not all(error < 2e-2 for error in errors):  # NaN fails too
                raise ValueError(f"differs from the first variant by {errors}")
            detail: dict[str, Any] = {"layout": layout, "options": options, "errors": [round(error, 6) for error in errors]}
            recorder.measure(f"attention.forward.{shape.name}.{name}", forward, ahead_ms=100, tflop=round(tflop, 4), **detail)
            if on_gpu:
                recorder.measure(f"attention.both.{shape.name}.{name}", both, ahead_ms=100, tflop=round(3.5 * tflop, 4), **detail)

        last = f"attention.{'both' if on_gpu else 'forward'}.{shape.name}.{name}"
        recorder.attempt(last, variant)


if __name__ == "__main__":
    parser = arguments(__doc__ or "", ["attention"])
    parser.add_argument("--window", type=int, help="measure the two layouts that the product has, without a sliding window and with this one")
    options = parser.parse_args()
    recorder, shape = recorder_for(options), SHAPES[options.shape]
    if options.window is None:
        measure_attention(recorder, shape)
    else:
        for window in (0, options.window):
            measure_attention(recorder, shape, ["batched", "fused"], window)
