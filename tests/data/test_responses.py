"""Regeneration answers every assistant turn once, survives being killed at any moment, and repeats itself byte for byte."""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from dflash_core.config import GenerationConfig
from dflash_core.data import (
    RejectLog,
    Response,
    build_responses,
    driver,
    read_prompts,
    read_responses,
    render_prompt,
    save_response_cache,
    write_prompts,
)
from dflash_core.data.cache import Journal, cache_key, read_response_cache, write_response_cache
from dflash_core.errors import DataError
from tests.data import tiny
from tests.data.tiny import Echo, make_config, make_tokenizer

RESULTS = ("conversations.jsonl.gz", "counts.json", "rejected.jsonl")


def _chat(*turns: str) -> dict[str, Any]:
    return {"messages": [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(turns)]}


def _write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _many(count: int = 23) -> list[dict[str, Any]]:
    return [_chat(*["word " * (1 + index % 5) + str(index), "old answer", "and then?", "old answer"][: 1 + index % 4]) for index in range(count)]


def _build(folder: Path, source: str, generate: Any, **data: Any) -> dict[str, int]:
    config = make_config(source, **{"generation": {"batch_size": 2, "max_new_tokens": 8}, **data})
    return build_responses(config, make_tokenizer(tiny.CHATML), generate, folder, target_digest="target")


def _bytes(folder: Path) -> dict[str, bytes]:
    assert sorted(path.name for path in folder.iterdir()) == sorted(RESULTS)
    return {name: (folder / name).read_bytes() for name in RESULTS}


def test_every_assistant_turn_is_answered_from_the_history_of_new_answers(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tiny.CHATML)
    echo = Echo(tokenizer)
    source = _write(tmp_path / "p.jsonl", [_chat("Q1", "old", "Q2", "old", "Q3"), _chat("only")])
    counts = _build(tmp_path / "out", source, echo)
    first, second = read_responses(tmp_path / "out")
    assert [message.role for message in first.conversation.messages] == ["user", "assistant"] * 3
    assert "old" not in [message.content for message in first.conversation.messages]
    assert first.responses is not None
    assert second.responses is not None
    assert (len(first.responses), len(second.responses)) == (3, 1)
    assert [render_prompt(tokenizer, first.conversation.messages[:turn]) in echo.asked for turn in (1, 3, 5)] == [True] * 3
    tokens = sum(len(response.tokens) for response in (*first.responses, *second.responses))
    expected = {"rows": 2, "rejected": 0, "duplicates": 0, "conversations": 2, "turns": 4, "generated": 4, "from_cache": 0, "response_tokens": tokens}
    assert {name: counts[name] for name in expected} == expected


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_interrupted_after_any_response_and_started_again_gives_the_same_bytes_and_repeats_none(tmp_path: Path, temperature: float) -> None:
    source = _write(tmp_path / "p.jsonl", _many(9))
    settings = {"generation": {"batch_size": 2, "max_new_tokens": 8, "temperature": temperature}}
    whole = Echo(make_tokenizer(tiny.CHATML))
    _build(tmp_path / "whole", source, whole, **settings)
    for responses in range(0, len(whole.asked), 3):
        folder = tmp_path / f"out{responses}"
        first = Echo(make_tokenizer(tiny.CHATML), die_after=responses)
        with pytest.raises(KeyboardInterrupt):
            _build(folder, source, first, **settings)
        second = Echo(make_tokenizer(tiny.CHATML))
        _build(folder, source, second, **settings)
        assert sorted(first.asked + second.asked) == sorted(whole.asked)
        assert _bytes(folder) == _bytes(tmp_path / "whole")


def test_kill_9_loses_and_repeats_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = _write(tmp_path / "p.jsonl", _many())
    whole = Echo(make_tokenizer(tiny.CHATML))
    _build(tmp_path / "whole", source, whole)
    monkeypatch.setattr(driver, "_SYNC_SECONDS", 0.0)  # every response is written by itself
    asked = tmp_path / "asked"  # a byte for each response that was begun, in any life

    def life(dies_at: int) -> None:
        echo, answers = Echo(make_tokenizer(tiny.CHATML)), itertools.count(1)

        def generate(prompts: Any, generation: Any, /, *, seeds: Any) -> Any:
            for answer in echo(prompts, generation, seeds=seeds):
                with asked.open("ab") as file:
                    file.write(b".")
                if next(answers) == dies_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield answer

        _build(tmp_path / "out", source, generate)

    for dies_at in (3, 6, 10**9):
        child = os.fork()
        if child == 0:
            try:
                life(dies_at)
            finally:
                os._exit(0)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]) == (dies_at < 10**9)
    assert asked.stat().st_size == len(whole.asked) + 2  # the response that was being generated at each kill
    assert {name: (tmp_path / "out" / name).read_bytes() for name in RESULTS} == _bytes(tmp_path / "whole")


def test_a_torn_or_damaged_journal_costs_the_damaged_responses_only(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    answers = {f"response{i}": Response((i, 5), ("stop", "length")[i % 2]) for i in range(4)}
    with Journal(path) as journal:
        journal.append(list(answers.items())[:1])
        journal.append(list(answers.items())[1:])
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        lines = whole[:length].count(b"\n")
        with Journal(path) as journal:
            assert [journal.get(key) for key in answers] == [*list(answers.values())[:lines], *[None] * (4 - lines)]
            journal.append(list(answers.items())[lines:])
        assert path.read_bytes() == whole


def test_a_finished_folder_is_not_made_again(tmp_path: Path) -> None:
    source = _write(tmp_path / "p.jsonl", _many(3))
    counts = _build(tmp_path / "out", source, Echo(make_tokenizer(tiny.CHATML)))
    again = Echo(make_tokenizer(tiny.CHATML))
    assert _build(tmp_path / "out", source, again) == counts
    assert again.asked == []
    (tmp_path / "out" / "counts.json").write_text("{")
    assert _build(tmp_path / "out", source, again) == counts


def test_sampling_draws_from_a_seed_of_each_conversation_so_order_and_neighbours_do_not_matter(tmp_path: Path) -> None:
    seeds: dict[tuple[int, ...], int] = {}

    def generate(
        prompts: list[list[int]], generation: GenerationConfig, /, *, seeds_seen: dict[Any, int] = seeds, seeds: list[int]
    ) -> list[tuple[int, Response]]:
        for prompt, seed in zip(prompts, seeds, strict=True):
            assert seeds_seen.setdefault(tuple(prompt), seed) == seed
        return [(index, Response((1,), "stop")) for index in range(len(prompts))]

    rows = [{"prompt": f"prompt {i}", "id": i} for i in range(7)]
    sampling = {"generation": {"batch_size": 3, "temperature": 1.0}}
    _build(tmp_path / "a", _write(tmp_path / "a.jsonl", rows), generate, **sampling)
    _build(tmp_path / "b", _write(tmp_path / "b.jsonl", rows[::-2]), generate, **sampling)
    assert len(set(seeds.values())) == 7


def test_duplicates_are_dropped_and_counted_whatever_their_spacing_or_old_answers(tmp_path: Path) -> None:
    rows = [
        _chat("What is  this?"),
        _chat(" What is\nthis? "),
        _chat("What is this?", "an answer"),
        _chat("what is this?"),
        _chat("What is this?", "a", "And?"),
    ]
    counts = _build(tmp_path / "out", _write(tmp_path / "p.jsonl", rows), Echo(make_tokenizer(tiny.CHATML)))
    assert (counts["duplicates"], counts["conversations"]) == (2, 3)
    kept = _build(tmp_path / "kept", _write(tmp_path / "q.jsonl", [rows[2], rows[2], _chat("What is this?", "another")]), None, regenerate="never")
    assert (kept["duplicates"], kept["conversations"]) == (1, 2)


def test_kept_responses_need_no_target_and_a_missing_one_is_rejected_with_the_remedy(tmp_path: Path) -> None:
    source = _write(tmp_path / "p.jsonl", [_chat("Q", "A"), _chat("Q2"), _chat("Q3", " ")])
    _build(tmp_path / "out", source, None, regenerate="never", max_rejected_fraction=0.7)
    [answered] = read_responses(tmp_path / "out")
    assert answered.responses is None
    rejected = [json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()]
    assert [row["where"] for row in rejected] == ["p.jsonl:2", "p.jsonl:3"]
    assert "has no response, and data.regenerate is 'never'" in rejected[0]["reason"]
    assert "Set data.regenerate to 'auto'" in rejected[0]["remedy"]
    assert "empty response" in rejected[1]["reason"]
    with pytest.raises(DataError, match=r"max_rejected_fraction = 0.5: 2 of 3 rows"):
        _build(tmp_path / "strict", source, None, regenerate="never", max_rejected_fraction=0.5)
    none = _write(tmp_path / "none.jsonl", [_chat("Q2")])
    with pytest.raises(DataError, match=r"of 1 row none is left to work with(.|\n)*none\.jsonl:1.*Set data\.regenerate to 'auto'"):
        _build(tmp_path / "nothing", none, None, regenerate="never", max_rejected_fraction=1.0)


def test_what_cannot_be_generated_is_rejected_before_anything_is_generated(tmp_path: Path) -> None:
    rows = [
        {
            "messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}, {"role": "system", "content": "s"}],
            "id": "ends with system",
        },
        {"prompt": "long " * 100, "id": "too long"},
        {"prompt": "good", "id": "good"},
    ]
    echo = Echo(make_tokenizer(tiny.CHATML))
    source = _write(tmp_path / "p.jsonl", rows)
    with pytest.raises(DataError):
        _build(tmp_path / "strict", source, echo, max_length=64)
    assert echo.asked == []
    _build(tmp_path / "out", source, echo, max_length=64, max_rejected_fraction=0.9)
    rejected = {row["where"]: row["reason"] for row in map(json.loads, (tmp_path / "out" / "rejected.jsonl").read_text().splitlines())}
    assert rejected.keys() == {"ends with system", "too long"}
    assert "is not the user's" in rejected["ends with system"]
    assert "more than the 62 tokens that data.max_length = 64" in rejected["too long"]


def test_a_template_that_refuses_the_roles_rejects_the_conversation(tmp_path: Path) -> None:
    config = make_config(_write(tmp_path / "p.jsonl", [{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "Q"}]}]))
    with pytest.raises(DataError, match="System role not supported"):
        build_responses(config, make_tokenizer(tiny.LLAMA2), Echo(make_tokenizer(tiny.CHATML)), tmp_path / "out", target_digest="t")


def test_a_history_that_outgrows_max_length_ends_the_conversation_after_its_last_response(tmp_path: Path) -> None:
    source = _write(tmp_path / "p.jsonl", [_chat("Q1", "old", "long " * 50, "old")])
    _build(tmp_path / "out", source, Echo(make_tokenizer(tiny.CHATML)), max_length=64)
    [answered] = read_responses(tmp_path / "out")
    assert [message.role for message in answered.conversation.messages] == ["user", "assistant"]


def test_the_cache_answers_in_place_of_the_target_under_the_same_digest_and_settings_only(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tiny.CHATML)
    source = _write(tmp_path / "p.jsonl", _many(8))
    _build(tmp_path / "first", source, Echo(tokenizer))
    generation = {"batch_size": 2, "max_new_tokens": 8}
    cache = tmp_path / "cache.jsonl.gz"
    count = save_response_cache(make_config(source, generation=generation), tokenizer, tmp_path / "first", cache, target_digest="target")
    before = cache.read_bytes()
    save_response_cache(make_config(source, generation=generation), tokenizer, tmp_path / "first", cache, target_digest="target")
    assert cache.read_bytes() == before

    counts = _build(tmp_path / "cached", source, None, response_cache=str(cache))
    assert (counts["generated"], counts["from_cache"]) == (0, count)
    assert (tmp_path / "cached" / RESULTS[0]).read_bytes() == (tmp_path / "first" / RESULTS[0]).read_bytes()
    for change in ({"regenerate": "always"}, {"generation": {**generation, "max_new_tokens": 9}}, {"generation": {**generation, "temperature": 1.0}}):
        counts = _build(tmp_path / f"fresh {change}".replace("/", ""), source, Echo(tokenizer), **{"response_cache": str(cache), **change})
        assert counts["from_cache"] == 0
    assert read_response_cache(cache, "another target", GenerationConfig(max_new_tokens=8)) == {}
    same = GenerationConfig(max_new_tokens=8, batch_size=99, top_k=3)  # greedy: neither counts
    assert len(read_response_cache(cache, "target", same)) == count


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"target": "t"}', '{"target": "t", "generation": "G", "prompt": "p", "tokens": ["a"], "finish_reason": "stop"}']
)
def test_a_damaged_cache_is_an_error_with_file_and_line(tmp_path: Path, line: str) -> None:
    path, generation = tmp_path / "cache.jsonl", GenerationConfig()
    key = cache_key("t", generation, [1])
    write_response_cache(path, [(key, Response((1, 2), "stop"))])
    with path.open("a") as file:
        file.write(line.replace("G", key.generation) + "\n")
    with pytest.raises(DataError, match=r"cache.jsonl:2.*is not a cached response.*"):
        read_response_cache(path, "t", generation)


def test_progress_reaches_the_number_of_turns(tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    config = make_config(_write(tmp_path / "p.jsonl", _many(5)), generation={"batch_size": 2})
    tokenizer = make_tokenizer(tiny.CHATML)
    counts = build_responses(config, tokenizer, Echo(tokenizer), tmp_path / "out", target_digest="t", progress=lambda *step: seen.append(step))
    assert seen[-1] == (counts["turns"], counts["turns"], "responses")
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)


def test_prompts_are_written_mixed_and_read_back_as_the_same_conversations(tmp_path: Path) -> None:
    first, *others = _many(30)
    rows = [first, *others, {**first, "id": "again"}, _chat("a", "", "b")]
    config = make_config(_write(tmp_path / "rows.jsonl", rows), system_prompt="Be brief.")
    for name in ("a.jsonl.gz", "b.jsonl.gz", "c.jsonl"):
        counts = write_prompts(config, make_tokenizer(tiny.CHATML), tmp_path / name)
    assert counts == {"rows": 32, "rejected": 0, "filtered": 0, "duplicates": 1, "conversations": 31}
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()

    def conversations(source: Path) -> list[Any]:
        with RejectLog(tmp_path / "rejected.jsonl") as rejected:
            return list(read_prompts(make_config(str(source), system_prompt="Be brief.").data, rejected))

    written = conversations(tmp_path / "a.jsonl.gz")
    assert written == conversations(tmp_path / "c.jsonl")
    assert sorted(written, key=str) == sorted((item for item in conversations(tmp_path / "rows.jsonl") if item.id != "again"), key=str)
    assert [item.id for item in written] != sorted(item.id for item in written), "mixed, so that any limit takes a fair part"
    assert not list(tmp_path.glob("*.rejected.jsonl"))


def test_prompts_that_are_not_written_are_listed_beside(tmp_path: Path) -> None:
    config = make_config(_write(tmp_path / "rows.jsonl", [*_many(), {"prompt": 1}]))
    assert write_prompts(config, make_tokenizer(tiny.CHATML), tmp_path / "out.jsonl")["rejected"] == 1
    assert "must be text or a list of messages" in (tmp_path / "out.jsonl.rejected.jsonl").read_text()
    with pytest.raises(DataError, match=r"ends in .jsonl or .jsonl.gz"):
        write_prompts(config, make_tokenizer(tiny.CHATML), tmp_path / "out.csv")
