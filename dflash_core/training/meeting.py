"""Where the replicas' threads wait for each other on the host."""

from __future__ import annotations

import threading


class InterruptedByOthers(Exception):  # noqa: N818 - not an error of its own: another thread's is the cause
    """This thread was ended because another one failed or the run was given up."""


class Meeting:
    """Where R threads wait for each other; ``abort`` sends everybody home, now and at every later meeting."""

    def __init__(self, size: int):
        self._barrier = threading.Barrier(size)

    def wait(self) -> None:
        """Return when all R threads have called. Raises ``InterruptedByOthers`` once aborted."""
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise InterruptedByOthers from None

    def abort(self) -> None:
        """Wake all who wait."""
        self._barrier.abort()
