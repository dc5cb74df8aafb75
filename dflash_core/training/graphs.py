"""A replica's step as CUDA graphs, captured by hand on the main thread in warm-up and launched by the replica's worker on its own stream.

    first micro-step → further micro-steps → close │ all-reduce │ apply

Launching a graph takes the host a fraction of a millisecond, where the step itself keeps Python's lock busy for half its time, of which all
replicas of a process share one. The numbers are those of the step outside of graphs: the same kernels run.

What is captured reads its input from tensors that never move: the batch, the learning rate, the tail. All graphs of a replica share one
pool of memory, which is safe because they are launched one after the other, and what one leaves for another (gradients) is kept alive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dflash_core.feed import Batch


class StepGraphs:
    """Captures at once. Make it on the replica's stream, after everything has run there outside of graphs, while no other thread uses the device."""

    def __init__(
        self, stream: torch.cuda.Stream, batch: Batch, *, first: Callable[[Batch], None], further: Callable[[Batch], None],
        close: Callable[[], None] | None, apply: Callable[[], None], accumulating: bool,
    ):  # fmt: skip
        """
        Args:
            batch:        on the device; later batches are copied into its tensors
            first:        begins a step and computes its first micro-step
            further:      computes a micro-step after the first, called only if ``accumulating``
            close, apply: the other parts of a step; None where there is nothing to do
        """
        self._stream, self._batch = stream, batch
        self._pool = torch.cuda.graph_pool_handle()
        self._first = self._capture(first, batch)
        self._further = self._capture(further, batch) if accumulating else None
        self._close = self._capture(close) if close else None
        self._apply = self._capture(apply)
        self._next: torch.cuda.CUDAGraph | None = self._first

    def begin(self) -> None:
        """The next micro-step is the first of a step."""
        self._next = self._first

    def micro_step(self, batch: Batch) -> None:
        """Copy a batch, of the shapes of the captured one, to where the graphs read it, and compute."""
        assert self._next is not None, "training.accumulation_steps is 1, and a second micro-step was asked for"
        self._batch.copy_(batch)
        self._next.replay()
        self._next = self._further

    def close(self) -> None:
        """What comes before the sum."""
        if self._close is not None:
            self._close.replay()

    def apply(self) -> None:
        """What comes after it."""
        self._apply.replay()

    def _capture(self, work: Callable[..., None], *arguments: Any) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # "thread_local": only calls of this thread can break the capture. An error of another device's thread is not ours.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work(*arguments)
        return graph
