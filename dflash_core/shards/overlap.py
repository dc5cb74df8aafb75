"""Targets that run on and writers that write, at the same time: one thread for each target, some threads of writers beside it.

    target thread:  pass → pass → pass …          never waits for a copy or for the disk, unless all slots are full
    slot:             └→ pinned memory, copied on a stream of its own
    writers:               └→ checksum, disk; whoever writes a shard's last batch finishes the shard

A slot holds what one pass gave until it is on disk. When all are full the target waits. Its waiting is counted, and so is the time in which
no writer has anything to do: which side holds up the other can be read off the result.

Shapes: T tokens of a pass.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import torch

SLOTS = 3  # one that the target fills, one that is copied, one that is written
WRITERS = 4  # for each target: a checksum takes as long as the write, and a synchronised disk stops one of them for a while


class Slot:
    """Room for what one pass gave, in main memory. Made once, for at most ``tokens`` tokens."""

    def __init__(self, tokens: int):
        self._tokens = tokens
        self._pinned: dict[str, torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
        self._held: Mapping[str, torch.Tensor] = {}

    def fill(self, values: Mapping[str, torch.Tensor]) -> None:
        """Take tensors [T, …] of one pass: as they are on the CPU; from a GPU they are copied, and nothing is waited for."""
        first = next(iter(values.values()))
        self._held = values
        if not first.is_cuda:
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(first.device)
            self._copied = torch.cuda.Event(blocking=True)  # whoever waits sleeps, instead of spinning on a core
            self._pinned = {name: torch.empty((self._tokens, *value.shape[1:]), dtype=value.dtype, pin_memory=True) for name, value in values.items()}
        assert self._copied is not None
        self._stream.wait_stream(torch.cuda.current_stream(first.device))
        with torch.cuda.device(first.device), torch.cuda.stream(self._stream):
            for name, value in values.items():
                self._pinned[name][: len(value)].copy_(value, non_blocking=True)
            self._copied.record(self._stream)

    def values(self) -> dict[str, torch.Tensor]:
        """The tensors on the CPU, once they have arrived; the originals are let go."""
        held = self._held
        if self._copied is None:
            return dict(held)
        self._copied.synchronize()
        self._held = {}
        return {name: self._pinned[name][: len(value)] for name, value in held.items()}

    def release(self) -> None:
        """What it held has been written."""
        self._held = {}


class Slots:
    """The slots of one target."""

    def __init__(self, tokens: int):
        self._free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for _ in range(SLOTS):
            self._free.put(Slot(tokens))

    def take(self) -> tuple[Slot, float]:
        """A free slot, and how many seconds it was waited for."""
        began = time.monotonic()
        slot = self._free.get()
        return slot, time.monotonic() - began

    def wait_until_free(self) -> None:
        """Wait until everything has been written."""
        for slot in [self._free.get() for _ in range(SLOTS)]:
            self._free.put(slot)

    def give_back(self, slot: Slot) -> None:
        """What the slot holds has been written: it may be filled again."""
        slot.release()
        self._free.put(slot)


class PassClock:
    """How long a device stood still because its target waited for a slot.

    A host that waits is no loss while the device still works at the passes before. So the device is asked how long it was between two of them.
    """

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._device = torch.device("cpu")
        self._end: torch.cuda.Event | float | None = None
        self._gaps: list[tuple[Any, Any, float]] = []

    def begin(self, waited_s: float) -> None:
        """A pass begins, after its thread waited so long for a slot."""
        if self._end is not None:
            self._gaps.append((self._end, self._now(), waited_s))
        self.settle(ended=False)

    def end(self, device: torch.device) -> None:
        """All of the pass has been queued on the device."""
        self._device = device
        self._end = self._now()

    def finish(self, wait_until_written: Callable[[], None]) -> None:
        """After the last pass: what is still being written when the device has ended is waited for, too."""
        if isinstance(self._end, torch.cuda.Event):
            self._end.synchronize()
        began = time.monotonic()
        wait_until_written()
        self.waited_s += time.monotonic() - began
        self.settle(ended=True)

    def settle(self, *, ended: bool) -> None:
        """Add up the gaps that are over; ``ended``: the device has done all its work, so that all of them are."""
        while self._gaps and (ended or not isinstance(self._gaps[0][1], torch.cuda.Event) or self._gaps[0][1].query()):
            end, begin, waited_s = self._gaps.pop(0)
            gap_s = end.elapsed_time(begin) / 1e3 if isinstance(end, torch.cuda.Event) else begin - end
            self.waited_s += min(gap_s, waited_s)

    def _now(self) -> torch.cuda.Event | float:
        if self._device.type != "cuda":
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


class BusyClock:
    """How long nobody was busy, of however many."""

    def __init__(self) -> None:
        self.idle_s = 0.0
        self._busy = 0
        self._idle_since = time.monotonic()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        with self._lock:
            if self._busy == 0:
                self.idle_s += time.monotonic() - self._idle_since
            self._busy += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._lock:
            self._busy -= 1
            if self._busy == 0:
                self._idle_since = time.monotonic()
