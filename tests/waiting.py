"""Waiting for what is to happen, for as long as it takes. The limit is a net for what never happens: nothing that is right depends on it.

assert eventually(lambda: feed.depth == 5)
assert ended("replica")                     # threads of this test with such names
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

PATIENCE_S = 200.0  # less than a test may take
others: frozenset[threading.Thread] = frozenset()
"""Threads of tests before this one: a failure leaves replicas in their last collective, whose other end has gone, until the transport gives up."""


def eventually(condition: Callable[[], object], every_s: float = 0.005) -> bool:
    """Whether a condition holds, now or later."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_s)
    return True


def ended(*prefixes: str) -> bool:
    """Whether all threads of this test end whose names begin so. One that has told its result needs a moment more to be gone."""
    return eventually(lambda: not any(thread.name.startswith(prefixes) for thread in threading.enumerate() if thread not in others))
