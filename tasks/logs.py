"""Logs of the library, of tasks and of all threads travel with the flow run.

Prefect's own way (``PREFECT_LOGGING_EXTRA_LOGGERS``) is read when Prefect is imported, which a worker does long before this
code, and it knows the flow run only in threads that carry its context. This handler remembers the context it was made in.

What is printed beside that goes through a pipe to the worker. A worker that dies takes nothing with it but that pipe: the run goes on.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
from collections.abc import Iterator
from functools import partial

from prefect.context import FlowRunContext
from prefect.logging.handlers import APILogHandler, PrefectConsoleHandler

from tasks.unread import drop_unread

LOGGERS = ("dflash_core", "tasks")


class FlowRunLogHandler(logging.Handler):
    """Sends records to the flow run, and task run if the thread has one, in which it was made."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._context = contextvars.copy_context()
        self._api = APILogHandler()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record for Prefect's server; its worker sends it in the background."""
        if FlowRunContext.get() is not None:
            self._api.emit(record)
        else:
            self._context.copy().run(self._api.emit, record)


@contextlib.contextmanager
def flow_run_logs() -> Iterator[None]:
    """Send logs to the flow run of the caller, if there is one, while inside. Within another such block they are sent already.

    From then on this process goes on also when nobody reads any more what it prints.
    """
    loggers = [logging.getLogger(name) for name in LOGGERS]
    sent = any(isinstance(handler, FlowRunLogHandler) for logger in loggers for handler in logger.handlers)
    if FlowRunContext.get() is None or sent:
        yield
        return
    _outlive_readers()
    handler = FlowRunLogHandler()
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)


def _outlive_readers() -> None:
    """Rich, by which Prefect prints logs, ends the process, or raises in the thread that logs, where the reader of a pipe has gone."""
    named = [item for item in logging.Logger.manager.loggerDict.values() if isinstance(item, logging.Logger)]
    for handler in (handler for logger in (logging.root, *named) for handler in logger.handlers):
        if isinstance(handler, PrefectConsoleHandler):
            handler.console.on_broken_pipe = partial(drop_unread, 1, 2)  # type: ignore[assignment, method-assign]  # rich: to be replaced for another behaviour
