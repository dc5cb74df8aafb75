"""Prompt sources that anyone can have without a model hub: they travel in packages of the Python index, or are made here. Fetched, never committed.

``builtin:python-tasks``       short descriptions of programming tasks of reasoning-gym 0.1.25 (Apache-2.0), as requests for a short Python function.
                               A narrow domain, so that a small drafter learns something in minutes.
``builtin:long-python-tasks``  the longer ones of the same files
``builtin:chat-questions``     what conversations of chatterbot-corpus 1.3.3 (BSD) begin with, in English
``builtin:python-functions``   documented functions of installed libraries, see ``functions``
``builtin:everyday-requests``  writing, role play, explaining, advice, …, see ``requests``

reasoning-gym's ``gsm_symbolic`` is left out: its templates are questions of GSM8K's test split with other names and numbers.
The sets of ``benchmarks`` are sources as well, for evaluation alone.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ruamel.yaml import YAML

from dflash_core.data.benchmarks import BENCHMARKS
from dflash_core.data.functions import library_versions, python_functions
from dflash_core.data.packages import fetch_package_file, fetch_package_files
from dflash_core.data.requests import everyday_requests

_PACKAGE = "reasoning-gym==0.1.25"
_TASK_FILES = {  # member of the wheel → sha256
    "reasoning_gym/data/codeio.jsonl.gz": "a088810cf4d020279ec50dc5e64f25b7eccc8a428a6f76a25c70c126e4370f33",
    "reasoning_gym/data/codeio-hq.jsonl.gz": "7f2effca40d6412d9f7ccf37e866c5416984e20b2b59d84b4e16b38b18cd5c00",
}
_SHORT_TASK = 240  # characters, about 50 tokens: the demo's two cores read every prompt
_INSTRUCTION = "Write a short Python function that solves this task. Answer with the code only.\n\n{task}"
_LONG_INSTRUCTION = "Write a Python function that solves this task.\n\n{task}"

_CHAT_PACKAGE = "chatterbot-corpus==1.3.3"
_CHAT_FILES = {  # in chatterbot_corpus/data/english → sha256
    "ai.yml": "620a65787a56641db4a03e1419a7578e813967218cf6721e3ea4ef90844916aa",
    "botprofile.yml": "1a694c5288f3f8f87d027d2f98dae71d02efa88e28853a6e5d27e6dbce907294",
    "coding.yml": "1726a8900a82ee32dad559809564f9ae97df9c52f42a8f1fcde84b1d54b1d260",
    "computers.yml": "a222c5a432efe4289e6c5edf1c3d99fd26c48df99db0ff893d1d5ab569f5b750",
    "conversations.yml": "1cf105b5802f377b2dc145f741f7df85629c9ca27e450538165286a75b5e3416",
    "emotion.yml": "510a018938c1880dd0f67e1ae458e26878c91a570daef5a84fb83713c89f0989",
    "food.yml": "68eab2497721d03044d520b70c27d8a0d8ba8e505b3265fb3a1ff3e1a64c7124",
    "gossip.yml": "d6f1b1613ed70821fc1c427bdd00395f58b77ff57d76fbe4ab8cb2038cf15c9b",
    "greetings.yml": "0dd7eb8dcee8e2a38cd1a137bcfbd7f3eb732cddfa1bd396fac5a24b063a4d55",
    "health.yml": "eb88edc5302d688ca096374c7e3f5b9d7cd821f053a17d80204c4acdc20ea4f5",
    "history.yml": "0ff4beeb6ef9b641dc12e1039a149c6a03eb8f2e183702fad2b0997fcc1d63e3",
    "humor.yml": "d2aa03a63f0e8e054589f642788afbc41b8c76f5d734c50901a9a63b359ea06b",
    "literature.yml": "9361ff1478273d811259ca307a1e6be23a5e08e776a5bc5d9524fb13deb886f1",
    "money.yml": "2911d9766625ff5c2feb3d784f2951b2ebd5e9658547efce7568d0282c49274b",
    "movies.yml": "075ca9d91a527206c635c88bf0353323826a25a6f2057be1bc71888af389f842",
    "politics.yml": "c436d5efedea6f715a8a811423a8edf396097771eb11e43b1f0a43a6aee7c2f0",
    "psychology.yml": "5047c211d35f715af4fbc3398f111135e99d34afcd0905a661c40bdeb1413a58",
    "science.yml": "3c259799bba36c67a1601fc264ec01ab051e9e63950734ce1ef644e022081fe7",
    "sports.yml": "8d1bcc632cad4058e3b8490daa15dcd7c2a51790a7b9140b252600b794590403",
    "tech_support.yml": "8a87cdf32579c8efdd9c5f3ef166ae9fb76dcf271b958f5e2265b9246b430655",
    "trivia.yml": "3a9de77e6d82803d1ea3eba48cf6543c884908f4c4f50501fed69f88112994dc",
}


def python_tasks() -> Iterator[Mapping[str, str]]:
    """Rows with ``id`` and ``prompt``: the short English tasks, without repetition, mixed so that any limit takes a fair part.

    Raises:
        DataError: the package cannot be fetched or its files are not the ones expected.
    """
    return _mixed("python-tasks", (task for task in _tasks() if len(task) <= _SHORT_TASK), _INSTRUCTION)


def long_python_tasks() -> Iterator[Mapping[str, str]]:
    """Rows as ``python_tasks`` gives them, of the tasks that are too long for it. Raises as it does."""
    return _mixed("long-python-tasks", (task for task in _tasks() if len(task) > _SHORT_TASK), _LONG_INSTRUCTION)


def chat_questions() -> Iterator[Mapping[str, str]]:
    """Rows with ``id`` and ``prompt``: what the conversations begin with, without repetition, mixed. Raises as ``python_tasks`` does."""
    reader = YAML(typ="safe", pure=True)
    paths = fetch_package_files(_CHAT_PACKAGE, {f"chatterbot_corpus/data/english/{name}": sha256 for name, sha256 in _CHAT_FILES.items()})
    conversations = [turns for path in paths for turns in reader.load(path.read_text(encoding="utf-8"))["conversations"]]
    return _mixed("chat-questions", (str(turns[0] if isinstance(turns, list) else turns) for turns in conversations))


def _tasks() -> Iterator[str]:
    return (" ".join(task.split()) for member, sha256 in _TASK_FILES.items() for task in _descriptions(member, sha256))


def _mixed(name: str, texts: Iterable[str], prompt: str = "{task}") -> Iterator[Mapping[str, str]]:
    """One row for each text of ASCII, in the order of digests."""
    unique = {hashlib.sha256(text.encode()).hexdigest(): text for text in texts if text.isascii()}
    for digest in sorted(unique):
        yield {"id": f"{name}-{digest[:12]}", "prompt": prompt.format(task=unique[digest])}


def _descriptions(member: str, sha256: str) -> Iterator[str]:
    text = gzip.decompress(fetch_package_file(_PACKAGE, member, sha256).read_bytes()).decode()
    rows = json.loads(text) if text.lstrip().startswith("[") else map(json.loads, filter(None, text.split("\n")))
    for row in rows:
        yield row["task_description"]


def versions_of(source: str) -> Mapping[str, str]:
    """What a built-in source depends on beside this code: versions of what is installed, by name."""
    return library_versions() if source == "builtin:python-functions" else {}


def licence_of(source: str) -> str | None:
    """Terms of the prompts of a source, or where they come from; None if that is not known here."""
    if source == "target":
        return "written by the target"
    return _LICENCES.get(source)


_LICENCES = {
    "builtin:python-tasks": "Apache-2.0",
    "builtin:long-python-tasks": "Apache-2.0",
    "builtin:chat-questions": "BSD",
    "builtin:python-functions": "PSF and BSD",
    "builtin:everyday-requests": "Apache-2.0",
}

BUILTIN_SOURCES: Mapping[str, Callable[[], Iterator[Mapping[str, Any]]]] = {
    "builtin:python-tasks": python_tasks,
    "builtin:long-python-tasks": long_python_tasks,
    "builtin:chat-questions": chat_questions,
    "builtin:python-functions": python_functions,
    "builtin:everyday-requests": everyday_requests,
    **BENCHMARKS,
}
