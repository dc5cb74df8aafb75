"""Prompts of evaluation sets are found among training conversations, however they are dressed, and nothing else is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_core.config import load_config
from dflash_core.data import Conversation, Message, SampleTable
from dflash_core.data.sets import KeptOut
from dflash_core.errors import DataError
from dflash_core.pipeline import run_stage
from dflash_core.plan import Plan
from tests.tiny_run import write_tiny_run

QUESTION = "Natalia sold clips to 48 of her friends in April, and then she sold half as many in May. How many in all?"
FOLLOW_UP = "Now do it again."


def said(*texts: str) -> Conversation:
    return Conversation("c", tuple(Message("user" if number % 2 == 0 else "assistant", text) for number, text in enumerate(texts)))


KEPT_OUT = KeptOut({"maths": [said(QUESTION)], "chat": [Conversation("chat-1", said("Write a blog post about Hawaii.", "", FOLLOW_UP).messages)]})


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        ([QUESTION], "maths: c"),
        ([QUESTION.upper().replace(" ", "\n ").replace(",", " ,")], "maths: c"),
        ([f"Solve this, step by step.\n\n{QUESTION} Put the answer into a box."], "maths: c"),
        (["Natalia sold clips to 48 of her friends in April, and then she sold half as many in May."], "maths: c"),
        (["Hello", "Hi", QUESTION], "maths: c"),
        (["Hello", QUESTION, "Thanks"], None),
        ([FOLLOW_UP], "chat: chat-1"),
        ([f"{FOLLOW_UP} And better."], None),
        ([QUESTION.replace("48", "72")], None),
        (["How many in all?"], None),
        (["write a blog post about  ＨＡＷＡＩＩ"], "chat: chat-1"),
        (["🙂"], None),
    ],
)
def test_what_a_user_says_is_found_by_its_words(texts: list[str], found: str | None) -> None:
    assert KEPT_OUT.found_in(said(*texts)) == found


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Plan]:
    """A run up to its responses, and a set that says some of its prompts."""
    folder = tmp_path_factory.mktemp("overlap")
    path, chats = write_tiny_run(folder), folder / "chats.jsonl"
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    chats.write_text("".join(json.dumps({"prompt": row["prompt"].upper()}) + "\n" for row in rows[:12]))

    def plan_of(*changes: str) -> Plan:
        return Plan(load_config(path, [f"evaluation.sets=[{{name: chats, source: {chats}, limit: 2}}]", *changes]))

    for name in ("target", "responses"):
        run_stage(plan_of(), name)
    return plan_of


def test_a_prompt_of_a_set_is_not_trained_on_beyond_the_sets_limit_too(answered: Callable[..., Plan]) -> None:
    with_set, without = answered(), answered("evaluation.sets=[]")
    counts = {plan: run_stage(plan, "samples").manifest.counts for plan in (with_set, without)}
    left_out = counts[with_set]["in_evaluation_sets"]
    assert 6 <= left_out <= 12, "those of the twelve that are not held out"
    assert counts[with_set]["train"] == counts[without]["train"] - left_out
    assert counts[with_set]["heldout"] == counts[without]["heldout"]
    ids = {
        plan: {table.id(index) for index in range(len(table))}
        for plan in counts
        if (table := SampleTable.open(plan.folder("samples") / "train.parquet"))
    }
    listed = [json.loads(line) for line in (with_set.folder("samples") / "rejected.jsonl").read_text().splitlines()]
    assert {row["where"] for row in listed} == ids[without] - ids[with_set]
    assert all(row["value"].startswith("chats: ") for row in listed)


def test_overlap_is_refused_where_the_settings_say_so_before_anything_is_generated(answered: Callable[..., Plan], tmp_path: Path) -> None:
    refusing = "data.evaluation_overlap=refuse"
    with pytest.raises(DataError, match=r"data.evaluation_overlap = 'refuse': \d+ conversations say a prompt of evaluation.sets"):
        run_stage(answered(refusing), "samples")
    fresh = answered(refusing, f"run.workspace={tmp_path}")
    run_stage(fresh, "target")
    with pytest.raises(DataError, match=r"12 conversations say a prompt"):
        run_stage(fresh, "responses")
    assert not list(tmp_path.rglob("journal.jsonl"))


def test_samples_depend_on_what_sets_hold_and_not_on_their_names_and_limits(answered: Callable[..., Plan]) -> None:
    named = answered().config.evaluation.sets[0].source
    other = answered(f"evaluation.sets=[{{name: talks, source: {named}}}]")
    assert other.key("samples") == answered().key("samples") != answered("evaluation.sets=[]").key("samples")
    assert other.key("responses") == answered("evaluation.sets=[]").key("responses")
