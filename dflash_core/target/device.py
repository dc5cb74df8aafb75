"""The device that is the current one, on which Triton launches kernels whatever their arguments lie on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Within the block a GPU is the current one; of no effect for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
