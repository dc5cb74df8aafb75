"""When a request to a server is made again, and after how long: one rule for all that ask servers with OpenAI's interface.

A server that gives no answer, or says that it cannot for the moment, is left alone for a while that doubles with each failure in a row, with
jitter so that those who were refused together do not come back together, or for as long as its Retry-After says.
"""

from __future__ import annotations

import contextlib
import email.utils
import random
import time

FIRST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_ASKED_FOR_S = 1.0, 60.0, 3600.0


def is_temporary(status: int) -> bool:
    """Whether the same request may be answered later, after a reply with this HTTP status."""
    return status in (408, 409, 425, 429) or status >= 500


def pause_after(failures: int, at_least: float | None = None) -> float:
    """Seconds to wait after so many failures in a row; ``at_least``: what the server asks for, if it does."""
    pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (failures - 1)) * random.uniform(0.5, 1.0)
    return pause if at_least is None else at_least + pause / 2


def asked_for(retry_after: str | None) -> float | None:
    """Seconds that a Retry-After header asks for, a number or a date; None where it asks for nothing that can be read."""
    if retry_after is None:
        return None
    with contextlib.suppress(ValueError, TypeError):
        number = retry_after.strip().isdecimal()
        seconds = float(retry_after) if number else email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time()
        return min(max(seconds, 0.0), LONGEST_ASKED_FOR_S)
    return None
