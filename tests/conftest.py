"""Tests keep digests of files to themselves, share what was fetched with the user, and are dealt to workers so that all end at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_core.data.packages import default_cache_dir
from tests import waiting
from tests.forks import Forks

HERE = Path(__file__).parent
LONG = (
    "flows/test_deploy.py", "flows/test_interrupt.py", "test_kills.py", "training/test_ranks.py", "pipeline", "training/test_trainer.py",
    "tasks/test_tracker_server.py", "training/test_resume.py", "objective/test_benchmarks.py", "drafter/test_real_loaders.py",
    "data/test_endpoint.py", "evaluation/test_server.py", "target/test_fused.py", "target/test_sampling_kernel.py", "training/test_fused.py",
)  # fmt: skip
"""Modules, and folders of them, that take long for the number of their tests: they begin first."""
SHARED = ("prefect_url", "interpreter: Forks", "tests.pipeline.")
"""What modules have in common that each worker would make anew, by what they say of it: all those are for one worker."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long modules first."""
    ranks = {HERE / name: rank for rank, name in enumerate(LONG)}
    items.sort(key=lambda item: ranks.get(item.path, ranks.get(item.path.parent, len(LONG))))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """A module is for one worker, and so are all modules that have something in common."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    texts = {path.relative_to(config.rootpath).as_posix(): path.read_text("utf-8") for path in HERE.rglob("test_*.py")}
    groups = {name: shared for name, text in texts.items() for shared in SHARED if shared in text}

    class Dealer(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            module = super()._split_scope(nodeid)
            return groups.get(module, module)

    config.option.loadscopereorder = False  # by which modules of few tests would begin last
    return Dealer(config, log)


@pytest.fixture(autouse=True)
def others_threads() -> None:
    """Which threads a test finds already there."""
    waiting.others = frozenset(threading.enumerate())


@pytest.fixture(scope="session", autouse=True)
def own_digests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache folder of the session's own, for children too, whose packages and targets are the user's: thousands of test files have digests."""
    before, users, own = os.environ.get("DFLASH_CACHE"), default_cache_dir(), tmp_path_factory.mktemp("cache")
    for fetched in ("packages", "targets"):
        (users / fetched).mkdir(parents=True, exist_ok=True)
        (own / fetched).symlink_to(users / fetched)
    os.environ["DFLASH_CACHE"] = str(own)
    yield
    os.environ.pop("DFLASH_CACHE") if before is None else os.environ.update(DFLASH_CACHE=before)


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Forks]:
    """Where Triton interprets its kernels, as it decides when it is imported."""
    pytest.importorskip("triton")
    with Forks("triton.language, tests.training.small, tests.target.tiny", TRITON_INTERPRET="1") as forks:
        yield forks


@pytest.fixture(scope="session")
def prefect_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for Prefect's database, for this process and its children: filling a new one takes seconds, so once."""
    from prefect.settings import PREFECT_HOME, temporary_settings

    home = tmp_path_factory.mktemp("prefect")
    before = os.environ.get("PREFECT_HOME")
    os.environ["PREFECT_HOME"] = str(home)
    with temporary_settings({PREFECT_HOME: home}):
        yield home
    os.environ.pop("PREFECT_HOME") if before is None else os.environ.update(PREFECT_HOME=before)


@pytest.fixture(scope="session")
def prefect_url(prefect_home: Path) -> Iterator[str]:
    """A temporary server with an empty database."""
    from flows.server import prefect_api

    with prefect_api() as url:
        yield url
