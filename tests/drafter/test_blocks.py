"""Anchors, block inputs and labels."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.drafter import IGNORE, SPECS, block_labels, block_positions, block_tokens, sample_anchors, valid_anchors
from tests.drafter.small import drafter_config, positions_of, random_layout


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@st.composite
def rows(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    T = draw(st.integers(2, 60))
    documents, _ = random_layout(draw(st.integers(0, 10_000)), T, 0)
    share = draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    return torch.rand(T, generator=generator(draw(st.integers(0, 10_000)))) < share, documents


def is_valid(t: int, mask: torch.Tensor, documents: torch.Tensor) -> bool:
    return t + 1 < len(mask) and bool(mask[t] and mask[t + 1]) and bool(documents[t] >= 0) and bool(documents[t] == documents[t + 1])


@settings(max_examples=100, deadline=None)
@given(rows(), st.integers(1, 20), st.integers(0, 1000))
def test_k_valid_positions_give_exactly_min_k_n_distinct_ascending_anchors_and_then_empty_slots(row, num_anchors: int, seed: int) -> None:  # type: ignore[no-untyped-def]
    mask, documents = row
    valid = [t for t in range(len(mask)) if is_valid(t, mask, documents)]
    assert valid_anchors(mask, documents).nonzero().flatten().tolist() == valid
    anchors = sample_anchors(mask, documents, num_anchors, generator(seed)).tolist()
    count = min(len(valid), num_anchors)
    assert len(anchors) == num_anchors
    assert anchors[count:] == [-1] * (num_anchors - count)
    assert anchors[:count] == sorted(set(anchors[:count]))
    assert set(anchors[:count]) <= set(valid)
    assert sample_anchors(mask, documents, num_anchors, generator(seed)).tolist() == anchors


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 60), st.integers(0, 1000))
def test_documents_share_the_slots_in_proportion_and_none_goes_without_where_slots_suffice(sizes: list[int], slots: int, seed: int) -> None:
    documents = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes) + 1).int()  # a document's last position is no anchor
    anchors = sample_anchors(torch.ones(len(documents), dtype=torch.bool), documents, slots, generator(seed))
    shares = documents[anchors[anchors >= 0]].bincount(minlength=len(sizes)).tolist()
    filled = min(slots, sum(sizes))
    assert sum(shares) == filled
    for size, share in zip(sizes, shares, strict=True):
        exact = filled * size / sum(sizes)
        assert share <= max(1, math.ceil(exact))
        assert share >= 1 or filled < len(sizes)
        if filled * min(sizes) >= sum(sizes):  # nobody needed more than a fair share
            assert share >= math.floor(exact)
    assert all(a >= b - 1 for x, a in zip(sizes, shares, strict=True) for y, b in zip(sizes, shares, strict=True) if x >= y)


def plain_anchors(mask: torch.Tensor, documents: torch.Tensor, slots: int, draws: torch.Generator) -> torch.Tensor:
    """``sample_anchors`` as it is said, operation after operation in torch."""
    valid = valid_anchors(mask, documents).nonzero().flatten()
    sizes = documents[valid].unique_consecutive(return_counts=True)[1]
    filled = min(len(valid), slots)
    shares = torch.zeros_like(sizes)
    if filled >= len(sizes):
        while (small := (sizes * (filled - shares.sum()) < sizes[shares == 0].sum()) & (shares == 0)).any():
            shares[small] = 1
    rest = torch.where(shares == 0, sizes, 0)
    if total := int(rest.sum()):
        ends = (rest.cumsum(0) * (filled - shares.sum()) + torch.randint(total, (), generator=draws)) // total
        shares = shares + ends.diff(prepend=ends.new_zeros(1))
    drawn = [own[torch.randperm(len(own), generator=draws)[:share]] for own, share in zip(valid.split(sizes.tolist()), shares.tolist(), strict=True)]
    return torch.cat([*(torch.cat(drawn).sort().values for _ in drawn[:1]), torch.full((slots - filled,), -1)])


@settings(max_examples=100, deadline=None)
@given(rows(), st.integers(1, 20), st.integers(0, 1000))
def test_the_anchors_of_a_seed_are_those_of_the_plain_rule(row, slots: int, seed: int) -> None:  # type: ignore[no-untyped-def]
    assert torch.equal(sample_anchors(*row, slots, generator(seed)), plain_anchors(*row, slots, generator(seed)))


def test_every_valid_position_is_drawn_equally_often_in_long_and_short_documents() -> None:
    documents = torch.tensor([0] * 15 + [1] * 7 + [-1] * 2, dtype=torch.int32)  # 14 and 6 valid positions: 3.5 and 1.5 of 5 slots
    mask, counts = torch.ones(24, dtype=torch.bool), torch.zeros(24)
    for seed in range(2000):
        counts[sample_anchors(mask, documents, 5, generator(seed))] += 1
    assert not counts[[14, 21, 22, 23]].any()
    drawn = torch.cat([counts[:14], counts[15:21]])
    assert ((drawn - 500).abs() < 5 * 500**0.5).all()  # 2000 draws of 5 out of 20


@settings(max_examples=60, deadline=None)
@given(rows(), st.integers(0, 1000), st.integers(2, 9), st.booleans())
def test_a_label_is_the_token_at_its_place_where_the_whole_run_from_the_anchor_is_supervised(row, seed: int, S: int, from_anchor: bool) -> None:  # type: ignore[no-untyped-def]
    mask, documents = row
    spec = replace(SPECS["dflash"], sample_from_anchor=from_anchor)
    tokens = torch.arange(100, 100 + len(mask))
    anchors = sample_anchors(mask, documents, 6, generator(seed))
    labels = block_labels(tokens[None], mask[None], documents[None], anchors[None], S, spec)[0]
    for n, anchor in enumerate(anchors.tolist()):
        for k in range(S):
            place = anchor + k + (1 if from_anchor else 0)
            run = range(anchor, place + 1)
            labelled = anchor >= 0 and place > anchor and all(t < len(mask) and mask[t] and documents[t] == documents[anchor] for t in run)
            assert labels[n, k] == (100 + place if labelled else IGNORE)


def test_every_anchor_that_is_drawn_has_at_least_one_label() -> None:
    for seed in range(50):
        documents, _ = random_layout(seed, 60, 0)
        mask = torch.rand(60, generator=generator(seed)) < 0.7
        anchors = sample_anchors(mask, documents, 8, generator(seed))
        labels = block_labels(torch.arange(60)[None], mask[None], documents[None], anchors[None], 4)[0]
        assert torch.equal((labels != IGNORE).any(-1), anchors >= 0)


def test_a_block_holds_its_anchor_token_then_mask_tokens_at_positions_counted_in_its_document() -> None:
    config = drafter_config()
    documents = torch.tensor([0] * 5 + [1] * 5 + [-1] * 2, dtype=torch.int32)
    tokens, anchors = torch.arange(20, 32)[None], torch.tensor([[2, 7, -1]])
    m = config.mask_token_id
    assert block_tokens(tokens, anchors, config).tolist() == [[[22, m, m, m], [27, m, m, m], [m, m, m, m]]]
    assert block_positions(positions_of(documents)[None], anchors, 4).tolist() == [[[2, 3, 4, 5], [2, 3, 4, 5], [0, 1, 2, 3]]]
