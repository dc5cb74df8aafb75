"""Records survive a kill at any byte."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from dflash_core.decoding import Generation
from dflash_core.evaluation import Divergence, PromptRecord, read_records
from dflash_core.evaluation.records import append_record


def record(name: str, key: str = "k") -> PromptRecord:
    generation = Generation((5, 6), "length", (0,), (3,), 2, 1, 0.5, 0.1, 0.1, 0.2)
    return PromptRecord(
        key=key, set="heldout", id=name, conversation=name, prompt_tokens=3, baseline=generation, trained=generation, untrained=None,
        divergence=Divergence(1, 0.25, 0.5), lossless=True,
    )  # fmt: skip


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    for name in "ab":
        append_record(path, record(name))
    assert read_records(path, {"k"}) == [record("a"), record("b")]
    assert read_records(tmp_path / "none.jsonl", {"k"}) == []


def test_records_of_other_settings_are_passed_over_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    append_record(path, record("a", "other"))
    append_record(path, record("b"))
    assert [item.id for item in read_records(path, {"k"})] == ["b"]
    assert [item.id for item in read_records(path, {"other"})] == ["a"]


@given(cut=st.integers(0, 2000))
def test_a_file_torn_at_any_byte_loses_at_most_its_last_record_and_takes_new_ones(cut: int, tmp_path_factory: object) -> None:
    path = Path(tmp_path_factory.mktemp("torn")) / "prompts.jsonl"  # type: ignore[attr-defined]
    for name in "abc":
        append_record(path, record(name))
    content = path.read_bytes()
    cut = min(cut, len(content))
    path.write_bytes(content[:cut])
    whole = content[:cut].count(b"\n")
    assert [item.id for item in read_records(path, {"k"})] == list("abc"[:whole])
    append_record(path, record("z"))
    assert [item.id for item in read_records(path, {"k"})] == [*"abc"[:whole], "z"]
