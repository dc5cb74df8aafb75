"""Endpoints answer in place of the target: what they are asked, what is taken of their answers, and that no key is told."""

from __future__ import annotations

import json
import logging
import socket
from pathlib import Path
from typing import Any

import pytest

from dflash_core.config import load_config, parse_config
from dflash_core.data import read_responses, render_prompt
from dflash_core.data.endpoint import EndpointClient
from dflash_core.errors import ConfigError, DataError, EndpointError
from tests.data.asking import TOKENIZER, build, echo, rows_of, said
from tests.data.stand_in import StandIn
from tests.data.tiny import make_config
from tests.waiting import eventually

END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")

pytestmark = pytest.mark.usefixtures("short_pauses")


def test_conversations_are_answered_turn_by_turn_and_come_out_in_order_with_tokens_of_their_text(tmp_path: Path, server: StandIn) -> None:
    counts = build(tmp_path / "out", rows_of(7), server)
    assert said(tmp_path / "out")[0] == ["Q0", "hello Q0", "And?", "hello Q0 / hello Q0 / And?"]
    assert [answered.conversation.id for answered in read_responses(tmp_path / "out")] == [f"c{i}" for i in range(7)]
    responses = [response for answered in read_responses(tmp_path / "out") for response in answered.responses or ()]
    assert responses[0].tokens == (*TOKENIZER("hello Q0")["input_ids"], END)
    cut = next(response for response in responses if response.finish_reason == "length")
    assert cut.tokens == tuple(TOKENIZER("hello Q5 long")["input_ids"])
    assert (counts["turns"], counts["generated"], counts["truncated"], counts["dropped"]) == (10, 10, 1, 0)
    assert all(body["model"] == "served" and body["max_tokens"] == 40 and body["temperature"] == 0.0 for body in server.asked)
    assert all(body.keys() == {"model", "messages", "max_tokens", "temperature"} for body in server.asked)


def test_sampling_and_template_arguments_are_passed_on(tmp_path: Path, server: StandIn) -> None:
    build(
        tmp_path / "out", rows_of(2), server,
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
        build(tmp_path / "out", [{"prompt": "Q"}], {"url": server.url, "return_token_ids": True})
    [answered] = read_responses(tmp_path / "out")
    assert answered.responses is not None
    assert answered.responses[0].tokens == (70, 71, END)
    assert server.asked[0]["return_token_ids"] is True


def test_a_token_that_the_targets_tokenizer_does_not_have_is_rejected_before_it_is_kept(tmp_path: Path) -> None:
    def answer(body: dict[str, Any]) -> dict[str, Any]:
        return {"content": "ab", "token_ids": [70, len(TOKENIZER) if body["messages"][0]["content"] == "Q1" else 71]}

    with StandIn(answer) as server:
        rows = [{"prompt": f"Q{i}"} for i in range(3)]
        counts = build(tmp_path / "out", rows, {"url": server.url, "return_token_ids": True}, max_rejected_fraction=0.5)
    assert (counts["conversations"], counts["rejected"]) == (2, 1)
    assert f"the token {len(TOKENIZER)}, and the target's tokenizer has {len(TOKENIZER)}" in (tmp_path / "out" / "rejected.jsonl").read_text()


def test_what_a_server_refuses_is_rejected_with_its_reason_and_too_much_of_it_ends_the_run_at_once(tmp_path: Path, server: StandIn) -> None:
    def answer(body: dict[str, Any]) -> dict[str, Any]:
        return {"content": "x", "finish_reason": "content_filter"} if body["messages"][0]["content"] == "Q1" else echo(body)

    server.answer, server.faults = answer, ["400"]
    counts = build(tmp_path / "out", [{"prompt": f"Q{i}"} for i in range(4)], {"url": server.url, "concurrency": 1}, max_rejected_fraction=0.5)
    rejected = [json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()]
    assert [row["value"] for row in rejected] == ["Q0", "Q1"]
    assert "refuses it with HTTP 400" in rejected[0]["reason"]
    assert "finish_reason 'content_filter'" in rejected[1]["reason"]
    assert (counts["rejected"], counts["conversations"]) == (2, 2)
    server.always = "422"
    before = len(server.asked)
    with pytest.raises(DataError, match=r"data\.max_rejected_fraction"):
        build(tmp_path / "none", [{"prompt": f"Q{i}"} for i in range(100)], {"url": server.url, "concurrency": 1})
    assert len(server.asked) - before < 50


def test_truncated_answers_end_the_conversation_before_them_where_the_settings_say_drop(tmp_path: Path, server: StandIn) -> None:
    rows = [rows_of(1)[0], {"prompt": "long"}]
    rows[0]["messages"][2]["content"] = "a long one"
    counts = build(tmp_path / "out", rows, server, generation={"truncated": "drop"})
    assert said(tmp_path / "out") == [["Q0", "hello Q0"]]
    assert (counts["conversations"], counts["generated"], counts["dropped"], counts["truncated"], counts["rejected"]) == (1, 3, 2, 0, 0)
    with pytest.raises(DataError, match="every response was dropped"):
        build(tmp_path / "none", rows[1:], server, generation={"truncated": "drop"})


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another template": ({"usage": {"prompt_tokens": 3}}, "counts 3 tokens in a prompt, where the target's own chat template gives"),
    "other tokens": ({"prompt_token_ids": [0, 2]}, "has other tokens in the prompt from place 0 on"),
    "a reasoning parser": ({"message": {"reasoning_content": "hm"}}, "takes the thinking out"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_server_of_something_else_than_the_target_ends_the_run_at_its_first_answer(tmp_path: Path, server: StandIn, name: str) -> None:
    extra, reason = WRONG[name]
    server.answer = lambda body: {**echo(body), **extra}
    with pytest.raises(EndpointError, match=reason):
        build(tmp_path / "out", rows_of(3), {"url": server.url, "concurrency": 1})


@pytest.mark.parametrize("status", ["401", "404", "301"])
def test_a_wrong_key_name_or_address_ends_the_run_without_another_try(tmp_path: Path, server: StandIn, status: str) -> None:
    server.always = status
    with pytest.raises(EndpointError, match=rf"answers HTTP {status}.*Check data.generation.endpoints"):
        build(tmp_path / "out", rows_of(1)[:1], {"url": server.url, "concurrency": 1})
    assert len(server.asked) == 1


def test_a_key_is_sent_and_told_nowhere(tmp_path: Path, server: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("SERVER_KEY", "sk-very-secret\n")
    caplog.set_level(logging.DEBUG)
    settings = {"url": server.url, "concurrency": 1, "api_key_env": "SERVER_KEY"}
    server.faults = ["500"]  # whose message repeats the key
    build(tmp_path / "out", rows_of(4), settings)
    assert set(server.keys) == {"Bearer sk-very-secret"}
    server.always = "401"
    with pytest.raises(EndpointError) as error:
        build(tmp_path / "refused", rows_of(4), settings)
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


def test_a_password_in_the_address_of_a_store_is_refused_and_not_repeated() -> None:
    tree = {"target": {"model": "t"}, "drafter": {"mask_token_id": 3}, "data": {"sources": [{"source": "x.jsonl"}]}}
    for store in ("ftp://me:very-secret@host/shards", "ftp://me:very-secret@host/shards/"):
        with pytest.raises(ConfigError, match=r"extraction\.store = .*not shown") as error:
            parse_config({**tree, "extraction": {"store": store}})
        assert "very-secret" not in str(error.value)
    assert parse_config({**tree, "extraction": {"store": "abfs://box@account.host:443/a:b@c"}}).extraction.store is not None


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
