from __future__ import annotations

import itertools
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future

import pytest
import torch

from dflash_core.feed import Feed, FeedClosedError, Row, loaders_of
from tests.waiting import PATIENCE_S, ended, eventually

EMPTY = torch.empty(0)


class Numbers:
    """Rows that hold nothing but their ordinal. ``delay`` says how long a loader takes for one."""

    def __init__(self, delay: Callable[[int], float] = lambda ordinal: 0.0):
        self.delay = delay
        self.made: list[int] = []

    def rows_per_epoch(self, epoch: int) -> int:
        return 10

    def row(self, ordinal: int) -> Row:
        time.sleep(self.delay(ordinal))
        self.made.append(ordinal)
        return Row(ordinal, ordinal // 10, EMPTY, EMPTY, EMPTY, EMPTY, EMPTY, EMPTY, ())


def start(work: Callable[[], object]) -> Future[object]:
    """Run in a thread; the future has the outcome."""
    future: Future[object] = Future()

    def body() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=body, daemon=True).start()
    return future


def train(
    feed: Feed, replicas: int, accumulation: int, first_step: int, steps: int, pause: Callable[[int, int], float]
) -> dict[tuple[int, int, int], list[int]]:
    """Replicas in threads that meet after every step; which ordinals each micro-step of each replica took."""
    meeting = threading.Barrier(replicas)
    taken: dict[tuple[int, int, int], list[int]] = {}

    def replica_loop(replica: int) -> None:
        for step in range(first_step, first_step + steps):
            for m in range(accumulation):
                time.sleep(pause(replica, step))
                taken[step, m, replica] = [row.ordinal for row in feed.take(replica, step * accumulation + m)]
            meeting.wait(PATIENCE_S)

    futures = [start(lambda replica=replica: replica_loop(replica)) for replica in range(replicas)]
    for future in futures:
        future.result(PATIENCE_S)
    return taken


@pytest.mark.parametrize(("R", "A", "b"), list(itertools.product((1, 2, 3, 4), (1, 2, 3), (1, 2))))
def test_the_run_takes_the_same_rows_in_the_same_places_for_any_timing(R: int, A: int, b: int) -> None:
    steps = 4
    source = Numbers(delay=lambda ordinal: 0.001 * (ordinal * 7 % 3))  # loaders finish out of order
    with Feed(loaders_of(source, 3), replicas=R, rows_per_microstep=b, queue_rows=R * b, start_ordinal=0, stop_ordinal=steps * A * R * b) as feed:
        taken = train(feed, R, A, 0, steps, pause=lambda replica, step: 0.001 * ((replica + step) % 3))
    for (s, m, r), ordinals in taken.items():
        assert ordinals == [((s * A + m) * R + r) * b + j for j in range(b)]
    assert [ordinal for key in sorted(taken) for ordinal in taken[key]] == list(range(steps * A * R * b))


@pytest.mark.parametrize(("R", "b"), [(1, 1), (2, 1), (3, 2)])
def test_resuming_from_any_step_takes_the_rows_that_were_left(R: int, b: int) -> None:
    steps = 5
    for first in range(steps + 1):
        source = Numbers()
        with Feed(
            loaders_of(source), replicas=R, rows_per_microstep=b, queue_rows=8, start_ordinal=first * R * b, stop_ordinal=steps * R * b
        ) as feed:
            taken = train(feed, R, 1, first, steps - first, pause=lambda replica, step: 0.0)
        assert [ordinal for key in sorted(taken) for ordinal in taken[key]] == list(range(first * R * b, steps * R * b))
        assert sorted(source.made) == list(range(first * R * b, steps * R * b))


@pytest.mark.parametrize("loaders", [1, 4])
def test_the_queue_never_holds_more_than_its_bound(loaders: int) -> None:
    source = Numbers(delay=lambda ordinal: 0.001 * (ordinal % 4))
    taken, seen = 0, []
    with Feed(loaders_of(source, loaders), replicas=1, rows_per_microstep=1, queue_rows=3, start_ordinal=0, stop_ordinal=40) as feed:
        for m in range(40):
            time.sleep(0.003 * (m % 5 == 0))
            seen.append(feed.depth)
            assert len(source.made) - taken <= 3
            feed.take(0, m)
            taken += 1
    assert max(seen) <= 3


def test_rows_are_loaded_ahead_up_to_the_bound_and_no_further() -> None:
    source = Numbers()
    with Feed(loaders_of(source), replicas=1, rows_per_microstep=1, queue_rows=5, start_ordinal=0, stop_ordinal=100) as feed:
        assert eventually(lambda: feed.depth == 5)
        time.sleep(0.05)  # for what must not happen: too short on a slow machine, it would go unseen there
        assert sorted(source.made) == [0, 1, 2, 3, 4]
        feed.take(0, 0)
        assert eventually(lambda: feed.depth == 5)
    assert sorted(source.made) == [0, 1, 2, 3, 4, 5]


def test_one_replica_may_run_ahead_within_a_step_while_another_has_not_begun() -> None:
    with Feed(loaders_of(Numbers()), replicas=2, rows_per_microstep=1, queue_rows=6, start_ordinal=0, stop_ordinal=6) as feed:
        assert [feed.take(1, m)[0].ordinal for m in range(3)] == [1, 3, 5]
        assert [feed.take(0, m)[0].ordinal for m in range(3)] == [0, 2, 4]


def test_closing_wakes_everyone_who_waits_even_while_a_loader_is_stuck() -> None:
    release = threading.Event()
    source = Numbers(delay=lambda ordinal: release.wait() and 0.0)
    feed = Feed(loaders_of(source), replicas=4, rows_per_microstep=1, queue_rows=8, start_ordinal=0, stop_ordinal=80)
    waiting = [start(lambda replica=replica: feed.take(replica, 0)) for replica in range(4)]
    assert eventually(lambda: all(condition._waiters for condition in feed._row_came))  # type: ignore[attr-defined]
    closing = start(feed.close)
    outcomes = [future.exception(timeout=PATIENCE_S) for future in waiting]
    assert not release.is_set()
    assert all(isinstance(outcome, FeedClosedError) for outcome in outcomes)
    release.set()
    closing.result(PATIENCE_S)
    with pytest.raises(FeedClosedError):
        feed.take(0, 0)
    feed.close()


def test_closing_ends_the_loaders_whether_they_wait_for_room_or_are_done() -> None:
    for stop in (100, 2):
        feed = Feed(loaders_of(Numbers(), 3), replicas=1, rows_per_microstep=1, queue_rows=2, start_ordinal=0, stop_ordinal=stop)
        assert eventually(lambda feed=feed: feed.depth == 2)
        feed.close()
        assert ended("loader ")
        assert feed.depth == 0


def test_what_a_loader_raises_reaches_every_replica_with_its_own_traceback() -> None:
    class Broken(Numbers):
        def row(self, ordinal: int) -> Row:
            if ordinal == 5:
                self.fail_deep_inside()
            return super().row(ordinal)

        def fail_deep_inside(self) -> None:
            raise OSError("the disk is gone")

    with Feed(loaders_of(Broken()), replicas=4, rows_per_microstep=1, queue_rows=8, start_ordinal=0, stop_ordinal=80) as feed:

        def loop(replica: int) -> None:
            for m in range(20):
                feed.take(replica, m)

        futures = [start(lambda replica=replica: loop(replica)) for replica in range(4)]
        errors = [future.exception(timeout=PATIENCE_S) for future in futures]
        for error in errors:
            assert isinstance(error, OSError)
            text = "".join(traceback.format_exception(error))
            assert "fail_deep_inside" in text
            assert text.count("while it makes row 5.") == 1
        with pytest.raises(OSError, match="the disk is gone") as caught:
            feed.take(0, feed_turn(feed, 0))
    assert sum(entry.name == "fail_deep_inside" for entry in caught.traceback) == 1


def feed_turn(feed: Feed, replica: int) -> int:
    """The micro-step that the feed expects next, found by asking."""
    for m in range(21):
        try:
            feed.take(replica, m)
        except ValueError:
            continue
        except OSError:
            return m
    raise AssertionError("no turn")


def test_a_microstep_out_of_turn_or_beyond_the_end_is_refused_instead_of_waiting_forever() -> None:
    with Feed(loaders_of(Numbers()), replicas=1, rows_per_microstep=2, queue_rows=2, start_ordinal=2, stop_ordinal=6) as feed:
        for wrong in (0, 2):
            with pytest.raises(ValueError, match="its next is 1"):
                feed.take(0, wrong)
        feed.take(0, 1)
        with pytest.raises(ValueError, match="its next is 2"):
            feed.take(0, 1)
        feed.take(0, 2)
        with pytest.raises(ValueError, match="rows end at 6"):
            feed.take(0, 3)


@pytest.mark.parametrize(
    ("queue_rows", "start_ordinal", "stop_ordinal", "message"),
    [(3, 0, 8, "less than the 4 rows"), (4, 2, 8, "multiples of 4"), (4, 0, 9, "multiples of 4")],
)
def test_a_feed_that_could_not_serve_whole_microsteps_is_refused(queue_rows: int, start_ordinal: int, stop_ordinal: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Feed(loaders_of(Numbers()), replicas=2, rows_per_microstep=2, queue_rows=queue_rows, start_ordinal=start_ordinal, stop_ordinal=stop_ordinal)


def test_a_taken_row_is_let_go_of() -> None:
    import gc
    import weakref

    with Feed(loaders_of(Numbers()), replicas=1, rows_per_microstep=1, queue_rows=2, start_ordinal=0, stop_ordinal=100) as feed:
        rows = feed.take(0, 0)
        reference = weakref.ref(rows[0])
        assert eventually(lambda: feed.depth == 2)
        del rows
        gc.collect()
        assert reference() is None


@pytest.mark.parametrize(("R", "b"), [(2, 1), (3, 2)])
def test_feeds_of_single_replicas_load_the_rows_that_one_feed_would_give_them(R: int, b: int) -> None:
    for replica in range(R):
        source = Numbers()
        with Feed(
            loaders_of(source), replicas=R, rows_per_microstep=b, queue_rows=b, start_ordinal=2 * R * b, stop_ordinal=6 * R * b, only=replica
        ) as feed:
            taken = [row.ordinal for microstep in range(2, 6) for row in feed.take(replica, microstep)]
        assert taken == [(microstep * R + replica) * b + j for microstep in range(2, 6) for j in range(b)]
        assert sorted(source.made) == taken
