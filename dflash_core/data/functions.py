"""``builtin:python-functions``: what documented functions of installed libraries do, as requests to write them.

The standard library, NumPy, NetworkX, SymPy and torch come with every installation of this project (PSF and BSD licences). Their source is
read as text, with ``ast``: nothing is imported or run. Half of the functions are asked for by a sentence, the others as a beginning to be
completed: their head and docstring, examples included. Which functions there are depends on the versions installed, see ``library_versions``;
``dflashctl prompts`` writes them down once for all.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import logging
import platform
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

LIBRARIES = ("numpy", "networkx", "sympy", "torch")

_LEFT_OUT = {  # folders: tests, programs, copies of other projects
    "test", "tests", "testing", "_testing", "benchmarks", "idlelib", "lib2to3", "site-packages", "turtledemo", "ensurepip", "_vendor", "__pycache__",
}  # fmt: skip
_SHORTEST, _LONGEST = 40, 600  # characters of what a function does
_LONGEST_DOCSTRING, _LONGEST_HEAD = 900, 160
_BY_SENTENCE = (
    "Write a Python function `{head}` that does the following: {does}",
    "Implement the Python function `{head}`.\n\n{does}",
    "{does}\n\nWrite this as a Python function `{head}`. Answer with the code only.",
    "How would you write `{head}` in Python? It should do this: {does}",
)
_BY_BEGINNING = (
    "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{code}\n```",
    "Complete the following Python function.\n\n```python\n{code}\n```",
    "Finish this function. Answer with the whole function.\n\n{code}",
    "{code}",
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Function:
    head: str  # name(parameters), or Class.name(parameters)
    code: str  # def line and docstring
    does: str  # first paragraph of the docstring


def python_functions() -> Iterator[Mapping[str, str]]:
    """Rows with ``id`` and ``prompt``, one for each thing that a function does, mixed so that any limit takes a fair part."""
    functions: dict[str, _Function] = {}
    for library, root in _roots().items():
        for path in sorted(root.rglob("*.py")):
            if _LEFT_OUT.isdisjoint(path.relative_to(root).parts):
                for function in _functions(path):
                    functions.setdefault(hashlib.sha256(function.does.lower().encode()).hexdigest(), function)
        logger.info("%d documented functions with those of %s", len(functions), library)
    for digest in sorted(functions):
        function, choice = functions[digest], int(digest, 16)
        sentences = _BY_SENTENCE if choice % 2 else _BY_BEGINNING
        prompt = sentences[choice // 2 % len(sentences)].format(head=function.head, does=function.does, code=function.code)
        yield {"id": f"python-functions-{digest[:12]}", "prompt": prompt}


def library_versions() -> dict[str, str]:
    """Versions of the libraries that ``python_functions`` reads."""
    return {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}}


def _roots() -> dict[str, Path]:
    roots = {"python": Path(sysconfig.get_paths()["stdlib"])}
    for name in LIBRARIES:
        found = importlib.util.find_spec(name)
        if found is not None and found.submodule_search_locations:
            roots[name] = Path(found.submodule_search_locations[0])
    return roots


def _functions(path: Path) -> Iterator[_Function]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # old spellings of escapes in other people's code
            module = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and (function := _function(node, None)):
            yield function
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and (function := _function(member, node.name)):
                    yield function


def _function(node: ast.FunctionDef, of_class: str | None) -> _Function | None:
    """What can be asked of a function, or None where that is too little, too much, or not for others to call."""
    docstring = ast.get_docstring(node)
    if node.name.startswith("_") or docstring is None or not docstring.isascii():
        return None
    paragraphs = docstring.split("\n\n")
    does = " ".join(paragraphs[0].split())
    if not _SHORTEST <= len(does) <= _LONGEST or does.startswith((".. ", "See ", "Deprecated", ">>>")) or "`" in node.name:
        return None
    parameters = ast.unparse(node.args)
    if of_class is not None:
        first, _, parameters = parameters.partition(", ")
        if first not in ("self", "cls"):
            return None
    head = f"{node.name}({parameters})"
    if len(head) > _LONGEST_HEAD:
        return None
    kept = paragraphs[0]
    for paragraph in paragraphs[1:]:
        if len(kept) + len(paragraph) > _LONGEST_DOCSTRING:
            break
        kept += "\n\n" + paragraph
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    code = f"def {head}{returns}:\n" + textwrap.indent(f'"""{kept}\n"""', "    ")
    return _Function(head if of_class is None else f"{of_class}.{head}", code, does)
