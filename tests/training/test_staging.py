"""Staging with real threads on the CPU: what is copied, when, and who waits. Streams and events are stand-ins that note what is asked of them."""

import time
from collections import deque
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from dflash_core.errors import TrainingError
from dflash_core.feed import Feed, FeedClosedError, collate, loaders_of
from dflash_core.training.staging import SLOTS, StagedBatches, Staging
from tests.training.small import SmallRows
from tests.waiting import ended, eventually

CPU = torch.device("cpu")
calls: list[str] = []


class Event:
    made = 0

    def __init__(self, blocking: bool = False):
        self.name = ("copied" if blocking else "used") + str(Event.made // 2)
        Event.made += 1

    def record(self, stream: object) -> None:
        calls.append(f"record {self.name}")

    def synchronize(self) -> None:
        calls.append(f"synchronize {self.name}")


@pytest.fixture(autouse=True)
def _no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Mock(wait_event=lambda event: calls.append(f"wait for {event.name}"))
    for name, stand_in in (("Stream", lambda device: stream), ("current_stream", lambda device: stream), ("Event", Event)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    Event.made = 0
    calls.clear()


def staged(source: Any, steps: int = 8, rows: int = 2) -> tuple[Feed, StagedBatches]:
    feed = Feed(loaders_of(source), replicas=1, rows_per_microstep=rows, queue_rows=2 * rows, start_ordinal=0, stop_ordinal=rows * steps)
    staging = Staging(collate([SmallRows().row(ordinal) for ordinal in range(rows)]), CPU)
    return feed, StagedBatches(feed, 0, staging, 0, steps, "replica 0 (cpu)")


def staged_batches() -> int:
    return len([call for call in calls if call.startswith("record copied")])


def test_every_batch_arrives_whole_and_stays_until_it_is_released() -> None:
    feed, batches = staged(SmallRows())
    for microstep in range(8):
        batch = batches.take(microstep)
        expected = collate([SmallRows().row(2 * microstep + b) for b in range(2)])
        if microstep % 3 == 0 and microstep < 7:  # the stager is as far ahead as it can be
            assert eventually(lambda filled=microstep + SLOTS: staged_batches() == min(8, filled))
        assert batch.tensors.keys() == expected.tensors.keys()
        assert all(torch.equal(tensor, expected.tensors[name]) for name, tensor in batch.tensors.items())
        batches.release()
    feed.close()


def test_it_keeps_as_far_ahead_as_it_has_slots_and_no_further() -> None:
    feed, batches = staged(SmallRows())
    assert eventually(lambda: staged_batches() == SLOTS)
    time.sleep(0.05)  # for what must not happen: too short on a slow machine, it would go unseen there
    assert staged_batches() == SLOTS
    batches.take(0)
    time.sleep(0.05)
    assert calls.count("record copied0") == 1  # taken, and still read
    batches.release()
    assert eventually(lambda: calls.count("record copied0") == 2)
    batches.close()
    feed.close()


def test_pinned_memory_waits_for_its_copy_and_the_device_for_the_step_that_reads() -> None:
    feed, batches = staged(SmallRows(), steps=3)
    batches.take(0)
    batches.release()
    assert eventually(lambda: calls.count("record copied0") == 2)
    of_first_slot = [call for call in calls if call.endswith("0")]
    assert of_first_slot == [
        "synchronize copied0", "wait for used0", "record copied0",  # batch 0 is staged
        "wait for copied0", "record used0",  # the step reads it
        "synchronize copied0", "wait for used0", "record copied0",  # batch 2 takes its place
    ]  # fmt: skip
    feed.close()


def test_a_failing_source_and_a_closed_feed_reach_whoever_waits() -> None:
    class Broken(SmallRows):
        def row(self, ordinal: int) -> Any:
            if ordinal == 2:
                raise OSError("the disk is gone")
            return super().row(ordinal)

    feed, batches = staged(Broken())
    with pytest.raises(OSError, match="the disk is gone") as caught:
        deque((batches.take(microstep) for microstep in range(2)), maxlen=0)
    assert any(entry.name == "row" for entry in caught.traceback)
    feed, batches = staged(SmallRows())
    batches.take(0)
    batches.release()
    feed.close()
    with pytest.raises(FeedClosedError):
        deque((batches.take(microstep) for microstep in range(1, 8)), maxlen=0)


def test_closing_ends_the_thread_although_no_slot_comes_free() -> None:
    feed, batches = staged(SmallRows())
    assert eventually(lambda: staged_batches() == SLOTS)
    batches.close()
    feed.close()
    assert ended("rows of")


def test_a_row_of_another_shape_is_refused_with_both_shapes() -> None:
    class Shorter(SmallRows):
        def row(self, ordinal: int) -> Any:
            row = super().row(ordinal)
            if ordinal == 3:
                object.__setattr__(row, "anchors", row.anchors[:-1])
            return row

    feed, batches = staged(Shorter())
    batches.take(0)
    batches.release()
    with pytest.raises(TrainingError, match=r"anchors of row 3 are torch.int64 \[5\], and were torch.int64 \[6\] in warm-up"):
        batches.take(1)
    feed.close()


def test_features_that_are_pinned_already_go_to_the_device_from_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.is_floating_point())
    feed, batches = staged(SmallRows(), rows=1)
    assert all(slot.batch.tensors.keys() - slot.pinned.keys() == {"features"} for slot in batches._staging.slots)
    for microstep in range(8):
        batch = batches.take(microstep)
        expected = collate([SmallRows().row(microstep)])
        assert all(torch.equal(tensor, expected.tensors[name]) for name, tensor in batch.tensors.items())
        batches.release()
    feed.close()
