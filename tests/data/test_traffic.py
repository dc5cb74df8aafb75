"""Logs of chat completions, as servers and gateways write them, become prompts or whole conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_core.config import DataConfig, parse_config
from dflash_core.data import Conversation, RejectLog, read_prompts
from dflash_core.data.responses import build_responses, read_responses
from dflash_core.data.traffic import rendered_messages
from dflash_core.errors import ConfigError
from dflash_core.retrain.watermark import read_arrived
from tests.data import tiny
from tests.data.tiny import Echo, make_config, make_tokenizer

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
ANSWER = {
    "id": "chatcmpl-7", "object": "chat.completion", "created": 1711652795, "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello.", "refusal": None}, "logprobs": None, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 22, "completion_tokens": 2, "total_tokens": 24},
}  # fmt: skip
BODY = {"model": "m", "messages": ASKED, "temperature": 0.2, "stream": True}

LOGGED: dict[str, tuple[dict[str, Any], str, bool]] = {  # the row, its id, whether it has an answer
    "vLLM's body of a request": ({**BODY, "request_id": "r1", "request_type": "ChatCompletionRequest"}, "r1", False),
    "OpenAI's batch input": ({"custom_id": "c1", "method": "POST", "url": "/v1/chat/completions", "body": BODY}, "c1", False),
    "request and response": ({"request": BODY, "response": ANSWER}, "chatcmpl-7", True),
    "bodies as text": ({"id": "g1", "request": json.dumps(BODY), "response": json.dumps(ANSWER)}, "g1", True),
    "a batch's output beside its request": (
        {"custom_id": "c2", "body": BODY, "response": {"status_code": 200, "request_id": "q", "body": ANSWER}, "error": None}, "c2", True,
    ),
    "messages beside the response as text": ({"id": "l2", "messages": ASKED, "response": json.dumps(ANSWER)}, "l2", True),
    "messages beside the response": ({"id": "l1", "call_type": "acompletion", "messages": ASKED, "response": ANSWER}, "l1", True),
}  # fmt: skip


def _read(tmp_path: Path, content: str, name: str = "log.jsonl", **settings: Any) -> tuple[list[Conversation], list[dict[str, str]], RejectLog]:
    (tmp_path / name).write_text(content, encoding="utf-8")
    data = DataConfig.model_validate({"sources": [{"source": str(tmp_path / name)}], **settings})
    with RejectLog(tmp_path / "rejected.jsonl") as rejected:
        conversations = list(read_prompts(data, rejected))
    return conversations, [json.loads(line) for line in (tmp_path / "rejected.jsonl").read_text().splitlines()], rejected


def _lines(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize("name", LOGGED)
def test_a_logged_request_becomes_a_conversation_with_its_id_and_its_answer_if_logged(tmp_path: Path, name: str) -> None:
    row, id, answered = LOGGED[name]
    [conversation], rejected, _ = _read(tmp_path, _lines(row))
    said = [(message.role, message.content) for message in conversation.messages]
    assert said == [("system", "Be brief."), ("user", "Hi"), *([("assistant", "Hello.")] if answered else [])]
    assert (conversation.id, rejected) == (id, [])


def _answer(**changes: Any) -> dict[str, Any]:
    choice = ANSWER["choices"][0]  # type: ignore[index]
    return {**ANSWER, "choices": [{**choice, **changes}]}


UNUSABLE_ANSWERS: dict[str, Any] = {
    "cut off": _answer(finish_reason="length"),
    "thinking taken out": _answer(message={"role": "assistant", "content": "Hello.", "reasoning_content": "hm"}),
    "a tool call": _answer(message={"role": "assistant", "content": None, "tool_calls": [{"id": "t"}]}, finish_reason="tool_calls"),
    "an error": {"error": {"message": "overloaded", "code": 503}},
    "words": "upstream timed out",
    "a stream": 'data: {"choices": []}\n\ndata: [DONE]',
    "no object": [],
}


@pytest.mark.parametrize("name", UNUSABLE_ANSWERS)
def test_an_answer_that_is_not_whole_is_left_out_and_its_prompt_stays(tmp_path: Path, name: str) -> None:
    [conversation], rejected, _ = _read(tmp_path, _lines({"request": BODY, "response": UNUSABLE_ANSWERS[name]}))
    assert [message.role for message in conversation.messages] == ["system", "user"]
    assert rejected == []


BAD = {
    "embeddings": ({"custom_id": "e", "url": "/v1/embeddings", "body": {"input": "x"}}, "is not the request of a chat completion"),
    "a plain completion": ({"request_type": "CompletionRequest", "prompt": "x", "model": "m"}, "is not the request of a chat completion"),
    "an answer alone": ({"id": "b", "custom_id": "c", "response": {"status_code": 200, "body": ANSWER}}, "is not the request of a chat completion"),
    "tools": ({"request": {**BODY, "tools": [{"type": "function"}]}}, "offers tools"),
    "broken text": ({"request": '{"messages": ['}, "is not JSON"),
    "a number": ({"request": 5}, "must be a JSON object"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_request_that_cannot_be_used_is_rejected_with_its_reason(tmp_path: Path, name: str) -> None:
    row, reason = BAD[name]
    conversations, [rejected], log = _read(tmp_path, _lines(row, LOGGED["request and response"][0]))
    assert len(conversations) == 1
    assert reason in rejected["reason"]
    assert (log.seen, log.count, log.filtered) == (2, 1, 0)


def test_columns_of_other_data_are_not_taken_for_logs(tmp_path: Path) -> None:
    conversations, rejected, _ = _read(tmp_path, _lines({"prompt": "x", "response": "y", "body": "an e-mail"}, {"messages": ASKED, "request": 5}))
    assert [len(conversation.messages) for conversation in conversations] == [2, 2]
    assert rejected == []


VLLM_LOG = r"""INFO:     Application startup complete.
INFO 04-10 18:13:14 [logger.py:39] Received request chatcmpl-a71f: prompt: '<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nWhat\'s "1+1"?\n<|im_end|>\n<|im_start|>assistant\n', params: SamplingParams(n=1, temperature=0.0), prompt_token_ids: None, lora_request: None, prompt_adapter_request: None.
(APIServer pid=9) DEBUG 12-03 09:00:01 [logger.py:45] Request chatcmpl-b2 details: prompt: "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nIt's late<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n", prompt_token_ids: [128000], prompt_embeds shape: None.
(APIServer pid=9) INFO 12-03 09:00:01 [logger.py:52] Received request chatcmpl-b2: params: SamplingParams(n=1), lora_request: None.
(APIServer pid=9) INFO 12-03 09:00:02 [logger.py:92] Generated response chatcmpl-b2 (streaming complete): output: 'Yes', output_token_ids: None, finish_reason: streaming_complete
(APIServer pid=9) DEBUG 12-03 09:00:03 [logger.py:45] Request chatcmpl-c3 details: prompt: '<bos><start_of_turn>user\nQ<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n<start_of_turn>user\nQ2<end_of_turn>\n<start_of_turn>model\n', prompt_token_ids: [2], prompt_embeds shape: None.
(APIServer pid=9) DEBUG 12-03 09:00:03 [logger.py:45] Request chatcmpl-d4 details: prompt: '<|im_start|>user\ncut o', prompt_token_ids: [2], prompt_embeds shape: None.
(APIServer pid=9) DEBUG 12-03 09:00:03 [logger.py:45] Request chatcmpl-e5 details: prompt: None, prompt_token_ids: [2], prompt_embeds shape: None.
INFO:     127.0.0.1:51408 - "POST /v1/chat/completions HTTP/1.1" 200 OK
"""  # noqa: E501


def test_prompts_in_the_log_of_vllm_are_taken_apart_into_messages(tmp_path: Path) -> None:
    conversations, [rejected], _ = _read(tmp_path, VLLM_LOG, "vllm.log")
    said = {item.id: [(message.role, message.content) for message in item.messages] for item in conversations}
    assert said == {
        "chatcmpl-a71f": [("system", "You help."), ("user", 'What\'s "1+1"?\n')],
        "chatcmpl-b2": [("user", "It's late")],
        "chatcmpl-c3": [("user", "Q"), ("assistant", "A"), ("user", "Q2")],
    }
    assert "vllm.log:7" in rejected["where"]
    assert "no family that is known" in rejected["reason"]


def test_a_prompt_taken_apart_is_rendered_to_the_same_again() -> None:
    tokenizer = make_tokenizer(tiny.CHATML)
    messages = [{"role": "user", "content": "a\n\nb "}, {"role": "assistant", "content": ""}, {"role": "user", "content": "c"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered_messages(prompt) == messages
    with pytest.raises(ValueError, match="--max-log-len"):
        rendered_messages(prompt[:-3])


def test_a_log_that_grows_gives_only_what_is_new_and_waits_for_a_line_that_is_being_written(tmp_path: Path) -> None:
    lines = VLLM_LOG.splitlines(keepends=True)
    path = tmp_path / "vllm.log"
    path.write_text("".join(lines[:2]) + lines[2][:200])
    rows, seen = read_arrived([str(tmp_path)], [])
    assert [row["id"] for _, row in rows] == ["chatcmpl-a71f"]  # type: ignore[index]
    path.write_text("".join(lines))
    rows, seen = read_arrived([str(tmp_path)], seen)
    assert [row["id"] for _, row in rows if isinstance(row, dict)] == ["chatcmpl-b2", "chatcmpl-c3"]
    assert read_arrived([str(tmp_path)], seen)[0] == []


FILTERED = {
    "min_characters": (4, "Hi!", "Hello there"),
    "max_characters": (100, "word " * 30, "Hello there"),
    "min_word_share": (0.6, "#### $$$$ %%%% a1", "Что это такое, 这是什么？ 123"),
    "min_compressed_share": (0.1, "buy now! " * 300, "Why is the sky blue, and what would it take for it to be green at noon?"),
}


@pytest.mark.parametrize("name", FILTERED)
def test_a_filter_leaves_out_what_it_says_in_any_language_and_that_does_not_count_as_wrong(tmp_path: Path, name: str) -> None:
    limit, bad, good = FILTERED[name]
    rows = _lines(*({"messages": [{"role": "system", "content": "x" * 500}, {"role": "user", "content": text}]} for text in (bad, good, bad, bad)))
    conversations, rejected, log = _read(tmp_path, rows, filters={name: limit})
    assert [conversation.messages[-1].content for conversation in conversations] == [good]
    assert all(f"data.filters.{name} = {limit}" in row["reason"] for row in rejected)
    assert (log.count, log.filtered, len(rejected)) == (0, 3, 3)


def test_what_is_redacted_is_written_nowhere_and_the_same_prompt_of_two_people_is_one(tmp_path: Path) -> None:
    redact = [{"pattern": r"[\w.]+@([\w.]+)", "replacement": r"someone@\1"}, {"pattern": r"\d{6,}"}]
    bad = {"role": "user", "content": "short jim@x.org"}
    rows = [
        {"prompt": "I am ann@x.org, card 1234567"},
        {"prompt": "I am bob@x.org, card 7654321"},
        {"messages": [bad, {"role": "bob@x.org", "content": "8888888"}]},
        {"messages": [bad]},
        {"request": "bob@x.org 9999999"},
    ]
    source = tmp_path / "traffic.jsonl"
    source.write_text(_lines(*rows))
    config = make_config(str(source), filters={"redact": redact, "min_characters": 25}, max_rejected_fraction=0.9)
    tokenizer = make_tokenizer(tiny.CHATML)
    counts = build_responses(config, tokenizer, Echo(tokenizer), tmp_path / "out", target_digest="t")
    assert (counts["conversations"], counts["duplicates"], counts["rejected"], counts["filtered"]) == (1, 1, 2, 1)
    [answered] = read_responses(tmp_path / "out")
    assert answered.conversation.messages[0].content == "I am someone@x.org, card ***"
    written = (tmp_path / "out" / "rejected.jsonl").read_text()
    assert "bob@" not in written
    assert "jim@" not in written
    assert "99999" not in written


def test_of_a_chat_that_was_logged_turn_by_turn_only_the_whole_is_taken_where_the_settings_say_so(tmp_path: Path) -> None:
    turns = [{"role": ("user", "assistant")[i % 2], "content": f"t{i}"} for i in range(5)]
    other = [turns[0], {"role": "assistant", "content": "?"}, {"role": "user", "content": "another way"}]
    rows = [{"request": {"messages": messages}} for messages in (turns[:1], turns[:3], turns, other)]
    (tmp_path / "log.jsonl").write_text(_lines(*rows))
    tokenizer = make_tokenizer(tiny.CHATML)
    for drop, expected in ((True, [5, 3]), (False, [1, 3, 5, 3])):
        config = make_config(str(tmp_path / "log.jsonl"), filters={"drop_continued": drop})
        build_responses(config, tokenizer, Echo(tokenizer), tmp_path / str(drop), target_digest="t")
        lengths = [len(answered.conversation.messages) for answered in read_responses(tmp_path / str(drop))]
        assert lengths == [length + 1 for length in expected]


def test_a_message_of_which_redaction_leaves_nothing_is_left_out(tmp_path: Path) -> None:
    rows = _lines({"prompt": " 1234567 "}, {"prompt": "good"})
    conversations, [left_out], log = _read(tmp_path, rows, filters={"redact": [{"pattern": r"\d+", "replacement": ""}]})
    assert [conversation.messages[0].content for conversation in conversations] == ["good"]
    assert "nothing is left" in left_out["reason"]
    assert (log.count, log.filtered) == (0, 1)


@pytest.mark.parametrize("replacement", [r"\2", r"\g<name>", r"\q", "\\"])
def test_a_replacement_that_does_not_fit_its_pattern_is_refused_with_the_reason(replacement: str) -> None:
    data = {"sources": [{"source": "x.jsonl"}], "filters": {"redact": [{"pattern": "(a)", "replacement": replacement}]}}
    with pytest.raises(ConfigError, match=r"data.filters.redact.0.replacement.*cannot be put in the place"):
        parse_config({"target": {"model": "t"}, "drafter": {"mask_token_id": 3}, "data": data})


def test_a_pattern_that_is_none_is_refused_with_the_reason() -> None:
    data = {"sources": [{"source": "x.jsonl"}], "filters": {"redact": [{"pattern": "(unclosed"}]}}
    with pytest.raises(ConfigError, match=r"data.filters.redact.0.pattern.*is not a regular expression.*unterminated"):
        parse_config({"target": {"model": "t"}, "drafter": {"mask_token_id": 3}, "data": data})
