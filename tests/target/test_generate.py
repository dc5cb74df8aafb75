"""Batched generation: the same answers as one at a time, draws of one's own, rows that are refilled and in the end fewer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.config import GenerationConfig
from dflash_core.errors import TargetError
from dflash_core.target import StaticTarget, TargetModel
from dflash_core.target.sampling import pick_tokens

PROMPTS = [list(range(10, 10 + length)) for length in (5, 17, 2, 11, 8)]


def _greedy(**changes: object) -> GenerationConfig:
    return GenerationConfig(**{"max_new_tokens": 12, "batch_size": 8, **changes})


def _step_by_step(target: TargetModel, prompt: list[int], count: int) -> list[int]:
    """Reference: the whole sequence anew for every token, no cache, no padding."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(target._model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("batch_size", [8, 2])
def test_greedy_answers_in_a_batch_are_those_of_recomputing_every_prefix(target: TargetModel, batch_size: int) -> None:
    answers = target.generate(PROMPTS, _greedy(batch_size=batch_size), stop=())
    assert [list(answer.tokens) for answer in answers] == [_step_by_step(target, prompt, 12) for prompt in PROMPTS]
    assert {answer.finish_reason for answer in answers} == {"length"}


@pytest.mark.parametrize("target", ["llama", "gemma3_text"], indirect=True)
def test_an_answer_ends_with_its_stop_token_and_the_others_go_on(target: TargetModel) -> None:
    full = [list(answer.tokens) for answer in target.generate(PROMPTS, _greedy(), stop=())]
    stop = full[0][3]
    answers = target.generate(PROMPTS, _greedy(batch_size=3), stop=[stop])
    for answer, tokens in zip(answers, full, strict=True):
        end = tokens.index(stop) + 1 if stop in tokens else len(tokens)
        assert list(answer.tokens) == tokens[:end]
        assert answer.finish_reason == ("stop" if stop in tokens else "length")


@pytest.mark.parametrize("target", ["llama"], indirect=True)
def test_finished_rows_leave_the_batch(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    first = [answer.tokens[0] for answer in target.generate(PROMPTS, _greedy(max_new_tokens=1), stop=())]
    stop = set(first[:3])
    assert stop.isdisjoint(first[3:])
    rows: list[int] = []
    forward = StaticTarget.forward

    def counted(self: StaticTarget, ids_RS: torch.Tensor, *arguments: object, **named: object) -> object:
        if ids_RS.shape[1] == 1:
            rows.append(ids_RS.shape[0])
        return forward(self, ids_RS, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(StaticTarget, "forward", counted)
    target.generate(PROMPTS, _greedy(max_new_tokens=4), stop=sorted(stop))
    assert rows == [5, 2, 2]


@pytest.mark.parametrize("target", ["qwen3"], indirect=True)
def test_a_sampled_answer_depends_on_its_own_seed_and_not_on_its_company(target: TargetModel) -> None:
    sampling = _greedy(temperature=0.8, top_p=0.9, top_k=50)
    seeds = [7, 8, 9, 10, 11]
    together = target.generate(PROMPTS, sampling, seeds=seeds, stop=())
    order = [3, 0, 4]
    fewer = target.generate([PROMPTS[index] for index in order], sampling, seeds=[seeds[index] for index in order], stop=())
    alone = target.generate(PROMPTS, _greedy(temperature=0.8, top_p=0.9, top_k=50, batch_size=1), seeds=seeds, stop=())
    assert fewer == [together[index] for index in order]
    assert alone == together
    assert target.generate(PROMPTS, sampling, seeds=[1007, 8, 9, 10, 11], stop=())[1:] == together[1:]
    assert target.generate(PROMPTS, sampling, seeds=[1007, 8, 9, 10, 11], stop=())[0] != together[0]


@pytest.mark.parametrize("target", ["llama"], indirect=True)
def test_the_targets_own_end_tokens_are_the_default_and_progress_counts_responses(target: TargetModel) -> None:
    seen: list[tuple[int, int, str]] = []
    target.generate(PROMPTS, _greedy(batch_size=2), progress=lambda done, total, unit: seen.append((done, total, unit)))
    assert seen == [(done, 5, "responses") for done in range(1, 6)]
    assert target.info.eos_token_ids == (258,)


@pytest.mark.parametrize("target", ["llama"], indirect=True)
def test_wrong_calls_are_refused(target: TargetModel) -> None:
    with pytest.raises(TargetError, match="prompt 1 of 2 has no tokens"):
        target.generate([[1], []], _greedy())
    with pytest.raises(ValueError, match="sampling needs one seed per prompt"):
        target.generate([[1]], _greedy(temperature=1.0))
    with pytest.raises(ValueError, match="2 prompts but 1 seeds"):
        target.generate([[1], [2]], _greedy(), seeds=[1])
    assert target.generate([], _greedy()) == []


@pytest.mark.parametrize("target", ["llama"], indirect=True)
def test_more_rows_than_memory_holds_are_refused_with_the_settings_to_lower(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr("dflash_core.target.static.torch.zeros", full)
    with pytest.raises(TargetError, match=r"batch_size = 5: .* max_new_tokens = 12 after prompts of up to 32 tokens"):
        target.generate(PROMPTS, _greedy(batch_size=5))
    monkeypatch.undo()
    with pytest.raises(TargetError, match=rf"batch_size = 5: .* max_new_tokens = {2**31 - 1} after prompts of up to 32 tokens"):
        target.generate(PROMPTS, _greedy(batch_size=5, max_new_tokens=2**31 - 1))  # more than any CPU has


def _allowed(logits: np.ndarray, temperature: float, top_p: float, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """Reference: ids and probabilities after temperature, top_k and top_p, likeliest first."""
    order = np.argsort(-logits, kind="stable")[: top_k or None]
    scaled = np.exp((logits[order] - logits.max()) / temperature)
    probability = scaled / scaled.sum()
    count = int((np.cumsum(probability) < top_p).sum()) + 1 if top_p < 1.0 else len(order)
    kept = probability[:count]
    return order[:count], kept / kept.sum()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.floats(0.2, 3.0),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 8, 1000]),
)
def test_drawn_frequencies_are_those_of_the_restricted_distribution(seed: int, temperature: float, top_p: float, top_k: int) -> None:
    logits = np.random.default_rng(seed).normal(size=12) * 2
    ids, probability = _allowed(logits, temperature, top_p, top_k)
    uniforms = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000  # evenly spread, so that frequencies are exact to 1/2000 a token
    config = GenerationConfig(temperature=temperature, top_p=top_p, top_k=top_k)
    picked = pick_tokens(torch.tensor(logits)[None].expand(2000, -1), config, uniforms)
    frequency = np.bincount(picked.numpy(), minlength=12) / 2000
    expected = np.zeros(12)
    expected[ids] = probability
    np.testing.assert_allclose(frequency, expected, atol=1.5 / 2000 + 1e-6)


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2**-53])
def test_the_ends_of_the_unit_interval_pick_possible_tokens(uniform: float) -> None:
    logits = torch.tensor([[-torch.inf, 1.0, 0.0, -torch.inf]])
    for top_p in (1.0, 0.6):
        picked = pick_tokens(logits, GenerationConfig(temperature=1.0, top_p=top_p), torch.tensor([uniform], dtype=torch.float64))
        assert picked.item() in (1, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 0.8, "top_p": 0.9, "top_k": 20}])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_on_the_gpu_answers_are_those_of_the_cpu_and_in_bfloat16_the_same_in_any_company(
    family: str, sampling: dict[str, float], tiny_folder: Callable[[str], Path]
) -> None:
    prompts = [[(7 * index + place) % 250 for place in range(3 + 5 * (index % 11))] for index in range(60)]
    seeds = list(range(60))
    config = _greedy(batch_size=20, **sampling)
    exact = TargetModel.from_pretrained(tiny_folder(family), dtype=torch.float32)
    want = exact.generate(prompts, config, seeds=seeds, stop=[5, 6, 7])
    got = TargetModel.from_pretrained(exact.info, dtype=torch.float32, device="cuda").generate(prompts, config, seeds=seeds, stop=[5, 6, 7])
    assert sum(a == b for a, b in zip(got, want, strict=True)) >= 58
    target = TargetModel.from_pretrained(exact.info, dtype=torch.bfloat16, device="cuda")
    together = target.generate(prompts, config, seeds=seeds, stop=[5, 6, 7])
    some = [31, 2, 59, 17, 8]
    fewer = target.generate([prompts[index] for index in some], config, seeds=[seeds[index] for index in some], stop=[5, 6, 7])
    assert fewer == [together[index] for index in some]
