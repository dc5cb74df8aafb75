"""Memory of a device, step by step: after warm-up it must not grow.

The first replica of each CUDA device reads the allocator after every step of its own; allocation happens when work is queued, so what it reads is
exact although the device has not finished. Devices that only targets use are read after steps too. Growth of what is reserved is told with its
cause, and ends the run where ``training.strict_memory`` says so. On the CPU the resident set of the process is all there is to know.

A step launched as CUDA graphs allocates nothing: its tensors lie in memory that the graphs hold, which the allocator counts as reserved and not as
allocated. There the reserved bytes are the figure, and the peak leaves the step out.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import psutil
import torch

from dflash_core.errors import TrainingError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reading:
    """Bytes of a device in a step: most allocated, reserved, free in pieces of reserved blocks; and allocation retries since the process began."""

    peak: int
    reserved: int
    inactive_split: int
    retries: int


def read_memory(device: torch.device) -> Reading:
    """Of a CUDA device, since the last reading."""
    statistics = torch.cuda.memory_stats(device)
    torch.cuda.reset_peak_memory_stats(device)
    return Reading(
        peak=statistics["allocated_bytes.all.peak"],
        reserved=statistics["reserved_bytes.all.current"],
        inactive_split=statistics["inactive_split_bytes.all.current"],
        retries=statistics["num_alloc_retries"],
    )


class MemoryWatch:
    """Readings of one device, by ``read``. The first step is the measure of all later ones."""

    def __init__(self, device: torch.device, strict: bool, read: Callable[[torch.device], Reading] = read_memory):
        self.device, self._strict, self._read = device, strict, read
        self._last: Reading | None = None
        self._largest_peak = 0  # of all steps
        self._peak = 0  # of the steps since the last record

    def after_step(self, step: int) -> None:
        """Read and compare. Raises ``TrainingError`` if reserved memory has grown and ``strict``; else that is a warning."""
        reading, before = self._read(self.device), self._last
        self._last, self._peak = reading, max(self._peak, reading.peak)
        if before is not None and reading.reserved > before.reserved:
            message = (
                f"Reserved memory of {self.device} grew by {_mib(reading.reserved - before.reserved)} in step {step}, "
                f"to {_mib(reading.reserved)}: {self._cause(before, reading)}"
            )
            if self._strict:
                raise TrainingError(f"{message} training.strict_memory = false lets the run go on.")
            logger.warning(message)
        self._largest_peak = max(self._largest_peak, reading.peak)

    def metrics(self) -> dict[str, float]:
        """Peak since the last call, and the rest as it stands; empty before the first step."""
        reading, index = self._last, self.device.index
        if reading is None:
            return {}
        peak, self._peak = max(self._peak, reading.peak), 0
        return {
            f"memory_peak_{index}": float(peak),
            f"memory_reserved_{index}": float(reading.reserved),
            f"memory_retries_{index}": float(reading.retries),
            f"memory_inactive_split_{index}": float(reading.inactive_split),
        }

    def _cause(self, before: Reading, reading: Reading) -> str:
        if reading.retries > before.retries:
            return (
                "the device was full, and the allocator gave unused blocks back and asked again. "
                "Lower training.rows_per_microstep or objective.chunk_slots, or take other processes off the device."
            )
        if reading.peak > self._largest_peak:
            return (
                f"a step took {_mib(reading.peak)}, and none before more than {_mib(self._largest_peak)}. "
                "Something allocates by what is in the rows; shapes must be those of warm-up."
            )
        return (
            f"no step took more than {_mib(self._largest_peak)}, but free memory lies in pieces "
            f"({_mib(reading.inactive_split)} in all, {_mib(before.inactive_split)} a step before). "
            "If PYTORCH_CUDA_ALLOC_CONF is set without expandable_segments:True, unset it."
        )


def prefer_expandable_segments() -> None:
    """Let the CUDA allocator's reserved blocks grow in place, which leaves fewer pieces, unless the user's environment says how it is to work."""
    if not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def memory_in_use(device: torch.device) -> int:
    """Bytes in use: allocated by torch on a CUDA device, resident on the CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else resident()


def resident() -> int:
    """Resident set of the process, bytes."""
    return int(psutil.Process().memory_info().rss)


def watches(replicas: Sequence[torch.device], others: Iterable[torch.device], strict: bool) -> list[list[MemoryWatch]]:
    """What each replica watches: its CUDA device, if it is the first replica there; the first one also those of ``others`` that have no replica."""
    watched = [[device] if device not in replicas[:index] else [] for index, device in enumerate(replicas)]
    watched[0] += sorted(set(others) - set(replicas), key=str)
    return [[MemoryWatch(device, strict) for device in devices if device.type == "cuda"] for devices in watched]


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
