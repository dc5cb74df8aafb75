"""Follow a flow run from the command line: its states and its log, as they come, until it ends.

    state = watch(run.id)

Prefect's own ``--watch`` shows that a task has failed, not why. Here the log of the run is shown, and who fails says so in words.
"""

from __future__ import annotations

import datetime
import logging
import time
from collections.abc import Callable
from typing import Any
from uuid import UUID

import httpx

from dflash_core.errors import DFlashError

POLL_S = 1.0
AWAY_PATIENCE_S = 120.0  # a server that is started again is back by then
LAST_WORDS_S = 30.0  # the log of a run that has ended comes some seconds later
_ABRUPT_END_S = 4.0  # of a process that was killed nothing more comes but what was on its way
_WAITS = {
    "Late": "waits for a worker (dflashctl status), or for the run before it",
    "AwaitingConcurrencySlot": "waits for the run before it",
}
_TRACEBACK = "\nTraceback (most recent call last):"
_SAYS_WHAT_THE_STATE_SAYS = ("prefect.flow_runs", "prefect.task_runs")
_OVERLAP = datetime.timedelta(seconds=10)  # logs of worker and run arrive in batches, not in order
_PAGE = 200


class WatchError(DFlashError):
    """The server does not answer any more, or does not know the run."""


def watch(run_id: UUID) -> Any:
    """Print states and log of a flow run until it ends.

    Returns:
        The state that it ends in.

    Raises:
        WatchError: the server was away for longer than ``AWAY_PATIENCE_S``, or the run was deleted.
    """
    from prefect.client.orchestration import get_client

    told, ended = "", 0.0
    with get_client(sync_client=True) as client:
        log = _Log(client, run_id)
        while True:
            state = _patiently(lambda: client.read_flow_run(run_id).state)
            for line in _patiently(log.new):
                print(line, flush=True)
            if state.is_final():
                ended = ended or time.monotonic()
                orderly = state.is_completed() or state.is_failed()
                if log.complete or time.monotonic() - ended > (LAST_WORDS_S if orderly else _ABRUPT_END_S):
                    print(_line(state.timestamp, state.name), flush=True)
                    return state
            elif state.name != told:
                told = state.name
                print(_line(state.timestamp, f"{told} {_WAITS.get(told, '')}".rstrip()), flush=True)
            time.sleep(POLL_S)


def _patiently(ask: Callable[[], Any]) -> Any:
    """Ask a server that may be away for a while."""
    from prefect.exceptions import PrefectException

    begun = time.monotonic()
    while True:
        try:
            return ask()
        except httpx.HTTPError as error:
            if time.monotonic() - begun > AWAY_PATIENCE_S:
                raise WatchError(f"The run goes on, but can be watched no longer: {str(error) or type(error).__name__}") from error
        except PrefectException as error:  # somebody has deleted it
            raise WatchError(f"The run can be watched no longer: {error}") from error
        time.sleep(POLL_S)


class _Log:
    """The log of a flow run, read as it grows."""

    def __init__(self, client: Any, run_id: UUID):
        self._client = client
        self._run_id = run_id
        self._since: datetime.datetime | None = None
        self._seen: set[UUID] = set()
        self.complete = False
        """Whether the run itself has said that it has ended, which it says last."""

    def new(self) -> list[str]:
        """Lines that were not given before, of what the run says of itself; of Prefect only warnings. The reason of an end is in its state."""
        from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId, LogFilterTimestamp

        after = None if self._since is None else LogFilterTimestamp(after_=self._since - _OVERLAP)
        wanted = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[self._run_id]), timestamp=after)
        records: list[Any] = []
        while len(page := self._client.read_logs(wanted, limit=_PAGE, offset=len(records))) == _PAGE:
            records += page
        lines = []
        for record in (*records, *page):
            if record.id in self._seen:
                continue
            self._seen.add(record.id)
            self._since = max(self._since or record.timestamp, record.timestamp)
            if record.name == "prefect.flow_runs" and record.message.startswith("Finished in state"):
                self.complete = True
            elif not record.name.startswith("prefect.") or (record.level >= logging.WARNING and record.name not in _SAYS_WHAT_THE_STATE_SAYS):
                lines.append(_line(record.timestamp, record.message.split(_TRACEBACK)[0]))
        return lines


def _line(when: datetime.datetime, words: str) -> str:
    return f"{when.astimezone():%H:%M:%S} {words}"
