"""What has arrived is read once, whatever becomes of the files."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_core.errors import DataError, Problem
from dflash_core.retrain.watermark import SeenFile, read_arrived


class Reader:
    """Reads what has arrived in a folder, again and again."""

    def __init__(self, folder: Path, *patterns: str):
        self.folder = folder
        self.patterns = patterns or (str(folder / "*.jsonl"),)
        self.files: tuple[SeenFile, ...] = ()

    def __call__(self) -> list[Any]:
        rows, self.files = read_arrived(self.patterns, self.files)
        return [row.message if isinstance(row, Problem) else row["prompt"] for _, row in rows]  # type: ignore[index]


def lines(*prompts: str) -> str:
    return "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)


@pytest.fixture
def new(tmp_path: Path) -> Reader:
    return Reader(tmp_path)


def test_only_what_was_appended_is_new(new: Reader) -> None:
    path = new.folder / "a.jsonl"
    assert new() == []
    path.write_text(lines("one", "two"))
    assert new() == ["one", "two"]
    assert new() == []
    with path.open("a") as file:
        file.write(lines("three"))
    assert new() == ["three"]
    assert [item.bytes for item in new.files] == [path.stat().st_size], "a file that grew is known once"


def test_a_line_that_is_still_being_written_waits_and_one_that_only_lacks_its_end_does_not(new: Reader) -> None:
    path = new.folder / "a.jsonl"
    path.write_text(lines("one") + '{"prompt": "tw')
    assert new() == ["one"]
    path.write_text(lines("one") + '{"prompt": "two"}')
    assert new() == ["two"]
    path.write_text(lines("one", "two", "three"))
    assert new() == ["three"]


def test_a_file_that_was_renamed_or_copied_is_known_and_its_rest_is_read(new: Reader) -> None:
    path = new.folder / "a.jsonl"
    path.write_text(lines("one", "two"))
    assert new() == ["one", "two"]
    with path.open("a") as file:
        file.write(lines("just before rotation"))
    path.rename(new.folder / "a-1.jsonl")
    path.write_text(lines("just after"))
    assert new() == ["just before rotation", "just after"]
    (new.folder / "copy.jsonl").write_bytes((new.folder / "a-1.jsonl").read_bytes())
    assert new() == []


def test_a_file_that_was_truncated_or_written_anew_is_read_from_its_start(new: Reader) -> None:
    path = new.folder / "a.jsonl"
    path.write_text(lines("one", "two", "three"))
    assert new() == ["one", "two", "three"]
    path.write_text("")
    assert new() == []
    path.write_text(lines("four"))
    assert new() == ["four"]
    path.write_text(lines("FOUR", "five", "six", "seven"))
    assert new() == ["FOUR", "five", "six", "seven"]


def test_places_are_lines_of_the_whole_file_and_a_bad_line_is_told(new: Reader) -> None:
    path = new.folder / "a.jsonl"
    path.write_text(lines("one", "two"))
    new()
    with path.open("a") as file:
        file.write("not json\n" + lines("four"))
    rows, _ = read_arrived(new.patterns, new.files)
    assert [place for place, _ in rows] == [f"{path}:3", f"{path}:4"]
    assert isinstance(rows[0][1], Problem)


def test_files_that_cannot_grow_are_read_whole_and_once(tmp_path: Path) -> None:
    new = Reader(tmp_path, str(tmp_path))
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(lines("zipped"))
    pq.write_table(pa.table({"prompt": ["a table"]}), tmp_path / "b.parquet")
    (tmp_path / ".c.jsonl.tmp").write_text("being written aside")
    (tmp_path / "notes.txt").write_text("not data")
    assert new() == ["zipped", "a table"]
    os.rename(tmp_path / "b.parquet", tmp_path / "renamed.parquet")
    assert new() == []


def test_a_file_that_is_named_and_missing_is_an_error_and_an_empty_pattern_is_not(tmp_path: Path) -> None:
    assert Reader(tmp_path, str(tmp_path / "none-*.jsonl"))() == []
    for name in ("missing.jsonl", "notes.txt"):
        (tmp_path / "notes.txt").write_text("x")
        with pytest.raises(DataError, match=r"retrain\.prompts = .*" + name):
            Reader(tmp_path, str(tmp_path / name))()


def test_a_file_with_brackets_in_its_name_is_no_pattern(tmp_path: Path) -> None:
    (tmp_path / "log[1].jsonl").write_text(lines("one"))
    assert Reader(tmp_path, str(tmp_path / "log[1].jsonl"))() == ["one"]


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "parquet"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"a.{suffix}").symlink_to("/proc/self/mem")  # is there, and reading it is an error for anybody
    with pytest.raises(DataError, match=rf"retrain\.prompts = .*a\.{suffix}.*: cannot be read: .*Input/output error"):
        Reader(tmp_path, str(tmp_path / f"*.{suffix}"))()


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(0, 40), st.booleans()), max_size=12))
def test_appending_in_any_portions_and_rotating_loses_nothing_and_doubles_nothing(
    tmp_path_factory: pytest.TempPathFactory, portions: list[tuple[str, int, bool]]
) -> None:
    new = Reader(tmp_path_factory.mktemp("arrived"))
    written: list[str] = []
    pending = dict.fromkeys("abc", "")
    seen: list[str] = []
    for number, (name, cut, rotate) in enumerate(portions):
        written.append(f"prompt {number}")
        text = pending[name] + lines(f"prompt {number}")
        cut = min(cut, len(text))
        path = new.folder / f"{name}.jsonl"
        with path.open("a") as file:
            file.write(text[: len(text) - cut])
        pending[name] = text[len(text) - cut :]
        if rotate and not pending[name]:
            path.rename(new.folder / f"{name}-{number}.jsonl")
        seen += new()
    for name, rest in pending.items():
        with (new.folder / f"{name}.jsonl").open("a") as file:
            file.write(rest)
    seen += new()
    assert sorted(seen) == sorted(written)
