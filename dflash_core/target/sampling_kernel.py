"""Triton kernel that draws the next token of a row without sorting it.

What top_k and top_p keep is all tokens above a threshold and the first few of those that lie on it. The threshold is found by bisection on the bits
of the logits, whose order as integers is that of the numbers: 17 passes over a row of bfloat16 logits, which stay in the cache, 33 of float32.

Runs on CUDA, and on the CPU in Triton's interpreter (``TRITON_INTERPRET=1``).
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _weights(logits_ptr, ids, V, largest, factor, SHIFT: tl.constexpr):
    """Order and probability (times the same factor for all) of tokens; beyond the vocabulary the least order and none."""
    logits = tl.load(logits_ptr + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
    bits = logits.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT, tl.exp2((logits - largest) * factor)


@triton.jit
def _above(logits_ptr, V, largest, factor, order, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Of the tokens above an order: how many, and their probability. And that of a token on it."""
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    one = tl.zeros([BLOCK], tl.float32)
    for first in range(0, V, BLOCK):
        orders, weights = _weights(logits_ptr, first + tl.arange(0, BLOCK), V, largest, factor, SHIFT)
        count += (orders > order).to(tl.int32)
        mass += tl.where(orders > order, weights, 0.0)
        one = tl.maximum(one, tl.where(orders == order, weights, 0.0))
    return tl.sum(count, 0), tl.sum(mass, 0), tl.max(one, 0)


@triton.jit
def _threshold(logits_ptr, V, largest, factor, low, high, count, mass, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """The highest order from ``low`` (which is known to do) to ``high`` with at least so many tokens, and so much probability, on and above it."""
    for _ in range(33 - SHIFT):
        middle = low + (high - low + 1) // 2
        found_count, found_mass, _one = _above(logits_ptr, V, largest, factor, middle - 1, SHIFT, BLOCK)
        enough = (found_count >= count) & (found_mass >= mass)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
        high = tl.maximum(low, high)
    return low


@triton.jit
def draw_kernel(
    logits_ptr, uniform_ptr, picked_ptr, stride, V, factor, top_k, top_p,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """picked [R]: the first token at which the sum of what is kept, in the order of ids, exceeds uniform times all of it."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    maxima = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, V, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        maxima = tl.maximum(maxima, tl.load(logits_ptr + ids, mask=ids < V, other=float("-inf")).to(tl.float32))
    largest = tl.max(maxima, 0)
    bits = largest.to(tl.int32, bitcast=True)
    high = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT).to(tl.int64)

    lowest = high * 0 - (1 << (31 - SHIFT))  # below every number
    threshold = lowest
    _count, total, _one = _above(logits_ptr, V, largest, factor, threshold, SHIFT, BLOCK)
    ties = 0  # tokens on the threshold that are kept
    if TOP_K:
        threshold = _threshold(logits_ptr, V, largest, factor, lowest, high, top_k, 0.0, SHIFT, BLOCK)
        count, mass, one = _above(logits_ptr, V, largest, factor, threshold, SHIFT, BLOCK)
        ties = top_k - count
        total = mass + ties * one
    if TOP_P:
        wanted = top_p * total
        most = ties
        nucleus = _threshold(logits_ptr, V, largest, factor, threshold, high, 0, wanted, SHIFT, BLOCK)
        _count, mass, one = _above(logits_ptr, V, largest, factor, nucleus, SHIFT, BLOCK)
        ties = tl.maximum(tl.ceil((wanted - mass) / one), 1.0).to(tl.int32)
        if TOP_K:
            ties = tl.where(nucleus == threshold, tl.minimum(ties, most), ties)
        threshold = nucleus
        total = mass + ties * one

    wanted = (tl.load(uniform_ptr + row) * total).to(tl.float32)
    picked = V + 0
    last = 0
    sum = 0.0
    seen = 0
    for first in range(0, V, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        orders, weights = _weights(logits_ptr, ids, V, largest, factor, SHIFT)
        tied = (orders == threshold).to(tl.int32)
        kept = (orders > threshold) | ((tied > 0) & (seen + tl.cumsum(tied, 0) <= ties))
        weights = tl.where(kept, weights, 0.0)
        possible = weights > 0.0
        over = possible & (sum + tl.cumsum(weights, 0) > wanted)
        picked = tl.minimum(picked, tl.min(tl.where(over, ids, V), 0))
        last = tl.maximum(last, tl.max(tl.where(possible, ids, 0), 0))
        sum += tl.sum(weights, 0)
        seen += tl.sum(tied, 0)
    tl.store(picked_ptr + row, tl.minimum(picked, last).to(tl.int64))  # rounding may leave the sum short of all
