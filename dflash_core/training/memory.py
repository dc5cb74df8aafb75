"""Memory of a device as training sees it. On the CPU that is the resident set of the process."""

from __future__ import annotations

import psutil
import torch


def memory_in_use(device: torch.device) -> int:
    """Bytes in use: allocated by torch on a CUDA device, resident on the CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss


def memory_metrics(devices: list[torch.device]) -> dict[str, float]:
    """Metrics: ``memory_rss`` of the process; for each CUDA device the peak allocated, what is reserved, inactive splits, and allocation retries."""
    metrics: dict[str, float] = {"memory_rss": float(psutil.Process().memory_info().rss)}
    for device in dict.fromkeys(devices):
        if device.type == "cuda":
            statistics = torch.cuda.memory_stats(device)
            metrics[f"memory_peak_{device.index}"] = float(statistics["allocated_bytes.all.peak"])
            metrics[f"memory_reserved_{device.index}"] = float(statistics["reserved_bytes.all.current"])
            metrics[f"memory_retries_{device.index}"] = float(statistics["num_alloc_retries"])
            metrics[f"memory_inactive_split_{device.index}"] = float(statistics["inactive_split_bytes.all.current"])
    return metrics
