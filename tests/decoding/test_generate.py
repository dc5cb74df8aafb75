"""The draft–verify loop on toy targets whose every probability is known."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.decoding.generate import Generation, Proposer, autoregressive_generate, decode
from dflash_core.decoding.sampling import Sampling
from dflash_core.errors import InputError
from tests.decoding.toys import MarkovTarget, RandomProposer, SequenceProposer, chi_square_fits

V = 11
PROMPT = [1, 2, 3]
GREEDY = Sampling()


def markov(vocabulary: int = V, seed: int = 0, **arguments: int) -> MarkovTarget:
    logits = torch.randn(vocabulary, vocabulary, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2
    return MarkovTarget(logits, **arguments)


def greedy(target: MarkovTarget, proposer: Proposer | None, new: int, block: int = 4, stop: tuple[int, ...] = ()) -> Generation:
    return decode(target, proposer, PROMPT, new, block, stop, GREEDY, None)  # type: ignore[arg-type]


def own(target: MarkovTarget, new: int, stop: tuple[int, ...] = ()) -> Generation:
    return autoregressive_generate(target, PROMPT, max_new_tokens=new, stop_ids=stop)  # type: ignore[arg-type]


def oracle(target: MarkovTarget, right: int | None = None, prompt: list[int] = PROMPT) -> SequenceProposer:
    known = autoregressive_generate(target, prompt, max_new_tokens=100, stop_ids=())  # type: ignore[arg-type]
    return SequenceProposer([*prompt, *known.tokens], V, right)


def test_baseline_is_the_argmax_chain_and_takes_one_pass_a_token() -> None:
    target = markov()
    context = list(PROMPT)
    for _ in range(20):
        context.append(int(target.next_probabilities(context).argmax()))
    generation = own(target, 20)
    assert list(generation.tokens) == context[3:]
    assert generation.target_passes == 20
    assert generation.accepted == generation.drafted == (0,) * 19
    assert generation.draft_passes == 0
    assert target.fed == [PROMPT, *[[token] for token in generation.tokens[:-1]]]


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 50), block=st.integers(2, 9), right=st.integers(0, 8), new=st.integers(1, 30))
def test_any_drafter_gives_the_targets_own_text(seed: int, block: int, right: int, new: int) -> None:
    target = markov(seed=seed)
    generation = greedy(target, oracle(target, right), new, block)
    assert generation.tokens == own(target, new).tokens
    assert set(generation.accepted) <= {min(right, block - 1)}


@pytest.mark.parametrize("block", [2, 4, 8])
def test_an_oracle_has_an_acceptance_length_of_the_block_size(block: int) -> None:
    target = markov()
    generation = greedy(target, oracle(target), 1 + 5 * block, block)
    assert generation.accepted == (block - 1,) * 5
    assert generation.target_passes == 6


def test_a_drafter_that_is_always_wrong_has_an_acceptance_length_of_one() -> None:
    target = markov()
    generation = greedy(target, oracle(target, 0), 12)
    assert generation.accepted == (0,) * 11
    assert generation.target_passes == 12


@pytest.mark.parametrize("new", range(1, 14))
def test_length_limit_in_the_middle_of_a_block_cuts_the_text_and_not_the_record(new: int) -> None:
    target = markov()
    generation = greedy(target, oracle(target), new, 4)
    assert len(generation.tokens) == new
    assert generation.finish_reason == "length"
    assert set(generation.accepted) <= {3}
    assert set(generation.drafted) <= {3}


@pytest.mark.parametrize("where", range(13))
@pytest.mark.parametrize("right", [None, 2])
def test_stop_token_anywhere_in_a_block_ends_the_text_with_it(where: int, right: int | None) -> None:
    target = markov(seed=4)
    stop = own(target, 30).tokens[where]
    plain, generation = own(target, 30, (stop,)), greedy(target, oracle(target, right), 30, 4, (stop,))
    assert generation.tokens == plain.tokens
    assert generation.tokens.count(stop) == 1
    assert generation.tokens[-1] == stop
    assert generation.finish_reason == plain.finish_reason == "stop"
    assert set(generation.accepted) <= {3 if right is None else right}


def test_stop_token_beyond_the_length_limit_is_not_a_stop() -> None:
    target = markov(seed=4)
    tokens = own(target, 6).tokens
    limit = next(n for n in range(2, 6) if tokens[n] not in tokens[:n])
    generation = greedy(target, oracle(target), limit, 6, (tokens[limit],))
    assert generation.tokens == tokens[:limit]
    assert generation.finish_reason == "length"


@pytest.mark.parametrize("positions", range(4, 16))
def test_no_position_beyond_the_targets_last_is_ever_read(positions: int) -> None:
    target = markov(max_position_embeddings=positions)
    free = own(markov(), 40).tokens
    proposer = oracle(markov())
    generation = greedy(target, proposer, 40, 4)
    assert generation.tokens == own(target, 40).tokens == free[: positions - 3]
    assert target.longest <= positions
    assert generation.finish_reason == "length"
    assert all(count == 3 for count in generation.drafted[:-1]), "only the last round may be drafted short"


def test_the_drafter_sees_the_features_of_every_committed_position_once_and_in_order() -> None:
    target = markov()
    proposer = oracle(target, 2)
    generation = greedy(target, proposer, 20, 5)
    text = [*PROMPT, *generation.tokens]
    assert proposer.committed == text[: len(proposer.committed)]
    assert len(proposer.committed) > 15


@pytest.mark.parametrize(("block", "sampling"), [(2, Sampling(1.0)), (4, Sampling(0.7)), (3, Sampling(1.0, top_k=2)), (4, Sampling(1.3, top_p=0.8))])
def test_sampled_texts_have_the_targets_distribution(block: int, sampling: Sampling) -> None:
    from dflash_core.decoding.sampling import token_probabilities

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
    proposer = RandomProposer(torch.randn(block - 1, 3, generator=random))
    texts = [decode(target, proposer, [0, 1], 3, block, (), sampling, random).tokens for _ in range(3000)]  # type: ignore[arg-type]
    assert chi_square_fits(torch.tensor([a * 9 + b * 3 + c for a, b, c in texts]), expected)


def test_sampling_is_repeated_by_the_same_seed() -> None:
    target = markov()
    proposer = RandomProposer(torch.zeros(3, V))

    def run(seed: int) -> tuple[int, ...]:
        return decode(target, proposer, PROMPT, 30, 4, (), Sampling(1.0), torch.Generator().manual_seed(seed)).tokens  # type: ignore[arg-type]

    assert run(1) == run(1) != run(2)


def test_times_of_the_stages_are_parts_of_the_whole() -> None:
    target = markov()
    generation = greedy(target, oracle(target, 1), 20)
    stages = (generation.prefill_seconds, generation.draft_seconds, generation.verify_seconds)
    assert all(part > 0 for part in stages)
    assert sum(stages) <= generation.seconds


@pytest.mark.parametrize(
    ("prompt", "new", "sampling", "message"),
    [
        ([], 5, GREEDY, "prompt_ids = []: is empty"),
        (list(range(10)), 5, GREEDY, "max_position_embeddings = 10"),
        ([1], 0, GREEDY, "max_new_tokens = 0: must be at least 1"),
        ([1], 5, Sampling(1.0), "temperature 1.0 draws at random. Pass torch.Generator"),
    ],
)
def test_impossible_requests_are_refused_with_what_to_do(prompt: list[int], new: int, sampling: Sampling, message: str) -> None:
    with pytest.raises(InputError) as error:
        decode(markov(max_position_embeddings=10), None, prompt, new, 1, (), sampling, None)  # type: ignore[arg-type]
    assert message in str(error.value)
