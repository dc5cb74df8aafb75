"""The device that is the current one, on which Triton launches kernels whatever their arguments lie on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import psutil
import torch


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Within the block a GPU is the current one; of no effect for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def total_memory(device: torch.device | str) -> int:
    """Bytes that a device has."""
    device = torch.device(device)
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else int(psutil.virtual_memory().total)


def free_memory(device: torch.device | str) -> int:
    """Bytes that this process can still allocate on a device: what nobody has, and what torch's allocator holds without using it."""
    device = torch.device(device)
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
