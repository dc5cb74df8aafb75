"""How long a part of a step takes: by the clock on the CPU, by events on the replica's stream on CUDA, read when the device is past them.

with Span(device) as span:
    ...
span.seconds()                # on CUDA once something later on the stream has been waited for
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

import torch


class Span:
    """From entering to leaving. Nothing is waited for."""

    def __init__(self, device: torch.device):
        self._began = self._ended = 0.0
        self._events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) if device.type == "cuda" else None
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def __enter__(self) -> Self:
        self._began = time.perf_counter()
        if self._events is not None:
            self._events[0].record(self._stream)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._ended = time.perf_counter()
        if self._events is not None:
            self._events[1].record(self._stream)

    def seconds(self) -> float:
        """The device's on CUDA, else those of the thread."""
        if self._events is None:
            return self._ended - self._began
        return self._events[0].elapsed_time(self._events[1]) / 1e3
