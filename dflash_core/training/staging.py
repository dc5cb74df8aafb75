"""Rows reach a GPU ahead of the step: a thread of each replica copies them into pinned memory, and a stream of its own copies those to the device.

    feed → [stager: pinned slot → copy stream → device slot] → worker: its stream waits for the copy's event, the host for nothing

There are ``SLOTS`` slots of fixed size. A pinned one is written again only after its copy has finished, a device one only after the step that
reads it has: two events for each slot say so. On the CPU rows lie where they are needed, and there is nothing to stage.

Features of shards were laid into pinned memory by the feed's loaders, and go to the device from there. Features of a live target lie on a GPU
already. They go from there to the slot, by a direct copy between the devices where the hardware has one, and pass neither pinned memory nor the
host; two streams take part in that, one on either device.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from dflash_core.errors import TrainingError
from dflash_core.feed import Batch, Feed, FeedClosedError, Row, collate

SLOTS = 2


class Batches(Protocol):
    """The batches of one replica, micro-step after micro-step."""

    def take(self, microstep: int) -> Batch:
        """The batch of a micro-step; waits for its rows. Raises what the feed or the stager raised."""

    def release(self) -> None:
        """Everything that reads the batch taken last has been queued on the current stream."""

    def close(self) -> None:
        """No more batches are wanted. From any thread."""


class BatchesFromFeed:
    """Straight from the feed, for the CPU."""

    def __init__(self, feed: Feed, replica: int):
        self._feed, self._replica = feed, replica

    def take(self, microstep: int) -> Batch:
        """See ``Batches``."""
        return collate(self._feed.take(self._replica, microstep))

    def release(self) -> None:
        """See ``Batches``."""

    def close(self) -> None:
        """See ``Batches``."""


@dataclass(frozen=True)
class Slot:
    """Room for a batch. ``pinned``: of what is not pinned yet. ``copied``: all is on the device. ``used``: the device has done with it."""

    pinned: dict[str, torch.Tensor]
    batch: Batch
    copied: torch.cuda.Event
    used: torch.cuda.Event


class Staging:
    """The slots of one replica and the stream that fills them, made in warm-up for batches like ``example``."""

    def __init__(self, example: Batch, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._streams = {device: self.stream}
        self.slots = [self._slot(example) for _ in range(SLOTS)]

    def _slot(self, example: Batch) -> Slot:
        pin = self.device.type == "cuda"
        from_host = {name: tensor for name, tensor in example.tensors.items() if not tensor.is_cuda and not tensor.is_pinned()}
        pinned = {name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin) for name, tensor in from_host.items()}
        batch = example.map(lambda tensor: tensor.to(self.device, copy=True))
        # blocking: the stager sleeps until the event has come, instead of spinning on a core
        return Slot(pinned, batch, torch.cuda.Event(blocking=True), torch.cuda.Event())

    def stream_on(self, device: torch.device) -> torch.cuda.Stream:
        """The stream for copies that come from a device."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


class StagedBatches:
    """``Batches`` through the slots of a ``Staging``, by a thread that keeps as many micro-steps ahead as there are slots."""

    def __init__(self, feed: Feed, replica: int, staging: Staging, first: int, stop: int, name: str):
        """Start staging micro-steps ``first`` to ``stop - 1``."""
        self._feed, self._replica, self._staging = feed, replica, staging
        self._stop = stop
        self._staged = self._taken = self._released = first  # counts of micro-steps of the whole run
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name=f"rows of {name}", daemon=True).start()

    def take(self, microstep: int) -> Batch:
        """See ``Batches``. The current stream waits for the copy, the host only for the rows."""
        with self._changed:
            self._changed.wait_for(lambda: self._staged > microstep or self._error is not None or self._closed)
            if self._staged <= microstep:
                raise self._error or FeedClosedError(f"Staging was closed while replica {self._replica} wanted micro-step {microstep}.")
            self._taken = microstep + 1
        slot = self._slot(microstep)
        torch.cuda.current_stream(self._staging.device).wait_event(slot.copied)
        return slot.batch

    def release(self) -> None:
        """See ``Batches``."""
        self._slot(self._taken - 1).used.record(torch.cuda.current_stream(self._staging.device))
        with self._changed:
            self._released = self._taken
            self._changed.notify_all()

    def close(self) -> None:
        """See ``Batches``."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _slot(self, microstep: int) -> Slot:
        return self._staging.slots[microstep % SLOTS]

    def _run(self) -> None:
        try:
            while self._staged < self._stop:
                rows = self._feed.take(self._replica, self._staged)
                with self._changed:
                    self._changed.wait_for(lambda: self._staged - self._released < SLOTS or self._closed)
                    if self._closed:
                        return
                self._stage(self._slot(self._staged), rows)
                with self._changed:
                    self._staged += 1
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _stage(self, slot: Slot, rows: Sequence[Row]) -> None:
        slot.copied.synchronize()  # of the batch before: its pinned memory may be written now
        for b, row in enumerate(rows):
            for name, batch in slot.batch.tensors.items():
                source, place = getattr(row, name), batch[b]
                if source.shape != place.shape or source.dtype != place.dtype:
                    raise TrainingError(
                        f"The {name} of row {row.ordinal} are {source.dtype} {list(source.shape)}, "
                        f"and were {place.dtype} {list(place.shape)} in warm-up. "
                        "All rows of a run have one shape: suspect the source of the rows."
                    )
                if name in slot.pinned:
                    slot.pinned[name][b].copy_(source)
        stream = self._staging.stream
        with torch.cuda.device(self._staging.device), torch.cuda.stream(stream):
            stream.wait_event(slot.used)  # the step that read the batch before
            for name, pinned in slot.pinned.items():
                getattr(slot.batch, name).copy_(pinned, non_blocking=True)
            for name in slot.batch.tensors.keys() - slot.pinned.keys():
                for b, row in enumerate(rows):
                    self._fetch(getattr(row, name), getattr(slot.batch, name)[b])
            slot.copied.record(stream)
            for row in rows:
                if row.give_back is not None:
                    read = torch.cuda.Event()  # not the slot's, which will stand for its next batch
                    read.record(stream)
                    row.give_back(read)

    def _fetch(self, source: torch.Tensor, place: torch.Tensor) -> None:
        """Copy what is not to pass the slot's pinned memory.

        Between devices torch copies on the current stream of the source's, and lets that of the place's wait for it. From pinned memory it
        copies on the current stream, and gives that memory to nobody before it has.
        """
        if not source.is_cuda:
            place.copy_(source, non_blocking=True)
            return
        with torch.cuda.stream(self._staging.stream_on(source.device)), torch.cuda.stream(self._staging.stream):
            place.copy_(source, non_blocking=True)
