"""Output that nobody reads any more, as after ``| head``, or of a flow run whose worker has died."""

from __future__ import annotations

import os
import select


def drop_unread(*outputs: int) -> bool:
    """Let those of these file descriptors that are pipes whose reader has gone lead nowhere from now on; whether any was one."""
    poller = select.poll()
    for output in outputs:
        poller.register(output, 0)  # an error is told unasked
    unread = [output for output, _ in poller.poll(0)]
    if unread:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for output in unread:
            os.dup2(nowhere, output)
        os.close(nowhere)
    return bool(unread)
