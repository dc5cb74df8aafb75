"""Attention of the draft blocks to their context and to themselves, as one operator with kernels of its own.

    B rows   A query heads   G key/value heads   N anchor slots   S block size   T context   Q = N * S draft positions   D head size

The visibility rule is ``masks.visible``; here it is used as what it comes to: of the context a block sees the interval [start, anchor), of the
draft keys its own S; in a layer with a sliding window each of its queries a shorter interval, and the keys up to its own. flex_attention with
``masks.dflash_block_mask`` computes the same, and runs where these kernels do not (``kernels_fit``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dflash_core.drafter.config import DFlashConfig
from dflash_core.drafter.masks import context_intervals, first_seen

LOG2_E = 1.4426950408889634


class Tiling(NamedTuple):
    """How a pass is cut up: tiles of queries and of context keys, warps of a program, loads that run ahead."""

    queries: int
    keys: int
    warps: int
    stages: int


class Tilings(NamedTuple):
    """The four passes: the forward one, and three of the backward: own blocks, dk and dv by key, then dq by query."""

    forward: Tiling
    own: Tiling
    by_key: Tiling
    by_query: Tiling


TILINGS = Tilings(forward=Tiling(128, 64, 8, 3), own=Tiling(16, 16, 2, 1), by_key=Tiling(64, 128, 8, 3), by_query=Tiling(128, 32, 8, 6))
"""Measured on an H200 for heads of 128 (benchmarks/RESULTS.md)."""

SCORE_GRADIENT_BYTES = 2 * 2**30
"""Most memory that the backward pass takes for the gradient of the scores; what does not fit is computed for so many heads after each other."""


class IntervalMask(NamedTuple):
    """Who sees whom, for ``block_attention``: as ``interval_mask`` makes it, inside torch.compile or not.

    start, anchor: [B, N] int32 context interval of each block, before its window
    forward, by_query: [B, tiles of queries, 4] int32, by_key: [B, tiles of keys, 4] int32; see ``_ranges``
    window: W of a sliding layer, 0 for full attention
    """

    start: Tensor
    anchor: Tensor
    forward: Tensor
    by_key: Tensor
    by_query: Tensor
    window: int


def kernels_fit(block_size: int, head_dim: int, precision: str) -> bool:
    """Whether the kernels take this shape: whole blocks to a tile, a head size that tiles are made for, and not float32."""
    return precision != "float32" and head_dim in (64, 128) and 64 % block_size == 0


def attention_kind(wanted: str, device: torch.device, precision: str, config: DFlashConfig) -> str:
    """What computes the attention of ``training.attention``: "dense" on the CPU, on CUDA "fused" (``block_attention``) or "flex"."""
    if device.type != "cuda":
        return "dense"
    return "fused" if wanted != "flex" and kernels_fit(config.block_size, config.head_dim, precision) else "flex"


def interval_mask(anchors_BN: Tensor, document_ids_BT: Tensor, block_size: int, tilings: Tilings = TILINGS, window: int = 0) -> IntervalMask:
    """The mask of ``dflash_dense_mask`` in the form that ``block_attention`` walks. Arguments as there.

    A few operations a tile, on the device of the arguments, without host synchronisation; sizes depend on N, S and T alone.
    """
    T = document_ids_BT.shape[1]
    start_BN, anchor_BN = (x.int() for x in context_intervals(anchors_BN, document_ids_BT))

    def ranges(tiling: Tiling, by_key: bool) -> Tensor:
        touched, filled = _tiles(start_BN, anchor_BN, T, block_size, tiling.queries, tiling.keys, window)
        return _ranges(touched.mT, filled.mT) if by_key else _ranges(touched, filled)

    by_query = ranges(tilings.by_query, False)
    return IntervalMask(start_BN, anchor_BN, ranges(tilings.forward, False), ranges(tilings.by_key, True), by_query, window)


def block_attention(
    q_BQAD: Tensor, k_context_BTGD: Tensor, v_context_BTGD: Tensor, k_block_BQGD: Tensor, v_block_BQGD: Tensor, mask: IntervalMask
) -> Tensor:  # fmt: skip
    """Attention [B, Q, A, D] of every draft position to the context its block sees and to its own block. Differentiable in all but the mask."""
    out, _ = _forward(q_BQAD, k_context_BTGD, v_context_BTGD, k_block_BQGD, v_block_BQGD, *mask)
    return out


def _tiles(start_BN: Tensor, anchor_BN: Tensor, T: int, S: int, queries: int, keys: int, window: int) -> tuple[Tensor, Tensor]:
    """Which tiles of [queries, context keys] are visible in part or whole, and which entirely: two of [B, query tiles, key tiles] bool.

    A tile holds whole blocks: what any of a block's queries sees begins where its first one's window does, what all see where its last one's does.
    """
    N, device = anchor_BN.shape[1], anchor_BN.device
    slots = torch.arange(-(-N * S // queries) * queries // S, device=device).clamp(max=N - 1).view(-1, queries // S)
    k0 = torch.arange(0, T, keys, device=device)
    start, anchor = start_BN[:, slots, None], anchor_BN[:, slots, None]  # [B, query tiles, slots of a tile, 1]
    touched = (torch.maximum(first_seen(start, anchor, 0, window), k0) < torch.minimum(anchor, k0 + keys)).any(dim=2)
    filled = ((first_seen(start, anchor, S - 1, window) <= k0) & (anchor >= k0 + keys)).all(dim=2)
    return touched, filled


def _ranges(touched_BRC: Tensor, filled_BRC: Tensor) -> Tensor:
    """[B, R, 4] int32: columns lo, full_lo, full_hi, hi of each row: all that is touched lies in [lo, hi), and [full_lo, full_hi) is filled.

    For ascending anchors the filled columns of a row are one run and the range is tight. For any others it is correct: what lies between is masked.
    """
    C = touched_BRC.shape[-1]
    column = torch.arange(C, device=touched_BRC.device)
    hi = torch.where(touched_BRC, column + 1, 0).amax(dim=-1)
    lo = torch.minimum(torch.where(touched_BRC, column, C).amin(dim=-1), hi)
    full_lo = torch.minimum(torch.where(filled_BRC, column, C).amin(dim=-1), hi)
    after = ~filled_BRC & (column >= full_lo[..., None])
    full_hi = torch.minimum(torch.where(after, column, C).amin(dim=-1), hi)
    return torch.stack([lo, full_lo, full_hi, hi], dim=-1).int()


@torch.library.custom_op("dflash::block_attention", mutates_args=())
def _forward(
    q: Tensor, kc: Tensor, vc: Tensor, kb: Tensor, vb: Tensor, start: Tensor, anchor: Tensor, forward: Tensor, by_key: Tensor, by_query: Tensor,
    window: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return launch_forward(q, kc, vc, kb, vb, IntervalMask(start, anchor, forward, by_key, by_query, window), TILINGS)


@_forward.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    B, Q, A, _D = q.shape
    return q.new_empty(q.shape), q.new_empty((B, A, Q), dtype=torch.float32)


@torch.library.custom_op("dflash::block_attention_backward", mutates_args=())
def _backward(
    q: Tensor, kc: Tensor, vc: Tensor, kb: Tensor, vb: Tensor, out: Tensor, lse: Tensor, dout: Tensor,
    start: Tensor, anchor: Tensor, forward: Tensor, by_key: Tensor, by_query: Tensor, window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return launch_backward(q, kc, vc, kb, vb, out, lse, dout, IntervalMask(start, anchor, forward, by_key, by_query, window), TILINGS)


@_backward.register_fake
def _(q: Tensor, kc: Tensor, vc: Tensor, kb: Tensor, vb: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    B, T, _G, D = kc.shape
    heads = (B, T, q.shape[2], D)
    return q.new_empty(q.shape), kc.new_empty(heads), vc.new_empty(heads), kb.new_empty(kb.shape), vb.new_empty(vb.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, kc, vc, kb, vb, start, anchor, forward, by_key, by_query, out, lse = ctx.saved_tensors
    dq, dkc, dvc, dkb, dvb = _backward(q, kc, vc, kb, vb, out, lse, dout, start, anchor, forward, by_key, by_query, ctx.window)
    group = q.shape[2] // kc.shape[2]
    dkc, dvc = (x.unflatten(2, (-1, group)).sum(3, dtype=torch.float32).to(kc.dtype) for x in (dkc, dvc))  # the heads of a group
    return dq, dkc, dvc, dkb, dvb, None, None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def launch_forward(q: Tensor, kc: Tensor, vc: Tensor, kb: Tensor, vb: Tensor, mask: IntervalMask, tilings: Tilings) -> tuple[Tensor, Tensor]:
    """``block_attention`` and the log-sum-exp [B, A, Q] (base 2) of each query's scaled scores."""
    from dflash_core.drafter.attention_kernel import forward_kernel  # Triton is not there on every platform

    q, kc, vc, kb, vb = (_rows_contiguous(x) for x in (q, kc, vc, kb, vb))
    B, Q, A, D = q.shape
    T, G, N, tiling = kc.shape[1], kc.shape[2], mask.anchor.shape[1], tilings.forward
    out, lse = torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty((B, A, Q), dtype=torch.float32)
    tiles = mask.forward.shape[1]
    forward_kernel[(tiles * B * A,)](
        q, kc, vc, kb, vb, out, lse, mask.start, mask.anchor, mask.forward,
        *_strides(q, kc, vc, kb, vb, out), A, A // G, N, T, Q, tiles, D**-0.5 * LOG2_E,
        **_walk(tiling, Q, T, Q // N, D, mask.window),
    )  # fmt: skip
    return out, lse


def launch_backward(
    q: Tensor, kc: Tensor, vc: Tensor, kb: Tensor, vb: Tensor, out: Tensor, lse: Tensor, dout: Tensor, mask: IntervalMask, tilings: Tilings
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, then dk and dv of the context with a head for each *query* head, then dk and dv of the blocks."""
    from dflash_core.drafter.attention_kernel import keys_kernel, own_block_kernel, queries_kernel

    q, kc, vc, kb, vb, dout = (_rows_contiguous(x) for x in (q, kc, vc, kb, vb, dout))
    B, Q, A, D = q.shape
    T, G, N = kc.shape[1], kc.shape[2], mask.anchor.shape[1]
    S, scale, factor = Q // N, D**-0.5, D**-0.5 * LOG2_E
    delta = torch.empty_like(lse)
    own_dq, dq = (torch.empty(q.shape, device=q.device, dtype=q.dtype) for _ in range(2))
    dkb, dvb = torch.empty(kb.shape, device=q.device, dtype=kb.dtype), torch.empty(vb.shape, device=q.device, dtype=vb.dtype)
    dk, dv = (torch.empty((B, T, A, D), device=q.device, dtype=kc.dtype) for _ in range(2))

    tiling = tilings.own
    queries = max(tiling.queries, S)  # whole blocks
    own_block_kernel[(-(-Q // queries), B * G)](
        q, kb, vb, out, dout, lse, delta, own_dq, dkb, dvb, *_strides(q, kb, vb, out, dout, own_dq, dkb, dvb), A, G, Q, factor, scale,
        GROUP=A // G, S=S, D=D, QUERIES=queries, EVEN_Q=Q % queries == 0, CAUSAL=mask.window > 0, num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    # dk and dv need the gradient of the scores, and dq needs no more than that and the keys: kept for a few heads at a time, it is computed once.
    by_key, by_query, key_tiles, query_tiles = tilings.by_key, tilings.by_query, mask.by_key.shape[1], mask.by_query.shape[1]
    padded_keys = max(key_tiles * by_key.keys, -(-T // by_query.keys) * by_query.keys)
    padded_queries = max(query_tiles * by_query.queries, -(-Q // by_key.queries) * by_key.queries)
    passes = -(-B * A * padded_keys * padded_queries * q.element_size() // SCORE_GRADIENT_BYTES)
    heads = -(-B * A // passes)
    ds = torch.empty((heads, padded_keys, padded_queries), device=q.device, dtype=q.dtype)
    for first in range(0, B * A, heads):
        heads = min(heads, B * A - first)
        keys_kernel[(key_tiles * heads,)](
            q, kc, vc, dout, lse, delta, dk, dv, ds, mask.start, mask.anchor, mask.by_key,
            *_strides(q, kc, vc, dout, dk), *ds.stride()[:2], first, A, A // G, N, T, Q, key_tiles, factor, scale,
            **_walk(by_key, Q, T, S, D, mask.window),
        )  # fmt: skip
        queries_kernel[(query_tiles * heads,)](
            kc, ds, own_dq, dq, mask.start, mask.anchor, mask.by_query,
            *_strides(kc, own_dq, dq), *ds.stride()[:2], first, A, A // G, N, T, Q, query_tiles, scale,
            **_walk(by_query, Q, T, S, D, mask.window),
        )  # fmt: skip
    return dq, dk, dv, dkb, dvb


def _walk(tiling: Tiling, Q: int, T: int, S: int, D: int, window: int) -> dict[str, Any]:
    """What a kernel that walks tiles is compiled for."""
    shape = {"S": S, "D": D, "WINDOW": window, "QUERIES": tiling.queries, "KEYS": tiling.keys}
    return shape | {"EVEN_Q": Q % tiling.queries == 0, "EVEN_T": T % tiling.keys == 0, "num_warps": tiling.warps, "num_stages": tiling.stages}


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    """Of each [B, X, heads, D]: row of the batch, head, position."""
    return [stride for x in tensors for stride in (x.stride(0), x.stride(2), x.stride(1))]
