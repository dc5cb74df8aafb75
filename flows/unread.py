"""Standard output that nobody reads any more, as after ``| head``."""

from __future__ import annotations

import os
import select
import sys


def unread_output() -> bool:
    """Whether standard output is a pipe whose reader has gone. If so, the rest of it goes nowhere, what is still in its buffer too."""
    output = sys.stdout.fileno()
    poller = select.poll()
    poller.register(output, 0)  # an error is told unasked
    if not poller.poll(0):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, output)
    os.close(nowhere)
    return True
