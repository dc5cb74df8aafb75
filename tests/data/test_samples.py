"""The tokenised data set holds what was rendered, divided by a stable hash, and notices any change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_core.data import Conversation, Message, SampleTable, build_responses, read_responses, render_sample, write_samples
from dflash_core.data.render import splice_turns
from dflash_core.data.samples import is_heldout
from dflash_core.errors import DataError
from tests.data import tiny
from tests.data.tiny import Echo, make_config, make_tokenizer


def _make(folder: Path, rows: list[dict[str, Any]], template: str = tiny.CHATML, **data: Any) -> dict[str, int]:
    source = folder / "p.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = make_config(str(source), **{"heldout_fraction": 0.5, **data})
    tokenizer = make_tokenizer(template)
    build_responses(config, tokenizer, Echo(tokenizer), folder / "responses", target_digest="t")
    return write_samples(config, tokenizer, folder / "responses", folder / "samples", tokenizer_digest="td", template_digest="cd")


def _prompts(count: int = 20) -> list[dict[str, Any]]:
    return [{"prompt": f"Question {index}?", "response": f"Answer {index}."} for index in range(count)]


def _table(folder: Path, side: str) -> SampleTable:
    return SampleTable.open(folder / "samples" / f"{side}.parquet")


def test_tables_hold_the_spliced_tokens_of_every_conversation_once(tmp_path: Path) -> None:
    counts = _make(tmp_path, _prompts())
    tokenizer = make_tokenizer(tiny.CHATML)
    expected = {a.conversation.id: splice_turns(tokenizer, a.conversation, a.responses or ())[0] for a in read_responses(tmp_path / "responses")}
    found = {}
    for side in ("train", "heldout"):
        table = _table(tmp_path, side)
        assert (counts[side], counts[f"{side}_tokens"]) == (len(table), int(table.lengths.sum()))
        assert counts[f"{side}_supervised"] == sum(int(table.loss_mask(i).sum()) for i in range(len(table)))
        for i in range(len(table)):
            assert (table.tokens(i).dtype, table.loss_mask(i).dtype) == (np.int32, np.bool_)
            assert list(table.prompt_tokens(i)) == list(table.tokens(i))[: int(table.loss_mask(i).argmax())]
            found[table.id(i)] = (table.tokens(i).tolist(), table.loss_mask(i).tolist())
    assert found == {name: (list(sample.tokens), list(sample.loss_mask)) for name, sample in expected.items()}


def test_kept_responses_are_rendered_with_the_template(tmp_path: Path) -> None:
    _make(tmp_path, _prompts(), regenerate="never")
    table = _table(tmp_path, "train")
    index = int(table.id(0).split(":")[1]) - 1
    chat = [{"role": "user", "content": f"Question {index}?"}, {"role": "assistant", "content": f"Answer {index}."}]
    assert table.tokens(0).tolist() == list(render_sample(make_tokenizer(tiny.CHATML), chat).tokens)


def test_the_same_data_give_the_same_bytes_and_any_other_content_another_digest(tmp_path: Path) -> None:
    for name, settings in {"a": {}, "b": {}, "c": {"system_prompt": "Be brief."}}.items():
        _make(tmp_path / name, _prompts(), **settings)  # type: ignore[arg-type]
    files = [{path.name: path.read_bytes() for path in (tmp_path / name / "samples").iterdir()} for name in ("a", "b")]
    assert files[0] == files[1]
    assert files[0].keys() == {"train.parquet", "heldout.parquet", "card.json", "rejected.jsonl"}
    cards = [json.loads((tmp_path / name / "samples" / "card.json").read_text()) for name in ("a", "c")]
    assert cards[0]["digest"] != cards[1]["digest"]
    assert (cards[0]["tokenizer_digest"], cards[0]["template_digest"]) == ("td", "cd")
    assert cards[0]["train_digest"] == _table(tmp_path / "a", "train").digest


def test_a_table_whose_content_changed_is_refused(tmp_path: Path) -> None:
    _make(tmp_path, _prompts())
    path = tmp_path / "samples" / "train.parquet"
    table = pq.read_table(path)
    flipped = table["loss_mask"].to_pylist()
    flipped[0][-1] = not flipped[0][-1]
    index = table.schema.get_field_index("loss_mask")
    changed = table.set_column(index, table.schema.field(index), [flipped])
    pq.write_table(changed.replace_schema_metadata(pq.read_metadata(path).metadata), path)
    with pytest.raises(DataError, match=r"train.parquet.*has digest .* was written.*run the stage 'samples' again"):
        SampleTable.open(path)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(DataError, match="is not a readable table of samples"):
        SampleTable.open(path)
    path.unlink()
    with pytest.raises(DataError, match="is not a readable table of samples"):
        SampleTable.open(path)


def _conversation(first: str, group: str | None = None, *more: str) -> Conversation:
    return Conversation("x", tuple(Message(("user", "assistant")[i % 2], text) for i, text in enumerate((first, *more))), group)  # type: ignore[arg-type]


@given(st.text(min_size=1), st.text(), st.floats(0.01, 0.99))
def test_conversations_that_begin_alike_or_share_a_group_are_on_one_side(first: str, more: str, fraction: float) -> None:
    side = is_heldout(_conversation(first), fraction)
    assert side == is_heldout(_conversation(f"  {first}\n", None, "answer", more), fraction)
    grouped = is_heldout(_conversation(first, "g"), fraction)
    assert grouped == is_heldout(_conversation(more or "y", "g"), fraction)


def test_the_held_out_share_is_near_the_fraction_and_grows_with_it_without_moving_anyone_back() -> None:
    chats = [_conversation(f"question {index}") for index in range(4000)]
    small, large = ([is_heldout(chat, fraction) for chat in chats] for fraction in (0.05, 0.2))
    assert 0.035 < np.mean(small) < 0.065
    assert 0.17 < np.mean(large) < 0.23
    assert all(b for a, b in zip(small, large, strict=True) if a)


def test_the_side_of_a_conversation_is_written_in_stone() -> None:
    held = [index for index in range(40) if is_heldout(_conversation(f"question {index}"), 0.1)]
    assert held == [8, 16, 35, 36]  # a change here moves held-out prompts of every user into training


def test_adding_data_moves_no_conversation_to_the_other_side(tmp_path: Path) -> None:
    _make(tmp_path / "few", _prompts(10), regenerate="never")
    _make(tmp_path / "many", _prompts(30)[::-1], regenerate="never")

    def held(name: str) -> set[str]:
        table = _table(tmp_path / name, "heldout")
        return {make_tokenizer(tiny.CHATML).decode(table.prompt_tokens(i)) for i in range(len(table))}

    assert held("few") == {prompt for prompt in held("many") if any(f"Question {i}?" in prompt for i in range(10))}


def test_samples_with_too_few_supervised_tokens_are_rejected_and_above_the_limit_the_stage_fails(tmp_path: Path) -> None:
    rows = [*_prompts(), {"prompt": "Short?", "response": "y", "id": "short"}]
    counts = _make(tmp_path / "a", rows, regenerate="never", min_response_tokens=3)
    assert counts["rejected"] == 1
    [rejected] = map(json.loads, (tmp_path / "a" / "samples" / "rejected.jsonl").read_text().splitlines())
    assert (rejected["where"], rejected["reason"]) == ("short", "has 2 supervised tokens, fewer than data.min_response_tokens = 3")
    with pytest.raises(DataError, match=r"max_rejected_fraction = 0.01: 1 of 21 rows \(4.8%\)"):
        _make(tmp_path / "b", rows, regenerate="never", min_response_tokens=3, max_rejected_fraction=0.01)
    assert not (tmp_path / "b" / "samples" / "train.parquet").exists()


def test_an_empty_side_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"heldout_fraction = 0.000001|1e-06.*of 5 conversations none is in the held-out part.*Give more prompts"):
        _make(tmp_path, _prompts(5), heldout_fraction=1e-6)


def test_a_sample_longer_than_max_length_is_cut_and_counted(tmp_path: Path) -> None:
    rows = [*_prompts(), {"prompt": "Long?", "response": "word " * 200}]
    counts = _make(tmp_path, rows, regenerate="never", max_length=100)
    assert counts["reach_max_length"] == 1
    assert max(_table(tmp_path, side).lengths.max() for side in ("train", "heldout")) == 100
