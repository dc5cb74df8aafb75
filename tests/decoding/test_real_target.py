"""Decoding with real architectures: the text is that of Transformers' own ``generate``, whatever the drafter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dflash_core.config import DrafterConfig
from dflash_core.decoding import (
    GREEDY,
    BlockDrafter,
    Decoder,
    GrowingTarget,
    Room,
    Sampling,
    autoregressive_generate,
    measure_acceptance,
    open_decoder,
    open_verifier,
    speculative_generate,
)
from dflash_core.drafter import DFlashConfig, DFlashDrafter
from dflash_core.errors import InputError, TargetError
from dflash_core.target import TargetModel
from tests.decoding.oracle import OracleDrafter
from tests.target.tiny import save_tiny_target

FAMILIES = ("llama", "qwen3", "mistral", "gemma3_text")
PROMPT = [257, 40, 41, 99, 120, 7, 40]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TargetModel]:
    targets: dict[str, TargetModel] = {}

    def loaded(family: str) -> TargetModel:
        if family not in targets:
            folder: Path = save_tiny_target(family, tmp_path_factory.mktemp(family))
            targets[family] = TargetModel.from_pretrained(folder, dtype=torch.float32)
        return targets[family]

    return loaded


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path_factory.getbasetemp()))


def drafter(target: TargetModel, block_size: int = 8) -> DFlashDrafter:
    config = DrafterConfig(num_layers=2, block_size=block_size, mask_token_id=259, tap_layers=(0, 2))
    return DFlashDrafter(DFlashConfig.from_target(target.info, config)).init_weights(0)


def transformers_text(target: TargetModel, new: int) -> tuple[int, ...]:
    output = target._model.generate(
        torch.tensor([PROMPT]), attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long), max_new_tokens=new, do_sample=False, pad_token_id=256
    )
    return tuple(output[0, len(PROMPT) :].tolist())


@pytest.mark.parametrize("family", FAMILIES)
def test_both_ways_of_decoding_give_the_text_of_transformers(family: str, load: Callable[[str], TargetModel]) -> None:
    target = load(family)
    stops = target.info.eos_token_ids
    expected = transformers_text(target, 40)
    assert len(set(expected)) > 5, "a text that repeats one token would prove nothing"
    assert autoregressive_generate(target, PROMPT, max_new_tokens=40, stop_ids=stops).tokens == expected
    for block_size in (2, 5, 8):
        generation = speculative_generate(target, drafter(target), PROMPT, max_new_tokens=40, block_size=block_size, stop_ids=stops)
        assert generation.tokens == expected


def test_a_stop_token_of_the_target_ends_the_text_where_transformers_ends_it(load: Callable[[str], TargetModel], tmp_path: Path) -> None:
    stop = load("llama")
    token = autoregressive_generate(stop, PROMPT, max_new_tokens=40, stop_ids=()).tokens[11]
    target = TargetModel.from_pretrained(save_tiny_target("llama", tmp_path, eos_token_id=token), dtype=torch.float32)
    expected = transformers_text(target, 40)
    assert expected[-1] == token
    stops = target.info.eos_token_ids
    assert token in stops
    generation = speculative_generate(target, drafter(target), PROMPT, max_new_tokens=40, block_size=8, stop_ids=stops)
    assert generation.tokens == expected
    assert generation.finish_reason == "stop"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_drafter_has_an_acceptance_length_near_one(family: str, load: Callable[[str], TargetModel]) -> None:
    target = load(family)
    generations = [
        speculative_generate(target, drafter(target), [257, first, 3], max_new_tokens=24, block_size=8, stop_ids=()) for first in range(40, 46)
    ]
    assert measure_acceptance(generations, 8).pooled < 1.25


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("block_size", [2, 8])
def test_an_oracle_has_an_acceptance_length_of_the_block_size(family: str, block_size: int, load: Callable[[str], TargetModel]) -> None:
    target = load(family)
    own = autoregressive_generate(target, PROMPT, max_new_tokens=60, stop_ids=()).tokens
    oracle = OracleDrafter(target._model, [*PROMPT, *own], (0, 2), 8)
    generation = speculative_generate(target, oracle, PROMPT, max_new_tokens=40, block_size=block_size, stop_ids=())  # type: ignore[arg-type]
    assert generation.tokens == own[:40]
    assert measure_acceptance([generation], block_size).mean_of_requests == block_size
    assert generation.target_passes == 1 + -(-39 // block_size)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.8, top_k=50)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafts", [True, False], ids=["drafted", "alone"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_every_request_of_a_batch_of_any_lengths_gets_the_text_and_rounds_it_has_alone(
    family: str, drafts: bool, sampling: Sampling, load: Callable[[str], TargetModel]
) -> None:
    """By a static cache, whose rows stand at places of their own, against a cache that grows with the one request."""
    prompts = [PROMPT, [257, 9], [257, *range(30, 52)], [257, 99, 3, 3]]
    target = load(family)
    model = drafter(target) if drafts else None

    def decoder(rows: int) -> Decoder:
        room = Room(rows, longest_prompt=23, max_new_tokens=16, block_size=5)
        verifier = open_verifier(target, room) if rows > 1 else GrowingTarget(target)
        return open_decoder(target, model, verifier, room, stop_ids=target.info.eos_token_ids, sampling=sampling)

    together, single = decoder(5).generate(prompts, seeds=[3, 4, 5, 6]), decoder(1)
    for seed, (prompt, one) in enumerate(zip(prompts, together, strict=True), start=3):
        alone = single.generate([prompt], [seed])[0]
        assert (one.tokens, one.accepted, one.drafted) == (alone.tokens, alone.accepted, alone.drafted)


def test_the_cached_draft_of_a_round_equals_a_draft_from_the_whole_context(load: Callable[[str], TargetModel]) -> None:
    """What the drafter proposes after many rounds is what it would propose after one prefill of the same text."""
    target, model = load("llama"), drafter(load("llama"))
    room = {"rows": 1, "capacity": 64, "block_size": 8}
    proposed: list[tuple[int, torch.Tensor]] = []

    class Recording(BlockDrafter):
        def propose(self, last_R: torch.Tensor, anchor_R: torch.Tensor) -> torch.Tensor:
            logits = super().propose(last_R, anchor_R)
            proposed.append((int(anchor_R), logits))
            return logits

    proposer = Recording(model, target.vocabulary, **room)
    decoder = Decoder(target.info, GrowingTarget(target), proposer, max_new_tokens=24, stop_ids=(), **room)
    generation = decoder.generate([PROMPT])[0]
    text = [*PROMPT, *generation.tokens]
    with torch.inference_mode():
        for anchor, logits in proposed[::5]:
            features = target.forward(torch.tensor([text[:anchor]]), target.new_cache(), tap_layers=(0, 2)).features
            assert features is not None
            afresh = BlockDrafter(model, target.vocabulary, **room)
            afresh.read(features, torch.tensor([0]))
            torch.testing.assert_close(logits, afresh.propose(torch.tensor([text[anchor]]), torch.tensor([anchor])), rtol=1e-4, atol=1e-5)


def test_the_targets_positions_end_the_text_before_a_block_would_pass_them(tmp_path: Path) -> None:
    target = TargetModel.from_pretrained(save_tiny_target("llama", tmp_path, max_position_embeddings=20), dtype=torch.float32)
    own = autoregressive_generate(target, PROMPT, max_new_tokens=40, stop_ids=())
    generation = speculative_generate(target, drafter(target), PROMPT, max_new_tokens=40, block_size=8, stop_ids=())
    assert generation.tokens == own.tokens
    assert len(own.tokens) == 20 - len(PROMPT)


@pytest.mark.parametrize("block_size", [1, 9])
def test_block_sizes_that_cannot_be_drafted_are_refused(block_size: int, load: Callable[[str], TargetModel]) -> None:
    with pytest.raises(InputError, match="from 2 to the trained block size 8"):
        speculative_generate(load("llama"), drafter(load("llama")), PROMPT, max_new_tokens=4, block_size=block_size, stop_ids=())


def test_sampling_with_a_real_target_is_repeated_by_its_seed_and_respects_top_k_of_one(load: Callable[[str], TargetModel]) -> None:
    target = load("llama")

    def run(seed: int, top_k: int) -> tuple[int, ...]:
        sampling = Sampling(1.0, top_k=top_k)
        return speculative_generate(
            target, drafter(target), PROMPT, max_new_tokens=20, block_size=8, stop_ids=(), sampling=sampling, seed=seed
        ).tokens

    assert run(1, 0) == run(1, 0) != run(2, 0)
    assert run(1, 1) == run(2, 1) == autoregressive_generate(target, PROMPT, max_new_tokens=20, stop_ids=()).tokens


def test_one_request_of_a_target_that_a_static_cache_does_not_fit_is_decoded_with_a_growing_one(tmp_path: Path) -> None:
    target = TargetModel.from_pretrained(save_tiny_target("llama", tmp_path), dtype=torch.float32)
    target.decoder.config.num_kv_shared_layers = 1
    assert isinstance(open_verifier(target, Room(1, len(PROMPT), max_new_tokens=5, block_size=1)), GrowingTarget)
    with pytest.raises(TargetError, match="keys of others"):
        open_verifier(target, Room(2, len(PROMPT), max_new_tokens=5, block_size=1))


def test_recurrent_targets_are_refused_with_the_reason(tmp_path: Path) -> None:
    target = TargetModel.from_pretrained(save_tiny_target("qwen3_5_text", tmp_path), dtype=torch.float32)
    for rows in (1, 2):
        with pytest.raises(TargetError, match="linear_attention"):
            open_verifier(target, Room(rows, len(PROMPT), max_new_tokens=5, block_size=1))
