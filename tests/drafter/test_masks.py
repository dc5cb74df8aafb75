"""The dense mask is the rule spelled out, and the block mask is what flex_attention's own builder finds for it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention

from dflash_core.drafter import dflash_block_mask, dflash_dense_mask
from tests.drafter.small import random_layout

LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")


def spelled_out(anchors: list[int], documents: list[int], S: int, window: int) -> Tensor:
    """[Q, T + Q] by looking at every pair; with a window, at how far apart their positions are."""
    T, Q = len(documents), len(anchors) * S
    seen = torch.zeros(Q, T + Q, dtype=torch.bool)
    for q in range(Q):
        anchor = anchors[q // S]
        for key in range(T):
            distance = anchor + q % S - key
            seen[q, key] = anchor >= 0 and key < anchor and documents[key] == documents[anchor] and (not window or distance < window)
        for slot in range(S):
            distance = q % S - slot
            seen[q, T + q // S * S + slot] = not window or 0 <= distance < window
    return seen


def index_sets(counts: Tensor, indices: Tensor) -> list[set[int]]:
    return [set(row[:count].tolist()) for count, row in zip(counts.flatten().tolist(), indices.flatten(0, -2), strict=True)]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Tensor, Tensor, int]:
    """Documents [B, T], anchors [B, N] and the block size."""
    T, N = draw(st.sampled_from([64, 100, 128, 130, 256, 300])), draw(st.sampled_from([1, 3, 5, 16, 24]))
    pairs = [random_layout(draw(st.integers(0, 10_000)), T, N) for _ in range(draw(st.sampled_from([1, 2])))]
    documents, anchors = (torch.stack(list(parts)) for parts in zip(*pairs, strict=True))
    return documents, anchors, draw(st.sampled_from([2, 4, 7, 8, 16, 32]))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([2, 3, 5]), st.sampled_from([0, 5, 9, 30]))
def test_the_dense_mask_shows_the_document_before_the_anchor_and_the_own_block_as_far_as_the_window_goes(seed: int, S: int, window: int) -> None:
    documents, anchors = random_layout(seed, T=20, N=4)
    mask = dflash_dense_mask(anchors[None], documents[None], S, window)
    assert mask.shape == (1, 1, 4 * S, 20 + 4 * S)
    assert torch.equal(mask[0, 0], spelled_out(anchors.tolist(), documents.tolist(), S, window))


@settings(max_examples=120, deadline=None)
@given(layouts(), st.sampled_from([16, 32, 128]), st.sampled_from([0, 32, 50, 128, 200]))
def test_the_block_mask_equals_what_create_block_mask_finds_forward_and_transposed(layout, tile: int, window: int) -> None:  # type: ignore[no-untyped-def]
    documents, anchors, S = layout
    B, Q, X = len(documents), anchors.shape[1] * S, documents.shape[1] + anchors.shape[1] * S
    dense = dflash_dense_mask(anchors, documents, S, window)
    ours = dflash_block_mask(anchors, documents, S, tile, window=window)
    theirs = create_block_mask(lambda b, h, q, k: dense[b, 0, q, k], B, None, Q, X, device="cpu", BLOCK_SIZE=tile)
    assert isinstance(ours, BlockMask)
    assert ours.seq_lengths == theirs.seq_lengths == (Q, X)
    assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    assert torch.equal(create_mask(ours.mask_mod, B, None, Q, X, device="cpu"), dense)
    for kind in ("kv", "full_kv", "q", "full_q"):
        counts, indices = f"{kind}_num_blocks", f"{kind}_indices"
        assert index_sets(getattr(ours, counts), getattr(ours, indices)) == index_sets(getattr(theirs, counts), getattr(theirs, indices))
    for name in LISTS:  # the order and the filling up, too: the kernels see the very same tensors
        assert torch.equal(getattr(ours, name), getattr(theirs, name))
        assert getattr(ours, name).dtype == torch.int32


def test_one_document_far_longer_than_a_tile_has_full_tiles_in_both_directions() -> None:
    documents, anchors = torch.zeros(1, 1024, dtype=torch.int32), torch.arange(500, 1012, 4)[None]
    mask = dflash_block_mask(anchors, documents, 8)
    assert int(mask.full_kv_num_blocks.sum()) == int(mask.full_q_num_blocks.sum()) > 20
    assert mask.full_kv_num_blocks[0, 0, -1] == 7  # the last anchors, 948 to 1008, all see the first seven tiles entirely


def test_of_a_long_document_a_window_leaves_the_tiles_that_it_reaches() -> None:
    documents, anchors = torch.zeros(1, 1024, dtype=torch.int32), torch.arange(500, 1012, 4)[None]
    mask = dflash_block_mask(anchors, documents, 8, window=300)
    last = mask.kv_num_blocks[0, 0, -1], mask.full_kv_num_blocks[0, 0, -1]
    assert last == (3, 1)  # of context 649 to 1007: tile 6 wholly, tiles 5 and 7 in part, and the own blocks
    assert set(mask.kv_indices[0, 0, -1, :3].tolist()) == {5, 7, 8 + 7}


def test_sizes_of_the_block_mask_depend_on_shapes_alone() -> None:
    sizes = set()
    for seed in range(12):
        documents, anchors = random_layout(seed, 300, 24)
        mask = dflash_block_mask(anchors[None], documents[None], 8)
        sizes.add(tuple(tuple(getattr(mask, name).shape) for name in LISTS))
    assert len(sizes) == 1


def test_the_block_mask_is_traced_whole_with_no_look_at_its_values() -> None:
    """fullgraph refuses any host synchronisation; a second layout must not compile again."""
    compiled = torch.compile(dflash_block_mask, fullgraph=True, dynamic=False, backend="eager")
    torch._dynamo.utils.counters.clear()
    for seed in (1, 2, 3):
        documents, anchors = random_layout(seed, 200, 16)
        got, want = compiled(anchors[None], documents[None], 8), dflash_block_mask(anchors[None], documents[None], 8)
        assert all(torch.equal(getattr(got, name), getattr(want, name)) for name in LISTS)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("seed", range(4))
def test_flex_attention_under_the_block_mask_equals_sdpa_under_the_dense_mask(seed: int) -> None:
    documents, anchors = random_layout(seed, 150, 20)
    S, T, Q = 8, 150, 160
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(1, 6, Q, 16, generator=generator)
    k, v = (torch.randn(1, 2, T + Q, 16, generator=generator) for _ in range(2))
    dense = dflash_dense_mask(anchors[None], documents[None], S)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense, enable_gqa=True)
    got = flex_attention(q, k, v, block_mask=dflash_block_mask(anchors[None], documents[None], S), enable_gqa=True)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
