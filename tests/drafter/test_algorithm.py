"""What may never bend: no block sees the future, another block or another document, and training computes what drafting computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.drafter import block_tokens
from tests.drafter.small import VOCABULARY, WINDOWED, Row, drafter_config, random_layout, small_drafter

EXACT = {"rtol": 0.0, "atol": 1e-5}
seeds = st.integers(0, 10_000)
windows = st.sampled_from([{}, WINDOWED, {"sliding_window": 4, "sliding_layers": (0, 1)}])


@settings(max_examples=25, deadline=None)
@given(seeds, windows)
def test_nothing_at_or_after_the_anchor_but_the_anchor_token_reaches_a_block(seed: int, window: dict[str, Any]) -> None:
    drafter, config = small_drafter(**window), drafter_config(**window)
    documents, anchors = random_layout(seed, T=40, N=5)
    row = Row(config, documents, anchors, seed)
    before = row.hidden(drafter)
    for n, anchor in enumerate(anchors.tolist()):
        if anchor < 0:
            continue
        changed = Row(config, documents, anchors, seed)
        changed.features[:, anchor:] = torch.randn_like(changed.features[:, anchor:]) * 5
        changed.tokens[:, anchor + 1 :] = (changed.tokens[:, anchor + 1 :] + 1) % VOCABULARY
        torch.testing.assert_close(changed.hidden(drafter)[n], before[n], **EXACT)


@settings(max_examples=25, deadline=None)
@given(seeds)
def test_a_block_depends_on_every_feature_of_its_document_before_the_anchor_and_on_no_other_document(seed: int) -> None:
    drafter, config = small_drafter(), drafter_config()
    documents, anchors = random_layout(seed, T=24, N=4)
    row = Row(config, documents, anchors, seed)
    row.features.requires_grad_(True)
    hidden = row.hidden(drafter)
    for n, anchor in enumerate(anchors.tolist()):
        (gradient,) = torch.autograd.grad(hidden[n].pow(2).sum(), row.features, retain_graph=True)
        reached = gradient[0].abs().sum(-1) > 0
        expected = (torch.arange(24) < anchor) & (documents == documents[max(anchor, 0)])
        assert torch.equal(reached, expected)


@settings(max_examples=25, deadline=None)
@given(seeds, st.sampled_from([4, 5, 9]))
def test_where_all_layers_slide_a_slot_depends_on_the_window_that_ends_with_itself(seed: int, window: int) -> None:
    changes = {"num_layers": 1, "sliding_window": window, "sliding_layers": (0,)}
    drafter, config = small_drafter(**changes), drafter_config(**changes)
    documents, anchors = random_layout(seed, T=24, N=3)
    row = Row(config, documents, anchors, seed)
    row.features.requires_grad_(True)
    hidden = row.hidden(drafter)
    for n, anchor in enumerate(anchors.tolist()):
        for slot in range(config.block_size):
            (gradient,) = torch.autograd.grad(hidden[n, slot].pow(2).sum(), row.features, retain_graph=True)
            reached = gradient[0].abs().sum(-1) > 0
            seen = (torch.arange(24) < anchor) & (torch.arange(24) > anchor + slot - window) & (documents == documents[max(anchor, 0)])
            assert torch.equal(reached, seen)


@settings(max_examples=25, deadline=None)
@given(seeds)
def test_a_block_is_unmoved_by_what_other_blocks_hold(seed: int) -> None:
    drafter, config = small_drafter(), drafter_config()
    documents, anchors = random_layout(seed, T=40, N=6)
    row = Row(config, documents, anchors, seed)
    alone = [Row(config, documents, anchors[n : n + 1], seed).hidden(drafter)[0] for n in range(len(anchors))]
    torch.testing.assert_close(row.hidden(drafter), torch.stack(alone), **EXACT)


@settings(max_examples=25, deadline=None)
@given(seeds, st.integers(1, 3), windows)
def test_a_training_block_equals_the_cached_drafting_of_one_block(seed: int, pieces: int, window: dict[str, Any]) -> None:
    drafter, config = small_drafter(**window), drafter_config(**window)
    documents, anchors = random_layout(seed, T=40, N=5)
    row = Row(config, documents, anchors, seed)
    hidden = row.hidden(drafter)
    ids = block_tokens(row.tokens, row.anchors, config)
    for n, anchor in enumerate(anchors.tolist()):
        if anchor < 0:
            continue
        start = int((documents == documents[anchor]).nonzero()[0])
        cache = drafter.new_cache(capacity=64)
        for piece in torch.arange(start, anchor).chunk(pieces) if anchor > start else ():
            drafter.read_context(row.features[:, piece], piece[:1] - start, cache)
        for _ in range(2):  # a draft leaves the context as it was
            drafted = drafter.draft(row.table[ids[:, n]], torch.tensor([anchor - start]), cache)
            torch.testing.assert_close(drafted[0], hidden[n], **EXACT)


def test_many_groups_of_dense_attention_equal_one(monkeypatch: pytest.MonkeyPatch) -> None:
    config = drafter_config()
    documents, anchors = random_layout(3, T=200, N=70)
    row = Row(config, documents, anchors)
    grouped = row.hidden(small_drafter())
    monkeypatch.setattr("dflash_core.drafter.layers.DENSE_GROUP", 10_000)
    torch.testing.assert_close(grouped, row.hidden(small_drafter()), **EXACT)


@settings(max_examples=15, deadline=None)
@given(seeds)
def test_hidden_states_follow_their_anchor_under_any_order_of_anchors(seed: int) -> None:
    drafter, config = small_drafter(), drafter_config()
    documents, anchors = random_layout(seed, T=40, N=6)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    shuffled = Row(config, documents, anchors[order], seed).hidden(drafter)
    torch.testing.assert_close(shuffled, Row(config, documents, anchors, seed).hidden(drafter)[order], **EXACT)


@settings(max_examples=15, deadline=None)
@given(seeds, st.integers(1, 30), st.integers(1, 4), windows)
def test_padding_and_empty_slots_change_no_block(seed: int, padding: int, empty: int, window: dict[str, Any]) -> None:
    drafter, config = small_drafter(**window), drafter_config(**window)
    documents, anchors = random_layout(seed, T=30, N=4)
    row = Row(config, documents, anchors, seed)
    padded = Row(config, torch.cat([documents, documents.new_full((padding,), -1)]), torch.cat([anchors, anchors.new_full((empty,), -1)]), seed)
    padded.features[:, :30], padded.tokens[:, :30], padded.table = row.features, row.tokens, row.table
    padded.features[:, 30:] = 1e4
    torch.testing.assert_close(padded.hidden(drafter)[:4], row.hidden(drafter), **EXACT)


def test_a_row_without_any_anchor_gives_finite_states_and_gradients() -> None:
    drafter = small_drafter()
    row = Row(drafter_config(), torch.full((16,), -1, dtype=torch.int32), torch.full((3,), -1))
    hidden = row.hidden(drafter)
    hidden.sum().backward()
    assert hidden.isfinite().all()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in drafter.parameters())
