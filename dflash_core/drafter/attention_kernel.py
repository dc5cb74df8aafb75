"""Triton kernels of the attention from draft blocks to their context and to themselves, forward and backward.

    B rows   A query heads   G key/value heads   T context   Q draft positions   S block size   D head size

A program of the forward and of the dq pass owns a tile of queries, one of the dk/dv pass a tile of context keys. Each walks one interval of the
other axis, which the context intervals of the blocks give (``attention.interval_mask``): tiles that are seen entirely need no mask, and those at the
ends compare a key with the interval of its query's block. A block sees of the draft keys its own only, so these are a square tile on the diagonal
that never enters the walk: the backward pass takes them together with what it needs once a query anyway (``own_block_kernel``).

The pass by key computes the gradient of the scores for dk and writes it down: dq is one product of it then, and the pass by query reads instead of
computing scores, exponentials and gradient again.

A sliding window (WINDOW, 0 for none) makes the intervals later and the walks shorter. Each further slot of a block sees one key less at the far end,
which is compared where the ends are, and of its own block nothing after itself.

Programs start with the longest walk first. Without that the last program to start decides when the pass ends (benchmarks/RESULTS.md).

Runs on CUDA, and on the CPU in Triton's interpreter (``TRITON_INTERPRET=1``).
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rows(pointer, offsets, stride, length, D: tl.constexpr, EVEN: tl.constexpr):
    """Load [offsets, D]; beyond ``length`` zero."""
    pointers = pointer + offsets[:, None] * stride + tl.arange(0, D)[None, :]
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=offsets[:, None] < length, other=0.0)


@triton.jit
def _put_rows(pointer, offsets, stride, length, values, D: tl.constexpr, EVEN: tl.constexpr):
    pointers = pointer + offsets[:, None] * stride + tl.arange(0, D)[None, :]
    if EVEN:
        tl.store(pointers, values.to(pointer.dtype.element_ty))
    else:
        tl.store(pointers, values.to(pointer.dtype.element_ty), mask=offsets[:, None] < length)


@triton.jit
def _first_seen(start, anchor, queries, S: tl.constexpr, WINDOW: tl.constexpr):
    """``masks.first_seen`` of each query; without a window the start of its block's context."""
    if WINDOW > 0:
        return tl.maximum(start, anchor + queries % S - (WINDOW - 1))
    return start


@triton.jit
def _foreign(queries, keys, S: tl.constexpr, CAUSAL: tl.constexpr):
    """[queries, keys]: draft keys of another block, and with a window those after the query's own."""
    hidden = (queries // S)[:, None] != (keys // S)[None, :]
    if CAUSAL:
        hidden = hidden | (keys[None, :] > queries[:, None])
    return hidden


@triton.jit
def _walked(i, lo, full_lo, full_hi, MASKED: tl.constexpr):
    """The ``i``-th tile of a walk: the entirely visible ones lie between the masked ones."""
    if MASKED:
        return tl.where(lo + i < full_lo, lo + i, full_hi + (lo + i - full_lo))
    return full_lo + i


@triton.jit
def _walk_length(lo, full_lo, full_hi, hi, MASKED: tl.constexpr):
    if MASKED:
        return (full_lo - lo) + (hi - full_hi)
    return full_hi - full_lo


@triton.jit
def _attend(accumulator, total, largest, q, k, v, hidden, factor, MASKED: tl.constexpr):
    """One step of the running softmax in powers of two; ``hidden`` [queries, keys] is True where nothing is seen."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        scores = tl.where(hidden, float("-inf"), scores)
    new_largest = tl.maximum(largest, tl.max(scores, 1) * factor)
    p = tl.exp2(scores * factor - new_largest[:, None])
    correction = tl.exp2(largest - new_largest)
    total = total * correction + tl.sum(p, 1)
    accumulator = accumulator * correction[:, None]
    accumulator = tl.dot(p.to(v.dtype), v, accumulator, input_precision="ieee")
    return accumulator, total, new_largest


@triton.jit
def _forward_walk(
    accumulator, total, largest, q, k_ptr, v_ptr, stride_k, stride_v, start, anchor, lo, full_lo, full_hi, hi, T, factor,
    D: tl.constexpr, KEYS: tl.constexpr, EVEN_T: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    for i in range(_walk_length(lo, full_lo, full_hi, hi, MASKED)):
        keys = _walked(i, lo, full_lo, full_hi, MASKED) * KEYS + tl.arange(0, KEYS)
        k = _rows(k_ptr, keys, stride_k, T, D, EVEN_T)
        v = _rows(v_ptr, keys, stride_v, T, D, EVEN_T)
        hidden = (keys[None, :] < start[:, None]) | (keys[None, :] >= anchor[:, None])
        accumulator, total, largest = _attend(accumulator, total, largest, q, k, v, hidden, factor, MASKED)
    return accumulator, total, largest


@triton.jit
def forward_kernel(
    q_ptr, kc_ptr, vc_ptr, kb_ptr, vb_ptr, out_ptr, lse_ptr, start_ptr, anchor_ptr, ranges_ptr,
    q_b, q_a, q_q, kc_b, kc_g, kc_t, vc_b, vc_g, vc_t, kb_b, kb_g, kb_q, vb_b, vb_g, vb_q, out_b, out_a, out_q,
    A, GROUP, N, T, Q, tiles, factor,
    S: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, EVEN_Q: tl.constexpr, EVEN_T: tl.constexpr,
):  # fmt: skip
    """out and, for the backward pass, lse: the logarithm (base 2) of each query's sum."""
    heads = tl.num_programs(0) // tiles
    tile = tiles - 1 - tl.program_id(0) // heads  # late anchors see most
    b, a = (tl.program_id(0) % heads) // A, (tl.program_id(0) % heads) % A
    b, a, g = b.to(tl.int64), a.to(tl.int64), (a // GROUP).to(tl.int64)
    queries = tile * QUERIES + tl.arange(0, QUERIES)
    slots = tl.minimum(queries // S, N - 1)
    start, anchor = tl.load(start_ptr + b * N + slots), tl.load(anchor_ptr + b * N + slots)
    start = _first_seen(start, anchor, queries, S, WINDOW)
    q = _rows(q_ptr + b * q_b + a * q_a, queries, q_q, Q, D, EVEN_Q)

    accumulator = tl.zeros([QUERIES, D], tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    largest = tl.full([QUERIES], float("-inf"), tl.float32)
    # Its own block first: every query sees that, so the running maximum is finite from here on.
    for piece in tl.static_range(0, QUERIES, KEYS):
        keys = tile * QUERIES + piece + tl.arange(0, KEYS)
        k = _rows(kb_ptr + b * kb_b + g * kb_g, keys, kb_q, Q, D, EVEN_Q)
        v = _rows(vb_ptr + b * vb_b + g * vb_g, keys, vb_q, Q, D, EVEN_Q)
        hidden = _foreign(queries, keys, S, WINDOW > 0)
        scores = tl.where(hidden, float("-inf"), tl.dot(q, tl.trans(k), input_precision="ieee") * factor)
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        safe = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        p = tl.exp2(scores - safe[:, None])
        correction = tl.exp2(largest - safe)
        total = total * correction + tl.sum(p, 1)
        accumulator = tl.dot(p.to(v.dtype), v, accumulator * correction[:, None], input_precision="ieee")
        largest = new_largest

    k_ptr, v_ptr = kc_ptr + b * kc_b + g * kc_g, vc_ptr + b * vc_b + g * vc_g
    ranges_ptr += (b * tiles + tile) * 4
    lo, full_lo, full_hi, hi = tl.load(ranges_ptr), tl.load(ranges_ptr + 1), tl.load(ranges_ptr + 2), tl.load(ranges_ptr + 3)
    accumulator, total, largest = _forward_walk(
        accumulator, total, largest, q, k_ptr, v_ptr, kc_t, vc_t, start, anchor, lo, full_lo, full_hi, hi, T, factor, D, KEYS, EVEN_T, False
    )
    accumulator, total, largest = _forward_walk(
        accumulator, total, largest, q, k_ptr, v_ptr, kc_t, vc_t, start, anchor, lo, full_lo, full_hi, hi, T, factor, D, KEYS, EVEN_T, True
    )
    _put_rows(out_ptr + b * out_b + a * out_a, queries, out_q, Q, accumulator / total[:, None], D, EVEN_Q)
    lse = largest + tl.log2(total)
    tl.store(lse_ptr + (b * A + a) * Q + queries, lse, mask=queries < Q)


@triton.jit
def own_block_kernel(
    q_ptr, kb_ptr, vb_ptr, out_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, dkb_ptr, dvb_ptr,
    q_b, q_a, q_q, kb_b, kb_g, kb_q, vb_b, vb_g, vb_q, out_b, out_a, out_q, do_b, do_a, do_q, dq_b, dq_a, dq_q,
    dkb_b, dkb_g, dkb_q, dvb_b, dvb_g, dvb_q, A, G, Q, factor, scale,
    GROUP: tl.constexpr, S: tl.constexpr, D: tl.constexpr, QUERIES: tl.constexpr, EVEN_Q: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """The blocks' own keys, for all query heads of a group: their gradients, the first part of dq, and delta = sum(out * dout)."""
    tile = tl.program_id(0)
    b, g = (tl.program_id(1) // G).to(tl.int64), (tl.program_id(1) % G).to(tl.int64)
    queries = tile * QUERIES + tl.arange(0, QUERIES)
    k = _rows(kb_ptr + b * kb_b + g * kb_g, queries, kb_q, Q, D, EVEN_Q)
    v = _rows(vb_ptr + b * vb_b + g * vb_g, queries, vb_q, Q, D, EVEN_Q)
    hidden = _foreign(queries, queries, S, CAUSAL)
    dk = tl.zeros([QUERIES, D], tl.float32)
    dv = tl.zeros([QUERIES, D], tl.float32)
    for i in range(GROUP):
        a = g * GROUP + i
        q = _rows(q_ptr + b * q_b + a * q_a, queries, q_q, Q, D, EVEN_Q)
        do = _rows(do_ptr + b * do_b + a * do_a, queries, do_q, Q, D, EVEN_Q)
        out = _rows(out_ptr + b * out_b + a * out_a, queries, out_q, Q, D, EVEN_Q)
        delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
        tl.store(delta_ptr + (b * A + a) * Q + queries, delta, mask=queries < Q)
        lse = tl.load(lse_ptr + (b * A + a) * Q + queries, mask=queries < Q, other=float("inf"))
        p = tl.exp2(tl.where(hidden, float("-inf"), tl.dot(q, tl.trans(k), input_precision="ieee") * factor - lse[:, None]))
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision="ieee")
        ds = (p * (tl.dot(do, tl.trans(v), input_precision="ieee") - delta[:, None])).to(q.dtype)
        dk = tl.dot(tl.trans(ds), q, dk, input_precision="ieee")
        dq = tl.dot(ds, k, input_precision="ieee") * scale
        _put_rows(dq_ptr + b * dq_b + a * dq_a, queries, dq_q, Q, dq, D, EVEN_Q)
    _put_rows(dkb_ptr + b * dkb_b + g * dkb_g, queries, dkb_q, Q, dk * scale, D, EVEN_Q)
    _put_rows(dvb_ptr + b * dvb_b + g * dvb_g, queries, dvb_q, Q, dv, D, EVEN_Q)


@triton.jit
def _keys_walk(
    dk, dv, k, v, keys, q_ptr, do_ptr, ds_ptr, lse_ptr, delta_ptr, start_ptr, anchor_ptr, q_q, do_q, ds_t, lo, full_lo, full_hi, hi,
    N, Q, factor,
    S: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, EVEN_Q: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    for i in range(_walk_length(lo, full_lo, full_hi, hi, MASKED)):
        queries = _walked(i, lo, full_lo, full_hi, MASKED) * QUERIES + tl.arange(0, QUERIES)
        q = _rows(q_ptr, queries, q_q, Q, D, EVEN_Q)
        do = _rows(do_ptr, queries, do_q, Q, D, EVEN_Q)
        if EVEN_Q:
            lse, delta = tl.load(lse_ptr + queries), tl.load(delta_ptr + queries)
        else:
            lse = tl.load(lse_ptr + queries, mask=queries < Q, other=float("inf"))
            delta = tl.load(delta_ptr + queries, mask=queries < Q, other=0.0)
        scores = tl.dot(k, tl.trans(q), input_precision="ieee") * factor - lse[None, :]  # [keys, queries]
        p = tl.exp2(scores)
        if MASKED:
            slots = tl.minimum(queries // S, N - 1)
            start, anchor = tl.load(start_ptr + slots), tl.load(anchor_ptr + slots)
            start = _first_seen(start, anchor, queries, S, WINDOW)
            p = tl.where((keys[:, None] >= start[None, :]) & (keys[:, None] < anchor[None, :]), p, 0.0)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
        ds = (p * (tl.dot(v, tl.trans(do), input_precision="ieee") - delta[None, :])).to(q.dtype)
        tl.store(ds_ptr + tl.arange(0, KEYS)[:, None] * ds_t + queries[None, :], ds)
        dk = tl.dot(ds, q, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["first_head"])
def keys_kernel(
    q_ptr, kc_ptr, vc_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, ds_ptr, start_ptr, anchor_ptr, ranges_ptr,
    q_b, q_a, q_q, kc_b, kc_g, kc_t, vc_b, vc_g, vc_t, do_b, do_a, do_q, dk_b, dk_a, dk_t, ds_h, ds_t,
    first_head, A, GROUP, N, T, Q, tiles, factor, scale,
    S: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, EVEN_Q: tl.constexpr, EVEN_T: tl.constexpr,
):  # fmt: skip
    """dk and dv [B, T, A, D] of the context, one query head at a time, and the gradient of the scores, from which ``queries_kernel`` makes dq."""
    heads = tl.num_programs(0) // tiles
    tile, head = tl.program_id(0) // heads, tl.program_id(0) % heads  # early keys are seen most
    b, a = (first_head + head) // A, (first_head + head) % A
    b, a, g = b.to(tl.int64), a.to(tl.int64), (a // GROUP).to(tl.int64)
    ds_ptr += head.to(tl.int64) * ds_h + (tile * KEYS).to(tl.int64) * ds_t
    keys = tile * KEYS + tl.arange(0, KEYS)
    k = _rows(kc_ptr + b * kc_b + g * kc_g, keys, kc_t, T, D, EVEN_T)
    v = _rows(vc_ptr + b * vc_b + g * vc_g, keys, vc_t, T, D, EVEN_T)
    q_ptr, do_ptr = q_ptr + b * q_b + a * q_a, do_ptr + b * do_b + a * do_a
    lse_ptr, delta_ptr = lse_ptr + (b * A + a) * Q, delta_ptr + (b * A + a) * Q
    start_ptr, anchor_ptr = start_ptr + b * N, anchor_ptr + b * N
    ranges_ptr += (b * tiles + tile) * 4
    lo, full_lo, full_hi, hi = tl.load(ranges_ptr), tl.load(ranges_ptr + 1), tl.load(ranges_ptr + 2), tl.load(ranges_ptr + 3)
    dk = tl.zeros([KEYS, D], tl.float32)
    dv = tl.zeros([KEYS, D], tl.float32)
    dk, dv = _keys_walk(
        dk, dv, k, v, keys, q_ptr, do_ptr, ds_ptr, lse_ptr, delta_ptr, start_ptr, anchor_ptr, q_q, do_q, ds_t, lo, full_lo, full_hi, hi,
        N, Q, factor, S, D, WINDOW, QUERIES, KEYS, EVEN_Q, False,
    )  # fmt: skip
    dk, dv = _keys_walk(
        dk, dv, k, v, keys, q_ptr, do_ptr, ds_ptr, lse_ptr, delta_ptr, start_ptr, anchor_ptr, q_q, do_q, ds_t, lo, full_lo, full_hi, hi,
        N, Q, factor, S, D, WINDOW, QUERIES, KEYS, EVEN_Q, True,
    )  # fmt: skip
    _put_rows(dk_ptr + b * dk_b + a * dk_a, keys, dk_t, T, dk * scale, D, EVEN_T)
    _put_rows(dv_ptr + b * dk_b + a * dk_a, keys, dk_t, T, dv, D, EVEN_T)


@triton.jit
def _queries_walk(
    dq, queries, start, anchor, k_ptr, ds_ptr, stride_k, ds_t, lo, full_lo, full_hi, hi, T,
    D: tl.constexpr, KEYS: tl.constexpr, EVEN_T: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    for i in range(_walk_length(lo, full_lo, full_hi, hi, MASKED)):
        first = _walked(i, lo, full_lo, full_hi, MASKED) * KEYS
        keys = first + tl.arange(0, KEYS)
        k = _rows(k_ptr, keys, stride_k, T, D, EVEN_T)
        ds = tl.load(ds_ptr + first.to(tl.int64) * ds_t + tl.arange(0, KEYS)[:, None] * ds_t + queries[None, :])  # [keys, queries]
        if MASKED:  # also what no program of ``keys_kernel`` has come by, and nobody has written
            ds = tl.where((keys[:, None] >= start[None, :]) & (keys[:, None] < anchor[None, :]), ds, 0.0)
        dq = tl.dot(tl.trans(ds), k, dq, input_precision="ieee")
    return dq


@triton.jit(do_not_specialize=["first_head"])
def queries_kernel(
    kc_ptr, ds_ptr, own_ptr, dq_ptr, start_ptr, anchor_ptr, ranges_ptr,
    kc_b, kc_g, kc_t, own_b, own_a, own_q, dq_b, dq_a, dq_q, ds_h, ds_t,
    first_head, A, GROUP, N, T, Q, tiles, scale,
    S: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, EVEN_Q: tl.constexpr, EVEN_T: tl.constexpr,
):  # fmt: skip
    """dq: the share of the own block, which is there already, and that of the context."""
    heads = tl.num_programs(0) // tiles
    tile, head = tiles - 1 - tl.program_id(0) // heads, tl.program_id(0) % heads
    b, a = (first_head + head) // A, (first_head + head) % A
    b, a, g = b.to(tl.int64), a.to(tl.int64), (a // GROUP).to(tl.int64)
    queries = tile * QUERIES + tl.arange(0, QUERIES)
    slots = tl.minimum(queries // S, N - 1)
    start, anchor = tl.load(start_ptr + b * N + slots), tl.load(anchor_ptr + b * N + slots)
    start = _first_seen(start, anchor, queries, S, WINDOW)
    k_ptr = kc_ptr + b * kc_b + g * kc_g
    ds_ptr += head.to(tl.int64) * ds_h
    ranges_ptr += (b * tiles + tile) * 4
    lo, full_lo, full_hi, hi = tl.load(ranges_ptr), tl.load(ranges_ptr + 1), tl.load(ranges_ptr + 2), tl.load(ranges_ptr + 3)
    dq = tl.zeros([QUERIES, D], tl.float32)
    dq = _queries_walk(dq, queries, start, anchor, k_ptr, ds_ptr, kc_t, ds_t, lo, full_lo, full_hi, hi, T, D, KEYS, EVEN_T, False)
    dq = _queries_walk(dq, queries, start, anchor, k_ptr, ds_ptr, kc_t, ds_t, lo, full_lo, full_hi, hi, T, D, KEYS, EVEN_T, True)
    own = _rows(own_ptr + b * own_b + a * own_a, queries, own_q, Q, D, EVEN_Q).to(tl.float32)
    _put_rows(dq_ptr + b * dq_b + a * dq_a, queries, dq_q, Q, dq * scale + own, D, EVEN_Q)
