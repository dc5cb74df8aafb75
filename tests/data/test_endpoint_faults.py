"""Endpoints that fail, hang and die, and runs that are killed: each prompt is asked once, and nothing is lost."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dflash_core.data import attempts, endpoint
from dflash_core.errors import EndpointError
from tests.data.asking import build, echo, rows_of, said
from tests.data.stand_in import StandIn
from tests.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.usefixtures("short_pauses")

TOKENS = '{"choices": [{"message": {"content": "x"}, "finish_reason": "stop", "token_ids": %s}]}'
GARBAGE = ["<html>", '{"choices": []}', '{"choices": [{"message": {"content": 5}}]}', *(TOKENS % ids for ids in ("[1e999]", "[7, -1]", '"12"'))]
NESTED = pytest.param("garbage " + "[" * 100_000, id="nested")
FAULTS = ["500", "503 0", "429 0", "408", "hang", "close", "flood", NESTED, *(f"garbage {text}" for text in GARBAGE)]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_fails_now_and_then_is_asked_again(tmp_path: Path, server: StandIn, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_MOST_BYTES", 200_000)
    with StandIn(echo) as sound:
        build(tmp_path / "sound", rows_of(6), sound)
    server.faults = [fault] * 2
    hangs = fault == "hang"  # on a slow machine other requests may then take too long as well
    build(tmp_path / "out", rows_of(6), server, generation={"request_timeout_s": 0.5, "retries": 100} if hangs else {})
    assert (tmp_path / "out" / "conversations.jsonl.gz").read_bytes() == (tmp_path / "sound" / "conversations.jsonl.gz").read_bytes()
    more = len(server.asked) - len(sound.asked)
    assert more >= 2 if hangs else more == 2


@pytest.mark.parametrize("after", ["1", "date"])
def test_retry_after_is_waited_for_by_all_requests_to_that_server(tmp_path: Path, server: StandIn, after: str) -> None:
    server.faults = [f"429 {after}"]
    build(tmp_path / "out", rows_of(3), {"url": server.url, "concurrency": 1})
    assert server.times[1] - server.times[0] > 0.9


def test_prompts_are_shared_by_servers_within_their_limits_and_a_dead_one_costs_nothing_but_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "LONGEST_PAUSE_S", 60.0)
    both_full = threading.Event()

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        if (one.busy, two.busy) == (2, 3):
            both_full.set()
        assert both_full.wait(PATIENCE_S)
        return echo(body)

    with StandIn(answer) as one, StandIn(answer) as two, StandIn(echo) as dead:
        dead.always = "500"
        limits = [{"url": one.url, "concurrency": 2}, {"url": two.url, "concurrency": 3}, {"url": dead.url, "concurrency": 8}]
        counts = build(tmp_path / "out", rows_of(40), *limits, generation={"retries": 50})
        assert (one.busy, two.busy) == (2, 3)
        assert len(one.asked) + len(two.asked) == counts["generated"]
        assert len(dead.asked) < 40  # its pauses double: 30 of them would be months


def test_when_no_server_answers_the_error_names_them_and_a_new_start_asks_only_for_what_is_missing(tmp_path: Path, server: StandIn) -> None:
    rows = rows_of(9)
    with StandIn(echo) as whole:
        build(tmp_path / "whole", rows, whole)
    answered = 0

    def until_five(body: dict[str, Any]) -> dict[str, Any]:
        nonlocal answered
        answered += 1
        if answered >= 5:
            server.always = "503"
        return echo(body)

    server.answer = until_five
    with pytest.raises(EndpointError, match=r"No endpoint answers .*5 failures in a row.*HTTP 503.*is kept: start again"):
        build(tmp_path / "out", rows, {"url": server.url, "concurrency": 1})
    server.always, server.answer = None, echo
    before = len(server.asked)
    build(tmp_path / "out", rows, server)
    assert before > 5
    assert len(server.asked) - before == len(whole.asked) - answered
    for name in ("conversations.jsonl.gz", "rejected.jsonl"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_interrupted_and_started_again_no_request_is_lost_or_made_twice(tmp_path: Path, server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = 0
    from dflash_core.data.cache import Journal

    append = Journal.append

    def interrupted(journal: Journal, responses: Any) -> None:
        nonlocal kept
        append(journal, responses)
        kept += 1
        if kept == 4:
            raise KeyboardInterrupt

    rows = [{"prompt": f"Q{i}"} for i in range(10)]
    monkeypatch.setattr(Journal, "append", interrupted)
    server.most = 4
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "out", rows, {"url": server.url, "concurrency": 1})
    before = len(server.asked)
    with StandIn(echo) as another:  # which server is asked does not matter
        build(tmp_path / "out", rows, another)
    assert before <= 5  # one may have been under way
    asked = Counter(body["messages"][-1]["content"] for body in another.asked)
    assert (len(asked), max(asked.values())) == (6, 1)
    assert said(tmp_path / "out") == [[f"Q{i}", f"hello Q{i}"] for i in range(10)]


def test_kill_9_at_any_moment_changes_no_result_and_repeats_only_what_was_not_on_disk_yet(tmp_path: Path) -> None:
    rows, choose, journal = rows_of(60), random.Random(3), tmp_path / "out" / "journal.jsonl"
    with StandIn(echo) as sound, StandIn(echo) as server:
        build(tmp_path / "sound", rows, sound)
        on_disk = 0
        for life in range(6):
            asked = len(server.asked)
            server.allow(asked + choose.randint(1, 14) if life < 5 else 10**9)
            child = os.fork()
            if child == 0:
                try:
                    build(tmp_path / "out", rows, server)
                finally:
                    os._exit(0)
            if life < 5:
                assert eventually(lambda: len(server.asked) > server.most)  # the next one waits for its answer
                os.kill(child, signal.SIGKILL)
            assert os.WIFSIGNALED(os.waitpid(child, 0)[1]) == (life < 5)
            if life < 5:
                on_disk = journal.read_bytes().count(b"\n") if journal.exists() else 0
        assert on_disk > 0
        assert len(server.asked) - asked == len(sound.asked) - on_disk
    for name in ("conversations.jsonl.gz", "rejected.jsonl"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "sound" / name).read_bytes()
