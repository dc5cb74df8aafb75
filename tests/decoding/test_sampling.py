"""Speculative sampling keeps the target's distribution; filters do what Transformers' do."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from dflash_core.decoding.sampling import Sampling, draw, token_probabilities, uniform_table, verify_greedy, verify_sampled
from dflash_core.errors import InputError
from tests.decoding.toys import chi_square_fits

DRAWS = 20_000


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def one_round(target_SV: Tensor, draft_KV: Tensor, draws: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """``draws`` independent verifications of one block: drafted_BK, accepted_B, next_B."""
    uniform_BU = torch.rand(draws, 2 * len(draft_KV) + 1, generator=generator(seed))
    K = len(draft_KV)
    draft_BKV = draft_KV.expand(draws, *draft_KV.shape)
    drafted_BK = draw(draft_BKV, uniform_BU[:, :K])
    verdict = verify_sampled(target_SV.expand(draws, *target_SV.shape), draft_BKV, drafted_BK, torch.full((draws,), K), uniform_BU[:, K:])
    return drafted_BK, verdict.accepted, verdict.following


def first_token(drafted_BK: Tensor, accepted_B: Tensor, next_B: Tensor) -> Tensor:
    return torch.where(accepted_B > 0, drafted_BK[:, 0], next_B)


def test_two_tokens_give_the_target_distribution_and_the_exact_acceptance_rate() -> None:
    p, q = torch.tensor([0.3, 0.7]), torch.tensor([0.8, 0.2])
    drafted, accepted, following = one_round(torch.stack([p, p]), q[None], 200_000)
    # Exactly: token 0 is drafted with 0.8 and kept with 3/8; token 1 is drafted with 0.2 and always kept: 0.3 + 0.2 = sum of min(p, q).
    assert (accepted == 1).float().mean().item() == pytest.approx(0.5, abs=0.004)
    refused = accepted == 0
    assert bool((drafted[refused, 0] == 0).all())
    assert bool((following[refused] == 1).all()), "the residual (p - q)+ holds only token 1"
    assert (first_token(drafted, accepted, following) == 0).float().mean().item() == pytest.approx(0.3, abs=0.004)


@pytest.mark.parametrize("seed", range(4))
def test_first_token_follows_the_target_whatever_was_drafted(seed: int) -> None:
    random = generator(100 + seed)
    target_SV = torch.randn(4, 6, generator=random).mul(1.5).softmax(-1)
    draft_KV = torch.randn(3, 6, generator=random).mul(1.5).softmax(-1)
    drafted, accepted, following = one_round(target_SV, draft_KV, DRAWS, seed)
    assert chi_square_fits(first_token(drafted, accepted, following), target_SV[0])


def test_every_later_token_follows_the_target_given_that_it_was_reached() -> None:
    random = generator(7)
    target_SV = torch.randn(4, 5, generator=random).softmax(-1)
    draft_KV = torch.randn(3, 5, generator=random).softmax(-1)
    drafted, accepted, following = one_round(target_SV, draft_KV, 4 * DRAWS)
    for slot in range(1, 4):
        reached = accepted >= slot
        kept = drafted[:, slot] if slot < 3 else following
        token = torch.where(accepted > slot, kept, following)[reached]
        assert chi_square_fits(token, target_SV[slot]), f"slot {slot}"


def test_tokens_the_target_excludes_are_never_produced() -> None:
    target = torch.tensor([0.0, 0.5, 0.5]).expand(2, 3)
    drafted, accepted, following = one_round(target, torch.tensor([[0.9, 0.05, 0.05]]), DRAWS)
    assert not bool((first_token(drafted, accepted, following) == 0).any())


def test_a_drafter_equal_to_the_target_is_always_accepted() -> None:
    target = torch.randn(4, 8, generator=generator(3)).softmax(-1)
    _, accepted, _ = one_round(target, target[:-1], DRAWS)
    assert bool((accepted == 3).all())


def test_nothing_drafted_is_a_draw_from_the_target() -> None:
    target = torch.tensor([[0.2, 0.5, 0.3]])
    _, accepted, following = one_round(target, torch.zeros(0, 3), DRAWS)
    assert bool((accepted == 0).all())
    assert chi_square_fits(following, target[0])


def test_rejection_that_only_matched_tokens_would_be_caught() -> None:
    """The chi-square test has the power to see the usual mistake: resampling from p instead of (p - q)+."""
    p, q = torch.tensor([0.2, 0.3, 0.5]), torch.tensor([0.6, 0.2, 0.2])
    drafted, accepted, _ = one_round(torch.stack([p, p]), q[None], DRAWS)
    wrong = draw(p.expand(DRAWS, 3), torch.rand(DRAWS, generator=generator(1)))
    assert not chi_square_fits(first_token(drafted, accepted, wrong), p)


@settings(max_examples=60, deadline=None)
@given(
    temperature=st.floats(0.2, 3.0),
    top_p=st.floats(0.05, 0.999),
    top_k=st.integers(1, 12),
    seed=st.integers(0, 10_000),
)
def test_filters_equal_those_of_transformers(temperature: float, top_p: float, top_k: int, seed: int) -> None:
    logits = torch.randn(3, 12, generator=generator(seed)) * 2
    warped = logits
    for warper in (TemperatureLogitsWarper(temperature), TopKLogitsWarper(top_k), TopPLogitsWarper(top_p)):
        warped = warper(torch.zeros(3, 1, dtype=torch.long), warped)
    ours = token_probabilities(logits, Sampling(temperature, top_p, top_k))
    torch.testing.assert_close(ours, warped.softmax(-1))


@pytest.mark.parametrize(
    ("sampling", "field"),
    [({"temperature": value}, "temperature") for value in (-1.0, 1e-45, math.nan, math.inf)]
    + [({"top_p": value}, "top_p") for value in (0.0, -0.5, 1.5, math.nan)]
    + [({"top_k": -1}, "top_k")],
)
def test_settings_that_nothing_can_be_drawn_by_are_refused(sampling: dict[str, float], field: str) -> None:
    with pytest.raises(InputError, match=f"{field} = "):
        Sampling(**sampling)  # type: ignore[arg-type]


def test_probabilities_sum_to_one_and_keep_the_best_token_even_for_a_tiny_top_p() -> None:
    probabilities = token_probabilities(torch.tensor([[1.0, 5.0, 2.0]]), Sampling(1.0, top_p=1e-6))
    assert probabilities.tolist() == [[0.0, 1.0, 0.0]]


@settings(max_examples=60, deadline=None)
@given(matching=st.integers(0, 5), later=st.lists(st.booleans(), min_size=5, max_size=5))
def test_greedy_keeps_the_longest_matching_prefix_and_adds_the_targets_token(matching: int, later: list[bool]) -> None:
    choice = torch.tensor([3, 1, 4, 1, 5, 9])
    logits = torch.nn.functional.one_hot(choice, 10).float()[None]
    drafted = choice[None, :5].clone()
    for slot in range(matching, 5):
        if slot == matching or not later[slot]:
            drafted[0, slot] = (choice[slot] + 1) % 10
    verdict = verify_greedy(logits, drafted, torch.tensor([5]))
    assert verdict.accepted.tolist() == [matching]
    assert verdict.following.tolist() == [int(choice[matching])]


def test_requests_of_a_batch_are_verified_independently() -> None:
    logits = torch.nn.functional.one_hot(torch.tensor([[1, 2, 3], [1, 2, 3]]), 5).float()
    verdict = verify_greedy(logits, torch.tensor([[1, 2], [0, 2]]), torch.tensor([2, 2]))
    assert verdict.accepted.tolist() == [2, 0]
    assert verdict.following.tolist() == [3, 1]


def test_drafted_tokens_that_do_not_count_are_never_kept() -> None:
    logits = torch.nn.functional.one_hot(torch.tensor([[1, 2, 3]] * 3), 5).float()
    verdict = verify_greedy(logits, torch.tensor([[1, 2]] * 3), torch.tensor([0, 1, 2]))
    assert verdict.accepted.tolist() == [0, 1, 2]
    assert verdict.following.tolist() == [1, 2, 3]


def test_a_draw_never_hits_a_token_of_no_weight_even_at_the_ends_of_the_interval() -> None:
    weights = torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0]).expand(2, 5)
    assert draw(weights, torch.tensor([0.0, 1.0 - 2**-24])).tolist() == [1, 3]


def test_rows_of_the_table_of_uniform_numbers_are_functions_of_their_seeds() -> None:
    table = uniform_table([3, 1, 3], 1000)
    assert torch.equal(table[0], table[2])
    assert torch.equal(table[0], uniform_table([3], 1000)[0])
    assert not torch.equal(table[0], table[1])
    assert 0.0 <= float(table.min()) < float(table.max()) < 1.0
    assert float(table.mean()) == pytest.approx(0.5, abs=0.05)
