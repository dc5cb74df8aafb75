"""How fast a device is, measured in a fraction of a second, whatever else runs on it.

A product that takes a millisecond is made often: the fastest was disturbed by nobody, and so is what the machine does once it is idle. Of a long one
all would be disturbed: where many programs share few cores it comes out several times slower. What others leave of the processors now is
told apart.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_PATIENCE_S = 0.1


@dataclass(frozen=True)
class Rates:
    """Of an undisturbed device: operations per second of a matrix product, bytes per second of a matrix-vector product.

    share: of a processor that this thread got meanwhile, 1 where nobody else wanted any
    """

    product: float
    vector: float
    share: float = 1.0


def measure_rates(device: str, dtype: torch.dtype) -> Rates:
    """Time many small products on a CPU, in one thread for all, and a few large ones on a GPU."""
    on_cpu = device == "cpu"
    size = 256 if on_cpu else 4096
    a = torch.randn(size, size, device=device).to(dtype)
    wide = torch.randn(2048, 2048, device=device).to(dtype) if on_cpu else a
    row = torch.randn(1, len(wide), device=device).to(dtype)
    threads = torch.get_num_threads()
    begun, used = time.perf_counter(), time.thread_time()
    try:
        if on_cpu:  # several threads wait for whichever is held up
            torch.set_num_threads(1)
        product = 2 * size**3 / _seconds_of(lambda: a @ a, device)
        vector = wide.nbytes / _seconds_of(lambda: row @ wide, device)
    finally:
        torch.set_num_threads(threads)
    share = (time.thread_time() - used) / (time.perf_counter() - begun)
    return Rates(product * threads, vector, min(share, 1.0)) if on_cpu else Rates(product, vector)


def _seconds_of(work: Callable[[], object], device: str) -> float:
    best, end = math.inf, time.perf_counter() + _PATIENCE_S
    while time.perf_counter() < end or best == math.inf:
        start = time.perf_counter()
        work()
        if device != "cpu":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best
