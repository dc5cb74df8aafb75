"""The prompts of evaluation sets: both turns of a conversation, from any source, made once."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_core.config import EvaluationSet, PipelineConfig
from dflash_core.data import benchmarks, render_prompt
from dflash_core.decoding import autoregressive_generate
from dflash_core.errors import DataError
from dflash_core.evaluation import EvaluationPrompt, set_prompts
from dflash_core.stages import stage_lock
from dflash_core.target import TargetModel, load_tokenizer

Make = Callable[..., list[EvaluationPrompt]]
CHATS = [
    {"id": "a", "messages": [{"role": "user", "content": "Say one"}, {"role": "assistant", "content": ""}, {"role": "user", "content": "And two"}]},
    {"id": "b", "prompt": "Say three"},
]


@pytest.fixture
def make(config: PipelineConfig, target: TargetModel, tmp_path: Path) -> Make:
    def call(rows: list[Any], model: Callable[[], TargetModel] = lambda: target, **changes: Any) -> list[EvaluationPrompt]:
        source = tmp_path / "chats.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        tokenizer = load_tokenizer(target.info.path)
        return set_prompts(config, EvaluationSet(name="chats", source=str(source), **changes), target.info, tokenizer, model, tmp_path / "sets")

    return call


def test_the_second_turn_is_asked_with_the_targets_own_answer_to_the_first(make: Make, target: TargetModel, config: PipelineConfig) -> None:
    prompts = make(CHATS)
    assert [(item.set, item.id, item.conversation) for item in prompts] == [("chats", "a", "a"), ("chats", "a#2", "a"), ("chats", "b", "b")]
    tokenizer = load_tokenizer(target.info.path)
    own = autoregressive_generate(
        target, prompts[0].tokens, max_new_tokens=config.evaluation.max_new_tokens, stop_ids=target.info.eos_token_ids
    ).tokens
    answer = tokenizer.decode([token for token in own if token not in target.info.eos_token_ids], skip_special_tokens=True)
    first, _, second = CHATS[0]["messages"]
    assert list(prompts[1].tokens) == render_prompt(tokenizer, [first, {"role": "assistant", "content": answer}, second])
    assert list(prompts[2].tokens) == render_prompt(tokenizer, [{"role": "user", "content": "Say three"}])


def test_a_set_is_made_once_and_anew_when_its_file_changes(make: Make) -> None:
    def none() -> TargetModel:
        raise AssertionError("the target is not needed")

    prompts = make(CHATS)
    assert make(CHATS, none) == prompts
    assert make(CHATS[1:], none) == prompts[2:], "a single turn needs no answer"
    assert [item.id for item in make(CHATS, limit=1)] == ["a", "a#2"]


@pytest.mark.parametrize("damage", [b"", b"{}", b"[5]", b'[{"id": "a"}]', b"\xff"], ids=range(5))
def test_a_set_that_was_damaged_since_it_was_made_is_made_again(make: Make, tmp_path: Path, damage: bytes) -> None:
    prompts = make(CHATS[1:])
    (made,) = (tmp_path / "sets").glob("chats-*/*.json")
    made.write_bytes(damage)
    assert make(CHATS[1:]) == prompts
    assert made.read_bytes() != damage


def test_several_evaluations_may_read_a_set_at_once_once_it_is_made(make: Make, tmp_path: Path) -> None:
    prompts = make(CHATS)
    (folder,) = (tmp_path / "sets").glob("chats-*/")
    with stage_lock(folder):
        assert make(CHATS) == prompts


def test_rows_that_cannot_be_used_are_named_with_the_set(make: Make) -> None:
    with pytest.raises(DataError, match=r"evaluation set chats[\s\S]*chats.jsonl:1"):
        make([{"question": "?"}])
    with pytest.raises(DataError, match=r"evaluation.sets \(chats\) = .*holds no rows"):
        make([])


def test_benchmarks_come_out_of_their_packages_as_the_sets_are_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = {
        "HumanEval.jsonl.gz": gzip.compress(json.dumps({"task_id": "HumanEval/7", "prompt": 'def f():\n    """Do."""\n'}).encode()),
        "question.jsonl": json.dumps({"question_id": 81, "turns": ["Write.", "Rewrite."]}).encode(),
        "cases.jsonl": json.dumps({"id": "gsm8k-test-0013", "prompt": "How many?", "expected": "18"}).encode() + b"\n",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(benchmarks, "fetch_package_file", lambda requirement, member, sha256: tmp_path / Path(member).name)
    [problem], [chat], [question] = (list(source()) for source in benchmarks.BENCHMARKS.values())
    assert problem["id"] == "humaneval-7"
    assert '```python\ndef f():\n    """Do."""\n```' in problem["prompt"]
    assert [(turn["role"], turn["content"]) for turn in chat["messages"]] == [("user", "Write."), ("assistant", ""), ("user", "Rewrite.")]
    assert question == {"id": "gsm8k-test-0013", "prompt": "How many?"}


@pytest.mark.slow
def test_the_real_packages_give_the_whole_benchmarks() -> None:
    for name, source in benchmarks.BENCHMARKS.items():
        rows = list(source())
        turns = sum(1 if "prompt" in row else sum(message["role"] == "user" for message in row["messages"]) for row in rows)
        assert (len({row["id"] for row in rows}), turns) == (len(rows), benchmarks.REQUESTS[name])
