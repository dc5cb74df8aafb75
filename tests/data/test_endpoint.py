"""Endpoints answer in place of the target: each prompt once, whatever they do, with nothing lost or told to the log."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_core.config import load_config, parse_config
from dflash_core.data import attempts, build_responses, read_responses, render_prompt
from dflash_core.data.endpoint import EndpointClient
from dflash_core.errors import ConfigError, DataError, EndpointError
from tests.data import tiny
from tests.data.stand_in import StandIn
from tests.data.tiny import make_config, make_tokenizer
from tests.waiting import PATIENCE_S, eventually

TOKENIZER = make_tokenizer(tiny.CHATML)
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(attempts, "LONGEST_PAUSE_S", 0.02)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def _answer(body: dict[str, Any]) -> dict[str, Any]:
    """Depends on all that was said before."""
    said = " / ".join(message["content"] for message in body["messages"])
    return {"content": f"hello {said[-20:]}", "finish_reason": "length" if "long" in body["messages"][-1]["content"] else "stop"}


@pytest.fixture
def server() -> Iterator[StandIn]:
    with StandIn(_answer) as stand_in:
        yield stand_in


def _rows(count: int) -> list[dict[str, Any]]:
    return [
        {
            "id": f"c{i}",
            "messages": [{"role": "user", "content": f"Q{i}"}, {"role": "assistant", "content": "old"}, {"role": "user", "content": "And?"}],
        }
        if i % 3 == 0
        else {"id": f"c{i}", "prompt": f"Q{i}{' long' if i % 5 == 0 else ''}"}
        for i in range(count)
    ]


def _build(folder: Path, rows: list[dict[str, Any]], *servers: StandIn | dict[str, Any], **changes: Any) -> dict[str, int]:
    source = folder.with_suffix(".jsonl")
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    endpoints = [{"url": item.url, "concurrency": 4} if isinstance(item, StandIn) else item for item in servers]
    generation = {"max_new_tokens": 40, "retries": 4, "endpoints": endpoints, **changes.pop("generation", {})}
    config = make_config(str(source), generation=generation, **changes)
    with EndpointClient(config.data.generation, "served", config.data.template_arguments) as client:
        return build_responses(config, TOKENIZER, client, folder, target_digest="target")


def _said(folder: Path) -> list[list[str]]:
    return [[message.content for message in answered.conversation.messages] for answered in read_responses(folder)]


def test_conversations_are_answered_turn_by_turn_and_come_out_in_order_with_tokens_of_their_text(tmp_path: Path, server: StandIn) -> None:
    counts = _build(tmp_path / "out", _rows(7), server)
    assert _said(tmp_path / "out")[0] == ["Q0", "hello Q0", "And?", "hello Q0 / hello Q0 / And?"]
    assert [answered.conversation.id for answered in read_responses(tmp_path / "out")] == [f"c{i}" for i in range(7)]
    responses = [response for answered in read_responses(tmp_path / "out") for response in answered.responses or ()]
    assert responses[0].tokens == (*TOKENIZER("hello Q0")["input_ids"], END)
    cut = next(response for response in responses if response.finish_reason == "length")
    assert cut.tokens == tuple(TOKENIZER("hello Q5 long")["input_ids"])
    assert (counts["turns"], counts["generated"], counts["truncated"], counts["dropped"]) == (10, 10, 1, 0)
    assert all(body["model"] == "served" and body["max_tokens"] == 40 and body["temperature"] == 0.0 for body in server.asked)
    assert all(body.keys() == {"model", "messages", "max_tokens", "temperature"} for body in server.asked)


def test_sampling_and_template_arguments_are_passed_on(tmp_path: Path, server: StandIn) -> None:
    _build(
        tmp_path / "out", _rows(2), server,
        generation={"temperature": 0.7, "top_p": 0.9, "top_k": 20}, template_arguments={"enable_thinking": False},
    )  # fmt: skip
    assert {(body["temperature"], body["top_p"], body["top_k"]) for body in server.asked} == {(0.7, 0.9, 20)}
    assert [body["chat_template_kwargs"] for body in server.asked] == [{"enable_thinking": False}] * 3
    assert len({body["seed"] for body in server.asked}) == 3


def test_the_servers_own_tokens_are_taken_where_it_tells_them(tmp_path: Path) -> None:
    def answer(body: dict[str, Any]) -> dict[str, Any]:
        prompt = render_prompt(TOKENIZER, body["messages"])
        return {"content": "ab", "token_ids": [70, 71], "prompt_token_ids": prompt, "usage": {"prompt_tokens": len(prompt), "completion_tokens": 2}}

    with StandIn(answer) as server:
        _build(tmp_path / "out", [{"prompt": "Q"}], {"url": server.url, "return_token_ids": True})
    [answered] = read_responses(tmp_path / "out")
    assert answered.responses is not None
    assert answered.responses[0].tokens == (70, 71, END)
    assert server.asked[0]["return_token_ids"] is True


GARBAGE = ["<html>", '{"choices": []}', '{"choices": [{"message": {"content": 5}}]}']
FAULTS = ["500", "503 0", "429 0", "408", "hang", "close", *(f"garbage {text}" for text in GARBAGE)]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_fails_now_and_then_is_asked_again(tmp_path: Path, server: StandIn, fault: str) -> None:
    with StandIn(_answer) as sound:
        _build(tmp_path / "sound", _rows(6), sound)
    server.faults = [fault] * 2
    hangs = fault == "hang"  # on a slow machine other requests may then take too long as well
    _build(tmp_path / "out", _rows(6), server, generation={"request_timeout_s": 0.5, "retries": 100} if hangs else {})
    assert (tmp_path / "out" / "conversations.jsonl.gz").read_bytes() == (tmp_path / "sound" / "conversations.jsonl.gz").read_bytes()
    more = len(server.asked) - len(sound.asked)
    assert more >= 2 if hangs else more == 2


@pytest.mark.parametrize("after", ["1", "date"])
def test_retry_after_is_waited_for_by_all_requests_to_that_server(tmp_path: Path, server: StandIn, after: str) -> None:
    server.faults = [f"429 {after}"]
    _build(tmp_path / "out", _rows(3), {"url": server.url, "concurrency": 1})
    assert server.times[1] - server.times[0] > 0.9


def test_prompts_are_shared_by_servers_within_their_limits_and_a_dead_one_costs_nothing_but_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "LONGEST_PAUSE_S", 60.0)
    both_full = threading.Event()

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        if (one.busy, two.busy) == (2, 3):
            both_full.set()
        assert both_full.wait(PATIENCE_S)
        return _answer(body)

    with StandIn(answer) as one, StandIn(answer) as two, StandIn(_answer) as dead:
        dead.always = "500"
        limits = [{"url": one.url, "concurrency": 2}, {"url": two.url, "concurrency": 3}, {"url": dead.url, "concurrency": 8}]
        counts = _build(tmp_path / "out", _rows(40), *limits, generation={"retries": 50})
        assert (one.busy, two.busy) == (2, 3)
        assert len(one.asked) + len(two.asked) == counts["generated"]
        assert len(dead.asked) < 40  # its pauses double: 30 of them would be months


def test_when_no_server_answers_the_error_names_them_and_a_new_start_asks_only_for_what_is_missing(tmp_path: Path, server: StandIn) -> None:
    rows = _rows(9)
    with StandIn(_answer) as whole:
        _build(tmp_path / "whole", rows, whole)
    answered = 0

    def until_five(body: dict[str, Any]) -> dict[str, Any]:
        nonlocal answered
        answered += 1
        if answered >= 5:
            server.always = "503"
        return _answer(body)

    server.answer = until_five
    with pytest.raises(EndpointError, match=r"No endpoint answers .*5 failures in a row.*HTTP 503.*is kept: start again"):
        _build(tmp_path / "out", rows, {"url": server.url, "concurrency": 1})
    server.always, server.answer = None, _answer
    before = len(server.asked)
    _build(tmp_path / "out", rows, server)
    assert before > 5
    assert len(server.asked) - before == len(whole.asked) - answered
    for name in ("conversations.jsonl.gz", "rejected.jsonl"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_interrupted_and_started_again_no_request_is_lost_or_made_twice(tmp_path: Path, server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = 0
    from dflash_core.data.cache import Journal

    append = Journal.append

    def interrupted(journal: Journal, responses: Any) -> None:
        nonlocal kept
        append(journal, responses)
        kept += 1
        if kept == 4:
            raise KeyboardInterrupt

    rows = [{"prompt": f"Q{i}"} for i in range(10)]
    monkeypatch.setattr(Journal, "append", interrupted)
    server.most = 4
    with pytest.raises(KeyboardInterrupt):
        _build(tmp_path / "out", rows, {"url": server.url, "concurrency": 1})
    before = len(server.asked)
    with StandIn(_answer) as another:  # which server is asked does not matter
        _build(tmp_path / "out", rows, another)
    assert before <= 5  # one may have been under way
    asked = Counter(body["messages"][-1]["content"] for body in another.asked)
    assert (len(asked), max(asked.values())) == (6, 1)
    assert _said(tmp_path / "out") == [[f"Q{i}", f"hello Q{i}"] for i in range(10)]


def test_kill_9_at_any_moment_changes_no_result_and_repeats_only_what_was_not_on_disk_yet(tmp_path: Path) -> None:
    rows, choose, journal = _rows(60), random.Random(3), tmp_path / "out" / "journal.jsonl"
    with StandIn(_answer) as sound, StandIn(_answer) as server:
        _build(tmp_path / "sound", rows, sound)
        on_disk = 0
        for life in range(6):
            asked = len(server.asked)
            server.allow(asked + choose.randint(1, 14) if life < 5 else 10**9)
            child = os.fork()
            if child == 0:
                try:
                    _build(tmp_path / "out", rows, server)
                finally:
                    os._exit(0)
            if life < 5:
                assert eventually(lambda: len(server.asked) > server.most)  # the next one waits for its answer
                os.kill(child, signal.SIGKILL)
            assert os.WIFSIGNALED(os.waitpid(child, 0)[1]) == (life < 5)
            if life < 5:
                on_disk = journal.read_bytes().count(b"\n") if journal.exists() else 0
        assert on_disk > 0
        assert len(server.asked) - asked == len(sound.asked) - on_disk
    for name in ("conversations.jsonl.gz", "rejected.jsonl"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "sound" / name).read_bytes()


def test_what_a_server_refuses_is_rejected_with_its_reason_and_too_much_of_it_ends_the_run_at_once(tmp_path: Path, server: StandIn) -> None:
    def answer(body: dict[str, Any]) -> dict[str, Any]:
        return {"content": "x", "finish_reason": "content_filter"} if body["messages"][0]["content"] == "Q1" else _answer(body)

    server.answer, server.faults = answer, ["400"]
    counts = _build(tmp_path / "out", [{"prompt": f"Q{i}"} for i in range(4)], {"url": server.url, "concurrency": 1}, max_rejected_fraction=0.5)
    rejected = [json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()]
    assert [row["value"] for row in rejected] == ["Q0", "Q1"]
    assert "refuses it with HTTP 400" in rejected[0]["reason"]
    assert "finish_reason 'content_filter'" in rejected[1]["reason"]
    assert (counts["rejected"], counts["conversations"]) == (2, 2)
    server.always = "422"
    before = len(server.asked)
    with pytest.raises(DataError, match=r"data\.max_rejected_fraction"):
        _build(tmp_path / "none", [{"prompt": f"Q{i}"} for i in range(100)], {"url": server.url, "concurrency": 1})
    assert len(server.asked) - before < 50


def test_truncated_answers_end_the_conversation_before_them_where_the_settings_say_drop(tmp_path: Path, server: StandIn) -> None:
    rows = [_rows(1)[0], {"prompt": "long"}]
    rows[0]["messages"][2]["content"] = "a long one"
    counts = _build(tmp_path / "out", rows, server, generation={"truncated": "drop"})
    assert _said(tmp_path / "out") == [["Q0", "hello Q0"]]
    assert (counts["conversations"], counts["generated"], counts["dropped"], counts["truncated"], counts["rejected"]) == (1, 3, 2, 0, 0)
    with pytest.raises(DataError, match="every response was dropped"):
        _build(tmp_path / "none", rows[1:], server, generation={"truncated": "drop"})


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another template": ({"usage": {"prompt_tokens": 3}}, "counts 3 tokens in a prompt, where the target's own chat template gives"),
    "other tokens": ({"prompt_token_ids": [0, 2]}, "has other tokens in the prompt from place 0 on"),
    "a reasoning parser": ({"message": {"reasoning_content": "hm"}}, "takes the thinking out"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_server_of_something_else_than_the_target_ends_the_run_at_its_first_answer(tmp_path: Path, server: StandIn, name: str) -> None:
    extra, reason = WRONG[name]
    server.answer = lambda body: {**_answer(body), **extra}
    with pytest.raises(EndpointError, match=reason):
        _build(tmp_path / "out", _rows(3), {"url": server.url, "concurrency": 1})


@pytest.mark.parametrize("status", ["401", "404", "301"])
def test_a_wrong_key_name_or_address_ends_the_run_without_another_try(tmp_path: Path, server: StandIn, status: str) -> None:
    server.always = status
    with pytest.raises(EndpointError, match=rf"answers HTTP {status}.*Check data.generation.endpoints"):
        _build(tmp_path / "out", _rows(1)[:1], {"url": server.url, "concurrency": 1})
    assert len(server.asked) == 1


def test_a_key_is_sent_and_told_nowhere(tmp_path: Path, server: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("SERVER_KEY", "sk-very-secret\n")
    caplog.set_level(logging.DEBUG)
    settings = {"url": server.url, "concurrency": 1, "api_key_env": "SERVER_KEY"}
    server.faults = ["500"]  # whose message repeats the key
    _build(tmp_path / "out", _rows(4), settings)
    assert set(server.keys) == {"Bearer sk-very-secret"}
    server.always = "401"
    with pytest.raises(EndpointError) as error:
        _build(tmp_path / "refused", _rows(4), settings)
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()).decode("utf-8", "replace")
    config = make_config("x.jsonl", generation={"endpoints": [settings]})
    client = EndpointClient(config.data.generation, "m", {})
    for text in (caplog.text, str(error.value), written, repr(config), repr(client._endpoints)):
        assert "very-secret" not in text
    monkeypatch.delenv("SERVER_KEY")
    with pytest.raises(ConfigError, match=r"data.generation.endpoints.0.api_key_env = 'SERVER_KEY'.*not set"):
        EndpointClient(config.data.generation, "m", {})


@pytest.mark.parametrize("setting", [{"api_key_env": "sk-very-secret"}, {"url": "http://user:very-secret@host/v1"}])
def test_a_secret_in_the_settings_is_refused_and_not_repeated(setting: dict[str, str]) -> None:
    tree = {"target": {"model": "t"}, "drafter": {"mask_token_id": 3}, "data": {"sources": [{"source": "x.jsonl"}]}}
    tree["data"]["generation"] = {"endpoints": [{"url": "http://host/v1", **setting}]}  # type: ignore[dict-item]
    with pytest.raises(ConfigError) as error:
        parse_config(tree)
    assert "very-secret" not in str(error.value)
    assert f"data.generation.endpoints.0.{next(iter(setting))}" in str(error.value)


def _answers(url: str) -> bool:
    import httpx

    try:
        return bool(httpx.get(url, trust_env=False))
    except httpx.HTTPError:
        return False


@pytest.mark.slow
def test_transformers_serve_gives_the_very_tokens_that_the_target_gives_here(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file
    from transformers.cli.serve import Serve

    from dflash_core.pipeline import run_stage
    from dflash_core.plan import Plan
    from tests.tiny_run import CONFIG, save_tiny_target, write_prompts

    save_tiny_target("llama", tmp_path / "target", num_hidden_layers=6)
    write_prompts(tmp_path / "prompts.jsonl", 6)
    weights = load_file(tmp_path / "target" / "model.safetensors")
    head = weights["lm_head.weight"]
    head[94:258] = head[259:] = head[64:65]  # only plain ASCII can win, so that every answer is text
    head[258] = head[69] * 1.5  # and answers end now and then
    save_file(weights, tmp_path / "target" / "model.safetensors", {"format": "pt"})
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve = Serve(force_model=str(tmp_path / "target"), device="cpu", dtype="float32", host="127.0.0.1", port=port, non_blocking=True)
    try:
        assert eventually(lambda: _answers(f"http://127.0.0.1:{port}/health"), 0.05)
        tree = CONFIG.format(folder=tmp_path, steps=12)
        answered = []
        for endpoints in ("[]", f"[{{url: 'http://127.0.0.1:{port}/v1', concurrency: 2}}]"):
            (tmp_path / "tiny.yaml").write_text(tree.replace("batch_size: 8", f"batch_size: 8, endpoints: {endpoints}"))
            plan = Plan(load_config(tmp_path / "tiny.yaml"))
            run_stage(plan, "target")
            answered.append(list(read_responses(run_stage(plan, "responses").folder)))
    finally:
        serve.kill_server()
    here, there = answered
    assert here == there
    reasons = {response.finish_reason for item in there for response in item.responses or ()}
    assert reasons == {"stop", "length"}
