"""The draft–verify loop on toy targets whose every probability is known, one request at a time and many at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.decoding import GREEDY, Decoder, Generation, Proposer, Sampling
from dflash_core.decoding.sampling import token_probabilities
from dflash_core.errors import InputError
from tests.decoding.toys import MarkovTarget, RandomProposer, SequenceProposer, chi_square_fits, decode

V = 11
PROMPT = [1, 2, 3]
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 0, 1, 2], [3, 3], [10, 9, 8, 7, 6]]


def markov(vocabulary: int = V, seed: int = 0, **arguments: int) -> MarkovTarget:
    logits = torch.randn(vocabulary, vocabulary, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2
    return MarkovTarget(logits, **arguments)


def own(target: MarkovTarget, new: int, stop: tuple[int, ...] = (), prompt: Sequence[int] = PROMPT) -> Generation:
    return decode(target, None, [prompt], new, stop=stop)[0]


def oracle(target: MarkovTarget, block: int, right: int | None = None, prompts: Sequence[list[int]] = (PROMPT,)) -> SequenceProposer:
    return SequenceProposer([[*prompt, *target.greedy_text(prompt, 100)] for prompt in prompts], V, block - 1, right)


def greedy(target: MarkovTarget, proposer: Proposer, new: int, block: int = 4, stop: tuple[int, ...] = ()) -> Generation:
    return decode(target, proposer, [PROMPT], new, block, stop)[0]


def test_baseline_is_the_argmax_chain_and_takes_one_pass_a_token() -> None:
    target = markov()
    generation = own(target, 20)
    assert list(generation.tokens) == target.greedy_text(PROMPT, 20)
    assert generation.target_passes == target.passes == 20
    assert generation.accepted == generation.drafted == (0,) * 19
    assert generation.draft_passes == 0


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 50), block=st.integers(2, 9), right=st.integers(0, 8), new=st.integers(1, 30))
def test_any_drafter_gives_the_targets_own_text(seed: int, block: int, right: int, new: int) -> None:
    target = markov(seed=seed)
    generation = greedy(target, oracle(target, block, right), new, block)
    assert list(generation.tokens) == target.greedy_text(PROMPT, new)
    assert set(generation.accepted) <= {min(right, block - 1)}


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 50), block=st.integers(1, 6), right=st.integers(0, 5), new=st.integers(1, 25), idle=st.integers(0, 2),
    stop=st.integers(0, 10),
)  # fmt: skip
def test_every_request_of_a_batch_is_answered_as_if_it_were_alone(seed: int, block: int, right: int, new: int, idle: int, stop: int) -> None:
    target = markov(seed=seed)
    prompts = [*PROMPTS, *[[0]] * idle]
    proposer = oracle(target, block, right, prompts) if block > 1 else None
    together = decode(target, proposer, PROMPTS, new, block, (stop,), rows=len(prompts))
    for prompt, one in zip(PROMPTS, together, strict=True):
        alone = decode(target, oracle(target, block, right, [prompt]) if block > 1 else None, [prompt], new, block, (stop,))[0]
        assert list(one.tokens) == list(alone.tokens) == target.greedy_text(prompt, new, (stop,))
        assert (one.finish_reason, one.accepted, one.drafted) == (alone.finish_reason, alone.accepted, alone.drafted)


def test_a_decoder_begins_every_batch_anew() -> None:
    target = markov()
    decoder = Decoder(
        target.info, target, RandomProposer(torch.zeros(3, V)),  # type: ignore[arg-type]
        rows=3, capacity=2000, max_new_tokens=20, block_size=4, stop_ids=(), sampling=Sampling(1.0),
    )  # fmt: skip
    first = decoder.generate(PROMPTS[:3], [1, 2, 3])
    decoder.generate(PROMPTS[3:], [4, 5])
    assert [one.tokens for one in decoder.generate(PROMPTS[:3], [1, 2, 3])] == [one.tokens for one in first]


@pytest.mark.parametrize("block", [2, 4, 8])
def test_an_oracle_has_an_acceptance_length_of_the_block_size(block: int) -> None:
    target = markov()
    generation = greedy(target, oracle(target, block), 1 + 5 * block, block)
    assert generation.accepted == (block - 1,) * 5
    assert generation.target_passes == 6


def test_a_drafter_that_is_always_wrong_has_an_acceptance_length_of_one() -> None:
    target = markov()
    generation = greedy(target, oracle(target, 4, 0), 12)
    assert generation.accepted == (0,) * 11
    assert generation.target_passes == 12


@pytest.mark.parametrize("new", range(1, 14))
def test_length_limit_in_the_middle_of_a_block_cuts_the_text_and_not_the_record(new: int) -> None:
    target = markov()
    generation = greedy(target, oracle(target, 4), new, 4)
    assert len(generation.tokens) == new
    assert generation.finish_reason == "length"
    assert set(generation.accepted) <= {3}
    assert set(generation.drafted) <= {3}


@pytest.mark.parametrize("where", range(13))
@pytest.mark.parametrize("right", [None, 2])
def test_stop_token_anywhere_in_a_block_ends_the_text_with_it(where: int, right: int | None) -> None:
    target = markov(seed=4)
    stop = own(target, 30).tokens[where]
    plain, generation = own(target, 30, (stop,)), greedy(target, oracle(target, 4, right), 30, 4, (stop,))
    assert generation.tokens == plain.tokens
    assert generation.tokens.count(stop) == 1
    assert generation.tokens[-1] == stop
    assert generation.finish_reason == plain.finish_reason == "stop"
    assert set(generation.accepted) <= {3 if right is None else right}


def test_stop_token_beyond_the_length_limit_is_not_a_stop() -> None:
    target = markov(seed=4)
    tokens = own(target, 6).tokens
    limit = next(n for n in range(2, 6) if tokens[n] not in tokens[:n])
    generation = greedy(target, oracle(target, 6), limit, 6, (tokens[limit],))
    assert generation.tokens == tokens[:limit]
    assert generation.finish_reason == "length"


@pytest.mark.parametrize("positions", range(4, 16))
def test_the_text_ends_with_the_targets_positions_and_only_the_last_round_is_drafted_short(positions: int) -> None:
    target = markov(max_position_embeddings=positions)
    free = own(markov(), 40).tokens
    generation = greedy(target, oracle(markov(), 4), 40, 4)
    assert generation.tokens == own(target, 40).tokens == free[: positions - 3]
    assert generation.finish_reason == "length"
    assert all(count == 3 for count in generation.drafted[:-1])
    read = 3 + sum(accepted + 1 for accepted in generation.accepted[:-1])  # positions before the last block
    assert all(kept <= count for kept, count in zip(generation.accepted, generation.drafted, strict=True))
    assert not generation.drafted or generation.drafted[-1] == min(3, positions - 1 - read)


SAMPLINGS = [(2, Sampling(1.0)), (4, Sampling(0.7)), (3, Sampling(1.0, top_k=2)), (4, Sampling(1.3, top_p=0.8)), (1, Sampling(0.9))]


@pytest.mark.parametrize(("block", "sampling"), SAMPLINGS)
def test_sampled_texts_have_the_targets_distribution(block: int, sampling: Sampling) -> None:
    target = markov(3, seed=2)
    target.logits_VVV = target.logits_VVV / 2
    expected = torch.zeros(27)
    for text in itertools.product(range(3), repeat=3):
        context, chance = [0, 1], 1.0
        for token in text:
            chance *= float(token_probabilities(target.logits_VVV[context[-2], context[-1]], sampling)[token])
            context.append(token)
        expected[text[0] * 9 + text[1] * 3 + text[2]] = chance
    random = torch.Generator().manual_seed(5)
    proposer = RandomProposer(torch.randn(block - 1, 3, generator=random)) if block > 1 else None
    answers = decode(target, proposer, [[0, 1]] * 4000, 3, block, (), sampling, seeds=range(1000, 5000))
    assert chi_square_fits(torch.tensor([a * 9 + b * 3 + c for a, b, c in (one.tokens for one in answers)]), expected)


def test_sampled_texts_that_end_with_the_targets_positions_have_its_distribution() -> None:
    """The last round may draft one token only: what was drafted behind it must not leak into the residual."""
    target = MarkovTarget(torch.randn(3, 3, 3, generator=torch.Generator().manual_seed(3)), max_position_embeddings=5)
    expected = torch.zeros(27)
    for a, b, c in itertools.product(range(3), repeat=3):
        chance = target.next_probabilities([0, 1])[a] * target.next_probabilities([1, a])[b] * target.next_probabilities([a, b])[c]
        expected[a * 9 + b * 3 + c] = chance
    proposer = RandomProposer(torch.randn(3, 3, generator=torch.Generator().manual_seed(4)) * 2)
    answers = decode(target, proposer, [[0, 1]] * 4000, 9, 4, (), Sampling(1.0), seeds=range(4000))
    assert chi_square_fits(torch.tensor([a * 9 + b * 3 + c for a, b, c in (one.tokens for one in answers)]), expected)
    assert {count for one in answers for count in one.drafted} == {1, 2}


def test_the_seed_makes_the_draws_whatever_the_company() -> None:
    target = markov()
    proposer = RandomProposer(torch.zeros(3, V))

    def run(prompts: list[list[int]], seeds: list[int]) -> list[tuple[int, ...]]:
        return [one.tokens for one in decode(target, proposer, prompts, 30, 4, (), Sampling(1.0), seeds)]

    alone = run([PROMPT], [1])
    assert alone == run([PROMPT], [1]) != run([PROMPT], [2])
    assert run([[4, 4, 4, 4], PROMPT, [9]], [5, 1, 6])[1] == alone[0]


def test_times_of_the_stages_are_parts_of_the_whole() -> None:
    target = markov()
    for generation in decode(target, oracle(target, 4, 1, PROMPTS), PROMPTS, 20):
        stages = (generation.prefill_seconds, generation.draft_seconds, generation.verify_seconds)
        assert all(part > 0 for part in stages)
        assert sum(stages) <= generation.seconds


@pytest.mark.parametrize(
    ("prompts", "new", "message"),
    [
        ([[1], []], 5, "prompt_ids = []: is empty"),
        ([list(range(10))], 5, "max_position_embeddings = 10"),
        ([[1, 64]], 5, "prompt_ids = [1, 64]: has tokens outside the vocabulary of"),
        ([[-1]], 5, "prompt_ids = [-1]: has tokens outside the vocabulary of"),
        ([[1]], 0, "max_new_tokens = 0: must be at least 1"),
    ],
)
def test_impossible_requests_are_refused_with_what_to_do(prompts: list[list[int]], new: int, message: str) -> None:
    with pytest.raises(InputError) as error:
        decode(markov(max_position_embeddings=10), None, prompts, new)
    assert message in str(error.value)


def test_more_requests_than_rows_or_longer_ones_than_there_is_room_for_are_refused() -> None:
    target = markov()
    decoder = Decoder(
        target.info, target, None,  # type: ignore[arg-type]
        rows=1, capacity=10, max_new_tokens=6, block_size=1, stop_ids=(), sampling=GREEDY,
    )  # fmt: skip
    with pytest.raises(InputError, match=r"prompts = 2: must be 1 to 1"):
        decoder.generate([[1], [2]])
    with pytest.raises(InputError, match=r"capacity = 10: 4 tokens, an answer of up to 6 and a block of 1 are more"):
        decoder.generate([[1, 2, 3, 4]])
