"""Timing the stages of a batch, and learning that it is done, without ever making the device wait for the host."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class StageClock:
    """Time per stage: on CUDA with events, read once at the end, so that timing itself never makes the host wait."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._seconds = {"prefill": 0.0, "draft": 0.0, "verify": 0.0}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """What runs within the block is of that stage."""
        if self._stream is None:
            started = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - started
            return
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(self._stream)
        yield
        after.record(self._stream)
        self._events.append((name, before, after))

    def read(self) -> dict[str, float]:
        """Seconds per stage; waits until the device has finished."""
        if self._stream is not None:
            self._stream.synchronize()
        for name, before, after in self._events:
            self._seconds[name] += before.elapsed_time(after) / 1e3
        self._events.clear()
        return self._seconds


class LateFlag:
    """A truth value on the device that the host sees some time after it was sent."""

    def __init__(self, flag: Tensor):
        self._flag = flag
        self._cuda = flag.device.type == "cuda"
        self._seen = torch.zeros(flag.shape, dtype=flag.dtype, pin_memory=self._cuda)
        self._arrived = torch.cuda.Event() if self._cuda else None

    def send(self) -> None:
        """Copy the flag as it will be when the device gets here."""
        self._seen.copy_(self._flag, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record(torch.cuda.current_stream(self._flag.device))

    def read(self) -> bool:
        """The flag as it was sent last; waits until it has arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return bool(self._seen)
