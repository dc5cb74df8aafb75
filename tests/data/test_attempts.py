from __future__ import annotations

import email.utils
import time

from dflash_core.data.attempts import LONGEST_PAUSE_S, asked_for, is_temporary, pause_after


def test_what_may_pass_is_asked_again_and_what_is_wrong_with_the_request_is_not() -> None:
    assert all(map(is_temporary, (408, 409, 425, 429, 500, 502, 503, 504)))
    assert not any(map(is_temporary, (400, 401, 403, 404, 413, 422)))


def test_pauses_double_up_to_a_minute_are_never_the_same_and_give_a_server_at_least_what_it_asks_for() -> None:
    for failures in range(1, 12):
        pauses = [pause_after(failures) for _ in range(20)]
        assert len(set(pauses)) > 1
        longest = min(2.0 ** (failures - 1), LONGEST_PAUSE_S)
        assert all(longest / 2 <= pause <= longest for pause in pauses)
    assert 7.0 < pause_after(1, 7.0) <= 7.5


def test_a_server_asks_for_seconds_or_until_a_date_and_for_no_more_than_an_hour() -> None:
    assert asked_for("12") == 12.0
    assert 0 < asked_for(email.utils.formatdate(time.time() + 3000)) <= 3000
    assert asked_for(email.utils.formatdate(time.time() - 100)) == 0.0
    assert asked_for("1000000") == 3600.0
    assert asked_for("soon") is asked_for(None) is None
