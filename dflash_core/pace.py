"""How long work will take from here on, by how fast it went of late."""

from __future__ import annotations

from collections import deque

LATELY_S = 60.0
_APART_S = 1.0  # readings that are kept


class Pace:
    """Takes readings of work and clock. What was found done at the start, or cost time long ago, does not count.

    pace = Pace()
    pace.remaining(done=120, total=300, now=time.monotonic())       # seconds, or None
    """

    def __init__(self) -> None:
        self._readings: deque[tuple[float, int]] = deque()

    def remaining(self, done: int, total: int, now: float) -> float | None:
        """Seconds until ``total``, by the pace of the last minute, or of the last two readings if they are further apart.

        None where nothing is known yet, or ``total`` is 0.
        """
        if len(self._readings) > 1 and now - self._readings[-2][0] < _APART_S:
            self._readings.pop()
        self._readings.append((now, done))
        while len(self._readings) > 2 and self._readings[1][0] <= now - LATELY_S:
            self._readings.popleft()
        since, at = self._readings[0]
        return (now - since) / (done - at) * (total - done) if total and done > at else None
