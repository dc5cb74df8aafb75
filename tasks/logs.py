"""Logs of the library, of tasks and of all threads travel with the flow run.

Prefect's own way (``PREFECT_LOGGING_EXTRA_LOGGERS``) is read when Prefect is imported, which a worker does long before this
code, and it knows the flow run only in threads that carry its context. This handler remembers the context it was made in.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
from collections.abc import Iterator

from prefect.context import FlowRunContext
from prefect.logging.handlers import APILogHandler

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
    """Send logs to the flow run of the caller, if there is one, while inside. Within another such block they are sent already."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    sent = any(isinstance(handler, FlowRunLogHandler) for logger in loggers for handler in logger.handlers)
    if FlowRunContext.get() is None or sent:
        yield
        return
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
