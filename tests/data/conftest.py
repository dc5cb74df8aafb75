"""A server in place of the target, for the tests of endpoints."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dflash_core.data import attempts
from tests.data.asking import echo
from tests.data.stand_in import StandIn


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(attempts, "LONGEST_PAUSE_S", 0.02)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def server() -> Iterator[StandIn]:
    with StandIn(echo) as stand_in:
        yield stand_in
