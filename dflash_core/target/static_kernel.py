"""Triton kernels of a static cache: putting new keys and values where each row stands, and attending to what each row holds.

    R rows   A query heads   G key/value heads, A = G * GROUP   S new tokens of a row   C slots of a row   D head size   M queries of a tile

A tile of queries is all S tokens and all heads that share one key/value head, so keys and values are read once for the whole group. A row's keys are
cut into SPLITS pieces of like length, each a program of its own (Dao et al., Flash-Decoding, 2023), so that a few rows with long contexts fill the
GPU too; ``combine_kernel`` joins the pieces. Only slots that a row has filled are read. Nothing depends on values on the host: fit for CUDA graphs.

Runs on CUDA, and on the CPU in Triton's interpreter (``TRITON_INTERPRET=1``).
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_kernel(
    k_ptr, v_ptr, keys_ptr, values_ptr, start_ptr, k_r, k_g, k_s, v_r, v_g, v_s, keys_r, keys_g, keys_c,
    S, last, ELEMENTS, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy k, v [R, G, S, D] into keys, values [R, G, C, D] at slot start + s of each row; beyond the last slot into that one."""
    r, s = (tl.program_id(0) // S).to(tl.int64), tl.program_id(0) % S
    slot = tl.minimum(tl.load(start_ptr + r) + s, last).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    g, d, inside = offsets // D, offsets % D, offsets < ELEMENTS
    to = r * keys_r + g * keys_g + slot * keys_c + d
    tl.store(keys_ptr + to, tl.load(k_ptr + r * k_r + g * k_g + s * k_s + d, mask=inside), mask=inside)
    tl.store(values_ptr + to, tl.load(v_ptr + r * v_r + g * v_g + s * v_s + d, mask=inside), mask=inside)


@triton.jit
def _finish(accumulator, total, largest, sink_ptr, heads, SINKS: tl.constexpr):
    """The softmax's end, base 2: a sink is a key without a value."""
    if SINKS:
        sink = tl.load(sink_ptr + heads).to(tl.float32) * 1.4426950408889634
        new_largest = tl.maximum(largest, sink)
        correction = tl.exp2(largest - new_largest)
        total = total * correction + tl.exp2(sink - new_largest)
        accumulator = accumulator * correction[:, None]
    return accumulator / total[:, None]


@triton.jit
def attend_kernel(
    q_ptr, keys_ptr, values_ptr, start_ptr, sink_ptr, out_ptr, part_ptr, state_ptr,
    q_r, q_a, q_s, keys_r, keys_g, keys_c, out_r, out_s, out_a,
    S, G, C, scale, cap, window,
    GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """out [R, S, A, D], or, with more than one split, part [R*G, tiles, SPLITS, M, DP] and state [R*G, tiles, SPLITS, 2, M] (largest, total)."""
    r, g = (tl.program_id(0) // G).to(tl.int64), (tl.program_id(0) % G).to(tl.int64)
    tile, split = tl.program_id(1), tl.program_id(2)
    queries = tile * M + tl.arange(0, M)
    s, a = queries // GROUP, g * GROUP + queries % GROUP
    real = s < S
    d = tl.arange(0, DP)
    start = tl.load(start_ptr + r).to(tl.int32)
    position = tl.minimum(start + s, C - 1)
    q = tl.load(q_ptr + r * q_r + a[:, None] * q_a + s[:, None] * q_s + d[None, :], mask=real[:, None] & (d[None, :] < D), other=0.0)

    lo = 0
    if WINDOWED:
        lo = tl.maximum(tl.minimum(start, C - 1) - window + 1, 0)
    hi = tl.minimum(start + S, C)
    piece = tl.cdiv(tl.cdiv(hi - lo, SPLITS), KEYS) * KEYS
    begin = lo + split * piece
    end = tl.minimum(begin + piece, hi)
    keys_ptr += r * keys_r + g * keys_g
    values_ptr += r * keys_r + g * keys_g

    accumulator = tl.zeros([M, DP], tl.float32)
    total = tl.zeros([M], tl.float32)
    largest = tl.full([M], float("-inf"), tl.float32)
    for first in range(begin, end, KEYS):
        slots = first + tl.arange(0, KEYS)
        at = slots[:, None].to(tl.int64) * keys_c + d[None, :]
        there = (slots[:, None] < end) & (d[None, :] < D)
        k = tl.load(keys_ptr + at, mask=there, other=0.0)
        v = tl.load(values_ptr + at, mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAPPED:
            scores = cap * (2.0 * tl.sigmoid(2.0 * scores / cap) - 1.0)  # tanh
        hidden = (slots[None, :] > position[:, None]) | (slots[None, :] >= end)
        if WINDOWED:
            hidden = hidden | (slots[None, :] <= position[:, None] - window)
        scores = tl.where(hidden, float("-inf"), scores * 1.4426950408889634)
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        safe = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # a query may see nothing of this piece
        p = tl.exp2(scores - safe[:, None])
        correction = tl.exp2(largest - safe)
        total = total * correction + tl.sum(p, 1)
        accumulator = tl.dot(p.to(v.dtype), v, accumulator * correction[:, None], input_precision="ieee")
        largest = new_largest

    if SPLITS == 1:
        result = _finish(accumulator, total, largest, sink_ptr, a, SINKS)
        to = out_ptr + r * out_r + s[:, None] * out_s + a[:, None] * out_a + d[None, :]
        tl.store(to, result.to(out_ptr.dtype.element_ty), mask=real[:, None] & (d[None, :] < D))
    else:
        index = ((tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tile) * SPLITS + split) * M
        tl.store(part_ptr + (index + tl.arange(0, M))[:, None] * DP + d[None, :], accumulator)
        tl.store(state_ptr + index * 2 + tl.arange(0, M), largest)
        tl.store(state_ptr + index * 2 + M + tl.arange(0, M), total)


@triton.jit
def combine_kernel(
    part_ptr, state_ptr, sink_ptr, out_ptr, out_r, out_s, out_a, S, G,
    GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, SPLITS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Join the pieces of one tile of queries."""
    r, g = (tl.program_id(0) // G).to(tl.int64), (tl.program_id(0) % G).to(tl.int64)
    tile = tl.program_id(1)
    rows, d = tl.arange(0, M), tl.arange(0, DP)
    s, a = (tile * M + rows) // GROUP, g * GROUP + (tile * M + rows) % GROUP
    accumulator = tl.zeros([M, DP], tl.float32)
    total = tl.zeros([M], tl.float32)
    largest = tl.full([M], float("-inf"), tl.float32)
    for split in range(SPLITS):
        index = ((tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tile) * SPLITS + split) * M
        piece_largest = tl.load(state_ptr + index * 2 + rows)
        new_largest = tl.maximum(largest, piece_largest)
        safe = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        correction, weight = tl.exp2(largest - safe), tl.exp2(piece_largest - safe)
        total = total * correction + tl.load(state_ptr + index * 2 + M + rows) * weight
        part = tl.load(part_ptr + (index + rows)[:, None] * DP + d[None, :])
        accumulator = accumulator * correction[:, None] + part * weight[:, None]
        largest = new_largest
    result = _finish(accumulator, total, largest, sink_ptr, a, SINKS)
    to = out_ptr + r * out_r + s[:, None] * out_s + a[:, None] * out_a + d[None, :]
    tl.store(to, result.to(out_ptr.dtype.element_ty), mask=(s < S)[:, None] & (d[None, :] < D))
