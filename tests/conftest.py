"""Tests keep digests of files to themselves, and share what was fetched with the user."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from dflash_core.data.packages import default_cache_dir


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
