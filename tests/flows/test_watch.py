"""``dflashctl submit --watch``: what is shown of a run, with a real Prefect server."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest
from prefect import flow
from prefect.context import FlowRunContext

from dflash_core.errors import DFlashError
from flows import watch as module
from flows.deploy import why_not_completed
from flows.watch import WatchError, watch
from tasks.logs import flow_run_logs

pytestmark = pytest.mark.slow


def test_a_run_that_fails_is_shown_by_its_own_log_and_ends_with_its_reason_and_without_a_traceback(
    prefect_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []

    @flow
    def fails() -> None:
        context = FlowRunContext.get()
        assert context is not None
        assert context.flow_run is not None
        seen.append(context.flow_run.id)
        with flow_run_logs():
            logging.getLogger("dflash_core.data").info("shards: begins")
            raise DFlashError("data.max_length = 40: too few. Raise it")

    with pytest.raises(DFlashError):
        fails()
    capsys.readouterr()
    state = watch(seen[0])
    assert [line.split(" ", 1)[1] for line in capsys.readouterr().out.splitlines()] == ["shards: begins", "Failed"]
    told = why_not_completed(state)
    assert told.splitlines()[0] == "The run did not complete, it ended in the state Failed: DFlashError: data.max_length = 40: too few. Raise it"
    assert told.splitlines()[1] == "Correct that and submit it again: it goes on from what is done."


def test_a_server_that_is_away_for_too_long_ends_the_watching_not_the_run(prefect_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from uuid import uuid4

    from prefect.client.orchestration import SyncPrefectClient

    def away(*_: object) -> None:
        raise httpx.ConnectError("connection refused")

    monkeypatch.setattr(SyncPrefectClient, "read_flow_run", away)
    monkeypatch.setattr(module, "AWAY_PATIENCE_S", -1.0)
    with pytest.raises(WatchError, match="The run goes on, but can be watched no longer: connection refused"):
        watch(uuid4())
