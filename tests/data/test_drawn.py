"""Requests that a target writes as its own user: where they begin and end, that they depend on seeds alone, and what is left out."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_core.config import GenerationConfig, PipelineConfig, TargetConfig, load_config
from dflash_core.data import Message, RejectLog, Response, build_responses, read_prompts, read_responses
from dflash_core.data.cache import Journal
from dflash_core.data.drawn import Drawn, draw_requests
from dflash_core.data.render import user_opening
from dflash_core.errors import ConfigError, DataError
from dflash_core.pipeline import run_stage
from dflash_core.plan import Plan
from dflash_core.retrain.config import load_retrain_config
from dflash_core.target import TargetModel, load_tokenizer, resolve_target
from dflash_core.target.requests import generation_by
from flows.write_prompts import write
from tests.data import tiny
from tests.data.tiny import make_config, make_tokenizer
from tests.tiny_run import write_tiny_run

SAID = (Message("user", "Hi"), Message("assistant", "Hello"))


class Target:
    """A stand-in that writes words, drawn from the seed when sampling, and ends as it is told; ``asked`` are the prompts, as text."""

    def __init__(self, tokenizer: Any, *, die_after: int | None = None, words: Sequence[str] = (), backwards: bool = False):
        self.tokenizer, self.die_after, self.words, self.backwards = tokenizer, die_after, words, backwards
        self.asked: list[str] = []
        self.stops: set[tuple[int, ...]] = set()

    def __call__(
        self, prompts: list[list[int]], generation: GenerationConfig, /, *, seeds: list[int], stop: Sequence[int] = ()
    ) -> Iterator[tuple[int, Response]]:
        self.stops.add(tuple(stop))
        for index in sorted(range(len(prompts)), reverse=self.backwards):
            if self.die_after is not None and len(self.asked) >= self.die_after:
                raise KeyboardInterrupt
            self.asked.append(self.tokenizer.decode(prompts[index]))
            draws = random.Random(seeds[index] if generation.temperature > 0 else str(prompts[index]))
            text = draws.choice(self.words) if self.words else " ".join(str(draws.randrange(10**6)) for _ in range(3))
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            end = stop[0] if stop else self.tokenizer.convert_tokens_to_ids("<|im_end|>")
            yield index, Response((*ids, end), "stop") if "ENDLESS" not in text else Response(tuple(ids), "length")


def config_of(limit: int = 12, batch_size: int = 4, answer_tokens: int = 32, **drawn: Any) -> PipelineConfig:
    generation = {"batch_size": batch_size, "max_new_tokens": answer_tokens}
    return make_config("target", drawn=drawn, generation=generation, sources=[{"source": "target", "limit": limit}])


def draw(folder: Path, config: PipelineConfig, target: Target) -> Drawn:
    return draw_requests(config, target.tokenizer, target, folder, target=["weights", "tokenizer", "template"])


def rows(drawn: Drawn) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(drawn.requests.read_bytes()).splitlines()]


def first_requests(drawn: Drawn) -> dict[str, str]:
    return {row["id"]: row["messages"][0]["content"] for row in rows(drawn)}


@pytest.mark.parametrize(
    ("template", "opening", "end"),
    [
        (tiny.CHATML, "<|im_start|>user\n", "<|im_end|>"),
        (tiny.DEFAULT_SYSTEM, "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\n", "<|im_end|>"),
        (tiny.TAGGED, "<|im_start|>user\n", "<|im_end|>"),
        (tiny.STRIPPING, "<|im_start|>user\n", "<|im_end|>"),
        (tiny.THINKING, "<|im_start|>user\n", "<|im_end|>"),
        (tiny.LLAMA2, "<s>[INST] ", "[/INST]"),
        (tiny.LLAMA3, "<s><|start|>user<|end_header|>\n\n", "<|eot|>"),
    ],
)
def test_a_user_s_turn_begins_and_ends_where_the_template_puts_its_words(template: str, opening: str, end: str) -> None:
    tokenizer = make_tokenizer(template)
    assert user_opening(tokenizer, []) == (opening, tokenizer.convert_tokens_to_ids(end))
    later, same_end = user_opening(tokenizer, SAID)
    said = [{"role": message.role, "content": message.content} for message in (*SAID, Message("user", "And then?"))]
    assert tokenizer.apply_chat_template(said, tokenize=False).startswith(f"{later}And then?")
    assert same_end == tokenizer.convert_tokens_to_ids(end)


def test_a_template_that_does_not_tell_where_users_end_is_refused_and_so_is_a_target_without_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"without a special token after them.*Give prompts of another source than 'target'"):
        draw(tmp_path, config_of(), Target(make_tokenizer(tiny.PLAIN)))
    with pytest.raises(DataError, match="has no chat template"):
        draw(tmp_path, config_of(), Target(make_tokenizer(None)))


def test_a_model_whose_requests_never_end_is_said_to_be_a_base_model(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"of 12 requests only 0 ended within data.drawn.max_new_tokens = 192\. A base model writes no requests"):
        draw(tmp_path, config_of(), Target(make_tokenizer(tiny.CHATML), words=["ENDLESS"]))


def test_a_request_depends_on_its_number_alone_not_on_company_order_batch_or_count(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tiny.CHATML)
    few = draw(tmp_path / "few", config_of(5, followed=0.5, openings=["", "hello"]), Target(tokenizer))
    many = draw(tmp_path / "many", config_of(12, batch_size=3, followed=0.5, openings=["", "hello"]), Target(tokenizer, backwards=True))
    assert rows(few) == rows(many)[:5]
    assert len(set(first_requests(many).values())) == 12
    assert {text.startswith("hello") for text in first_requests(many).values()} == {True, False}
    assert {len(row["messages"]) for row in rows(many)} == {1, 3}


def test_interrupted_at_any_draw_and_started_again_it_gives_the_same_bytes_and_repeats_none(tmp_path: Path) -> None:
    tokenizer, config = make_tokenizer(tiny.CHATML), config_of(6, followed=0.6)
    whole = Target(tokenizer)
    expected = draw(tmp_path / "whole", config, whole)
    assert expected.counts["drawn_followed"] > 0
    for draws in range(0, len(whole.asked), 2):
        begun = Target(tokenizer, die_after=draws)
        with pytest.raises(KeyboardInterrupt):
            draw(tmp_path / str(draws), config, begun)
        ended = Target(tokenizer)
        drawn = draw(tmp_path / str(draws), config, ended)
        assert sorted(begun.asked + ended.asked) == sorted(whole.asked)
        assert [path.read_bytes() for path in (drawn.requests, drawn.answers)] == [
            path.read_bytes() for path in (expected.requests, expected.answers)
        ]
    again = Target(tokenizer)
    assert draw(tmp_path / "whole", config, again) == expected
    assert again.asked == []


@pytest.mark.parametrize("damage", [None, b"", b"\x1f\x8b"])
@pytest.mark.parametrize("name", ["requests.jsonl.gz", "answers.jsonl.gz", "manifest.json"])
def test_drawn_files_that_were_damaged_since_are_drawn_again(name: str, damage: bytes | None, tmp_path: Path) -> None:
    tokenizer, config = make_tokenizer(tiny.CHATML), config_of(4, followed=0.6)
    first = Target(tokenizer)
    whole = draw(tmp_path, config, first)
    expected = [path.read_bytes() for path in (whole.requests, whole.answers)]
    damaged = whole.requests.with_name(name)
    if damage is None:
        damaged.unlink()
    else:
        damaged.write_bytes(damage)
    again = Target(tokenizer)
    drawn = draw(tmp_path, config, again)
    assert [path.read_bytes() for path in (drawn.requests, drawn.answers)] == expected
    assert again.asked == first.asked


@pytest.mark.parametrize("line", [b'{"key": []}', b'{"key": "a"}', b"null", b"\0" * 99, b"[" * 100_000], ids=range(5))
def test_a_line_of_the_journal_that_is_no_response_is_dropped_with_what_follows(line: bytes, tmp_path: Path) -> None:
    answer = Response((5, 6), "stop")
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.append([("one", answer)])
    with (tmp_path / "journal.jsonl").open("ab") as file:
        file.write(line + b"\n")
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.append([("two", answer)])
    with Journal(tmp_path / "journal.jsonl") as journal:
        assert [journal.get(key) for key in ("one", "a", "two")] == [answer, None, answer]


def test_openings_with_tokens_of_the_template_are_refused_before_anything_is_drawn(tmp_path: Path) -> None:
    target = Target(make_tokenizer(tiny.CHATML))
    config = config_of(openings=["Say", "<|im_end|>\n"], follow_ups=["<|im_start|>user"])
    with pytest.raises(DataError, match=r"data.drawn.openings.1 = '<\|im_end\|>\\n': holds <\|im_end\|>, which .* alone writes") as caught:
        draw(tmp_path, config, target)
    assert [problem.path for problem in caught.value.problems] == ["data.drawn.openings.1", "data.drawn.follow_ups.0"]
    assert target.asked == []


def test_what_does_not_end_is_empty_says_what_the_template_says_or_repeats_others_is_left_out_and_counted(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tiny.CHATML)
    words = ["What is the sum of 1 and 2 and 3?", "ENDLESS", " \n", "Hi<|im_start|>assistant", "Where do hello worlds come from?"]
    drawn = draw(tmp_path, config_of(40), Target(tokenizer, words=words))
    assert sorted(first_requests(drawn).values()) == sorted([words[0], words[4]])
    counts = drawn.counts
    assert counts["drawn"] == 40
    assert counts["drawn_unfinished"] > 0
    assert counts["drawn_unfinished"] + counts["drawn_repeated"] + 2 == 40
    alike = ["solve the numbers and return the sum of hello", "solve the numbers and return the sum of world"]
    assert len(rows(draw(tmp_path, config_of(39), Target(tokenizer, words=alike)))) == 1
    assert len(rows(draw(tmp_path, config_of(39, min_new_share=0.0), Target(tokenizer, words=alike)))) == 2


@pytest.mark.parametrize("regenerate", ["auto", "always"])
def test_the_answer_before_a_second_request_is_given_once_and_the_conversation_is_answered_as_any_other(regenerate: str, tmp_path: Path) -> None:
    tokenizer, config = make_tokenizer(tiny.CHATML), config_of(6, followed=1.0, follow_ups=["Now "])
    config = config.model_copy(update={"data": config.data.model_copy(update={"system_prompt": "Be kind", "regenerate": regenerate})})
    target = Target(tokenizer)
    drawn = draw(tmp_path / "drawn", config, target)
    assert all(asked.startswith("<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\n") for asked in target.asked)
    assert [[message["role"] for message in row["messages"]] for row in rows(drawn)] == [["system", "user", "assistant", "user"]] * 6
    later = Target(tokenizer)
    source = drawn.as_source_of(config)
    counts = build_responses(source, tokenizer, later, tmp_path / "out", target_digest="weights", answers=drawn.answers)
    assert (counts["conversations"], counts["turns"], counts["from_cache"], counts["generated"]) == (6, 12, 6, 6)
    assert not set(later.asked) & set(target.asked)
    for row, answered in zip(rows(drawn), read_responses(tmp_path / "out"), strict=True):
        assert [message.content for message in answered.conversation.messages[:4]] == [message["content"] for message in row["messages"]]
        assert answered.conversation.messages[3].content.startswith("Now ")


def test_drawn_requests_pass_the_filters_of_all_data(tmp_path: Path) -> None:
    words = ["What is the sum of 1 and 2 and 3?", "hello world", "a" * 90]
    config = config_of(20)
    filters = config.data.filters.model_copy(update={"min_characters": 15, "min_compressed_share": 0.3})
    config = config.model_copy(update={"data": config.data.model_copy(update={"filters": filters})})
    drawn = draw(tmp_path, config, Target(make_tokenizer(tiny.CHATML), words=words))
    with RejectLog(tmp_path / "rejected.jsonl") as rejected:
        assert [item.messages[0].content for item in read_prompts(drawn.as_source_of(config).data, rejected)] == words[:1]
        assert rejected.filtered == len(rows(drawn)) - 1 == 2


def test_a_run_draws_answers_and_learns_from_them_and_its_key_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_tiny_run(tmp_path)
    sources = f"data.sources=[{{source: target, limit: 24}}, {{source: {tmp_path}/prompts.jsonl}}]"
    overrides = [sources, "data.drawn={max_new_tokens: 40, temperature: 1.5}"]
    plan = Plan(load_config(config, overrides))
    run_stage(plan, "target")
    writer = Target(load_tokenizer(plan.info.path, False))  # the tiny target itself writes random bytes, which are no text
    monkeypatch.setattr(Plan, "target_model", lambda *_: SimpleNamespace(answers=writer))
    found = run_stage(plan, "responses").manifest.counts
    assert (found["drawn"], found["drawn_unfinished"], found["drawn_repeated"], found["rows"]) == (24, 0, 0, 24 + 32)
    assert all(set(plan.info.eos_token_ids) <= set(stop) for stop in writer.stops)
    assert run_stage(plan, "samples").manifest.counts["conversations"] == found["conversations"]
    for changed in ("data.drawn.temperature=1.0", "run.seed=2", "data.sources.0.limit=25"):
        assert Plan(load_config(config, [*overrides, changed])).key("responses") != plan.key("responses")
    without = Plan(load_config(config))
    assert Plan(load_config(config, ["data.drawn.temperature=1.0", "run.seed=2"])).key("responses") == without.key("responses")


@pytest.mark.slow
def test_the_real_target_writes_requests_and_goes_on_after_its_own_answers_whatever_the_batch_size(tmp_path: Path) -> None:
    info = resolve_target(TargetConfig(model="smollm2-135m-instruct"))
    target = TargetModel.from_pretrained(info, dtype=torch.float32)
    generate = generation_by(info, lambda: target)
    told = [info.digest, info.tokenizer_digest, info.template_digest]
    drawn: dict[str, Any] = {
        "temperature": 0.3,
        "max_new_tokens": 24,
        "openings": ["What is the capital"],
        "followed": 0.5,
        "follow_ups": ["What about"],
    }

    def drawn_by(limit: int, batch_size: int) -> list[dict[str, Any]]:
        config = config_of(limit, batch_size, answer_tokens=12, min_new_share=0.0, **drawn)
        return rows(draw_requests(config, target.tokenizer, generate, tmp_path / str(limit), target=told))

    together = drawn_by(3, 3)
    assert drawn_by(1, 1) == together[:1]
    for row in together:
        said = [message["content"] for message in row["messages"]]
        assert said[0].startswith("What is the capital of ")
        assert said[0].endswith("?")
        assert len(said) == 1 or (said[1] and said[2].startswith("What about"))
    assert 3 in {len(row["messages"]) for row in together}


def test_the_prompts_command_draws_too_and_writes_one_file_with_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_tiny_run(tmp_path)
    writer = Target(load_tokenizer(str(tmp_path / "target"), False))
    monkeypatch.setattr(TargetModel, "from_pretrained", lambda *_, **__: SimpleNamespace(answers=writer))
    overrides = [f"data.sources=[{{source: target, limit: 6}}, {{source: {tmp_path}/prompts.jsonl}}]"]
    write(config, overrides, tmp_path / "all.jsonl")
    written = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert len(written) == 6 + 32
    drawn = next((tmp_path / "workspace" / "drawn").glob("*/requests.jsonl.gz"))
    assert {json.loads(line)["id"] for line in gzip.decompress(drawn.read_bytes()).splitlines()} < {row["id"] for row in written}


def test_a_retraining_which_reads_prompts_before_there_is_a_target_refuses_the_source() -> None:
    overrides = ["data.sources=[{source: target, limit: 5}]"]
    with pytest.raises(ConfigError, match=r"data.sources.0.source = 'target'.*Draw them once with 'dflashctl prompts'"):
        load_retrain_config("configs/retrain-demo.yaml", overrides)
