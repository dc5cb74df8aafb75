"""Every usual shape of prompt data is read; what cannot be used is rejected with its place, or is an error that names the file."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash_core.config import DataConfig, PromptSource
from dflash_core.data import Conversation, Message, RejectLog, prompts, read_prompts
from dflash_core.errors import DataError

ROWS = [
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], "id": "first", "group": 4},
    {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}, {"from": "human", "value": "Q2"}]},
    {"conversations": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]},
    {"prompt": "Just a prompt"},
    {"prompt": "With an answer", "response": "Answer"},
    {"prompt": [{"role": "user", "content": [{"type": "text", "text": "in "}, {"type": "text", "text": "parts"}]}], "response": "Answer"},
]
READ = [
    [("system", "Be brief."), ("user", "Hi")],
    [("user", "Q"), ("assistant", "A"), ("user", "Q2")],
    [("user", "Q"), ("assistant", "A")],
    [("user", "Just a prompt")],
    [("user", "With an answer"), ("assistant", "Answer")],
    [("user", "in parts"), ("assistant", "Answer")],
]


def _read(tmp_path: Path, *sources: str, **settings: object) -> tuple[list[Conversation], list[dict[str, str]]]:
    data = DataConfig(sources=tuple(PromptSource(source=source) for source in sources), **settings)  # type: ignore[arg-type]
    with RejectLog(tmp_path / "rejected.jsonl") as rejected:
        conversations = list(read_prompts(data, rejected))
    return conversations, [json.loads(line) for line in (tmp_path / "rejected.jsonl").read_text().splitlines()]


def _shape(conversations: list[Conversation]) -> list[list[tuple[str, str]]]:
    return [[(message.role, message.content) for message in conversation.messages] for conversation in conversations]


def _jsonl(path: Path) -> None:
    path.write_text("\ufeff" + "\n\n".join(json.dumps(row) for row in ROWS), encoding="utf-8")


def _jsonl_gz(path: Path) -> None:
    path.write_bytes(gzip.compress("\r\n".join(json.dumps(row) for row in ROWS).encode()))


@pytest.mark.parametrize(("name", "write"), [("rows.jsonl", _jsonl), ("rows.jsonl.gz", _jsonl_gz)])
def test_json_lines_of_every_shape_are_read(tmp_path: Path, name: str, write: Callable[[Path], None]) -> None:
    write(tmp_path / name)
    conversations, rejected = _read(tmp_path, str(tmp_path / name))
    assert (_shape(conversations), rejected) == (READ, [])
    assert [conversation.group for conversation in conversations] == ["4", None, None, None, None, None]
    assert conversations[0].id == "first"
    assert conversations[3].id.startswith(name + ":")


def test_parquet_and_a_hugging_face_dataset_give_the_same_conversations(tmp_path: Path) -> None:
    folder = tmp_path / "dataset"
    folder.mkdir()
    rows = [{"messages": [{"role": "user", "content": f"Hi {i}"}, {"role": "assistant", "content": "Ho"}], "unused": i} for i in range(5)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    expected = [[("user", f"Hi {i}"), ("assistant", "Ho")] for i in range(5)]
    for source in (str(folder / "train.parquet"), f"hf://{folder}"):
        assert _shape(_read(tmp_path, source)[0]) == expected


def test_a_limit_takes_rows_from_the_start_and_sources_keep_their_order(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": f"{name}{i}", "id": i}) + "\n" for i in range(3)))
    data = DataConfig(sources=(PromptSource(source=str(tmp_path / "b.jsonl"), limit=2), PromptSource(source=str(tmp_path / "a.jsonl"))))
    with RejectLog(tmp_path / "rejected.jsonl") as rejected:
        conversations = list(read_prompts(data, rejected))
    assert [conversation.messages[0].content for conversation in conversations] == ["b0", "b1", "a0", "a1", "a2"]
    assert [conversation.id for conversation in conversations] == ["0", "1", "0~2", "1~2", "2"]
    assert rejected.seen == 5


def test_the_system_prompt_is_added_where_there_is_none(tmp_path: Path) -> None:
    _jsonl(tmp_path / "rows.jsonl")
    conversations, _ = _read(tmp_path, str(tmp_path / "rows.jsonl"), system_prompt="Default.")
    assert conversations[0].messages[0] == Message("system", "Be brief.")
    assert {conversation.messages[0] for conversation in conversations[1:]} == {Message("system", "Default.")}


BAD_LINES = {
    "malformed": (b'{"prompt": "x"', "is not JSON"),
    "not utf-8": (b'{"prompt": "caf\xe9"}', "is not UTF-8: invalid continuation byte at byte 15"),
    "half a surrogate pair": (b'{"prompt": "\\ud83d"}', "surrogate"),
    "an array": (b'["x"]', "must be a JSON object"),
    "too deep": (b"[" * 200_000, "cannot be read as JSON"),
    "no known column": (b'{"text": "x"}', "has none of the columns messages, conversations, prompt"),
    "prompt is a number": (b'{"prompt": 5}', "must be text or a list of messages, found int"),
    "prompt is blank": (b'{"prompt": "  "}', "is empty"),
    "response is a number": (b'{"prompt": "x", "response": 1}', "must be text, found int"),
    "messages is text": (b'{"messages": "x"}', "must be a list of messages, found str"),
    "messages is empty": (b'{"messages": []}', "is an empty list"),
    "a message is text": (b'{"messages": ["x"]}', "a message must be an object"),
    "unknown role": (b'{"messages": [{"role": "wizard", "content": "x"}]}', "is not a known role"),
    "no role": (b'{"messages": [{"content": "x"}]}', "is not a known role"),
    "content is null": (b'{"messages": [{"role": "user", "content": null}]}', "must be text, found NoneType"),
    "an image": (b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}', "parts that are not text"),
    "tool calls": (b'{"messages": [{"role": "assistant", "content": "", "tool_calls": [1]}]}', "tool calls are not supported"),
    "assistant first": (b'{"messages": [{"role": "assistant", "content": "x"}, {"role": "user", "content": "x"}]}', "begins with the assistant"),
    "no user": (b'{"messages": [{"role": "system", "content": "x"}]}', "has no user message"),
    "two answers": (
        b'{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]}',
        "messages 1 and 2 are both the assistant's",
    ),
    "id is a list": (b'{"prompt": "x", "id": [1]}', "must be text or a whole number, found list"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_row_is_rejected_with_file_line_and_reason(tmp_path: Path, name: str) -> None:
    line, reason = BAD_LINES[name]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "good"}\n' + line + b'\n{"prompt": "good too"}\n')
    conversations, [rejected] = _read(tmp_path, str(path))
    assert _shape(conversations) == [[("user", "good")], [("user", "good too")]]
    assert rejected["where"].startswith(f"{path}:2")
    assert reason in rejected["reason"]
    assert rejected["remedy"]


def test_a_huge_line_is_rejected_without_reading_it_whole_and_the_next_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MAX_LINE_BYTES", 1000)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "x" * 5000}) + "\n" + json.dumps({"prompt": "good"}) + "\n")
    conversations, [rejected] = _read(tmp_path, str(tmp_path / "rows.jsonl"))
    assert _shape(conversations) == [[("user", "good")]]
    assert "longer than 1000 bytes" in rejected["reason"]


def test_above_the_limit_the_error_names_limit_share_and_first_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": 1}\n{"prompt": "x"}\n{"prompt": "y"}\n{"prompt": "z"}\n')
    with RejectLog(tmp_path / "rejected.jsonl") as rejected:
        list(read_prompts(DataConfig(sources=(PromptSource(source=str(path)),)), rejected))
        rejected.check(0.25)
        with pytest.raises(DataError) as error:
            rejected.check(0.2)
    text = str(error.value)
    assert "data.max_rejected_fraction = 0.2: 1 of 4 rows (25.0%) were rejected" in text
    assert f"{path}:1: prompt = 1" in text
    assert "rejected.jsonl" in text


def _bad_files(folder: Path) -> dict[str, tuple[str, str]]:
    (folder / "empty.jsonl").touch()
    (folder / "blank.jsonl").write_text("\n \n")
    (folder / "false.jsonl.gz").write_text('{"prompt": "x"}\n')
    (folder / "torn.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "x"}\n' * 1000)[:-20])
    (folder / "false.parquet").write_text("PAR")
    pq.write_table(pa.table({"text": ["x"]}), folder / "columns.parquet")
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), folder / "empty.parquet")
    (folder / "prompts.csv").write_text("prompt\nx\n")
    (folder / "folder.jsonl").mkdir()
    os.mkfifo(folder / "pipe.jsonl")
    (folder / "failing.jsonl").symlink_to("/proc/self/mem")  # a file whose first byte cannot be read
    return {
        "missing.jsonl": ("there is no such file", "Correct the path"),
        "pipe.jsonl": ("is not a plain file", "Correct the path"),
        "failing.jsonl": ("cannot be read" if Path("/proc/self/mem").exists() else "there is no such file", ""),
        "folder.jsonl": ("is a folder", "Correct the path"),
        "empty.jsonl": ("holds no rows", "at least one row"),
        "blank.jsonl": ("holds no rows", "at least one row"),
        "empty.parquet": ("holds no rows", "at least one row"),
        "false.jsonl.gz": ("is not a whole gzip file", "Write the file again"),
        "torn.jsonl.gz": ("is not a whole gzip file", "Write the file again"),
        "false.parquet": ("is not a readable Parquet file", "Write the file again"),
        "columns.parquet": ("'text'", "Rename the column"),
        "prompts.csv": ("is not a kind of source that is known", ".jsonl, .jsonl.gz, .parquet, .log, hf://owner/dataset or builtin:python-tasks"),
    }


def test_a_bad_file_is_an_error_that_names_it_and_the_remedy(tmp_path: Path) -> None:
    for name, (reason, remedy) in _bad_files(tmp_path).items():
        with pytest.raises(DataError) as error:
            _read(tmp_path, str(tmp_path / name))
        text = str(error.value)
        assert name in text
        assert "data.sources = " in text
        assert reason in text, text
        assert remedy in text, text


@pytest.mark.parametrize(("source", "reason"), [("builtin:poems", "is not a built-in source"), ("hf:///nowhere/at-all", "cannot be read")])
def test_an_unknown_source_is_an_error_that_names_it(tmp_path: Path, source: str, reason: str) -> None:
    with pytest.raises(DataError, match=reason) as error:
        _read(tmp_path, source)
    assert source in str(error.value)
