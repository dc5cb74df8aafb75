"""Sums over replicas that share one CUDA device: each reads the others' buffers where they lie. Nothing passes the host, and no thread waits for it.

R replicas, a buffer of n elements on each: replica r adds up part r of all buffers, in the order r, r+1, … (so the bits depend on r alone), and
then everybody copies the parts of the others. Events order the streams; the meetings only make sure that an event has been recorded
before another thread's stream is told to wait for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_core.training.meeting import Meeting


@dataclass(frozen=True)
class Shown:
    """What a replica shows to the others: its buffer, flat, and the event after which they may go on with it."""

    buffer_n: Tensor
    ready: torch.cuda.Event


class DeviceSum:
    """One replica's end. ``board`` is common to all: what each of them shows."""

    def __init__(self, rank: int, meeting: Meeting, board: list[Shown | None]):
        self._rank, self._meeting, self._board = rank, meeting, board

    def all_reduce(self, buffer: Tensor) -> None:
        """Sum in place, on the current stream. Contiguous, and of one size on all replicas."""
        self.reduce_scatter(buffer)
        self.all_gather(buffer)

    def reduce_scatter(self, buffer: Tensor) -> None:
        """Sum this rank's part of the buffer; the other parts stay as they are."""
        flat_n = buffer.view(-1)
        mine = self._parts(flat_n)[self._rank]
        for other_n in self._show(flat_n):
            mine += self._parts(other_n)[self._rank]
        self._show(flat_n)  # nobody goes on, and writes into its buffer, before all have read

    def all_gather(self, buffer: Tensor) -> None:
        """Copy every rank's part of the buffer from that rank."""
        flat_n = buffer.view(-1)
        parts = self._parts(flat_n)
        for shift, other_n in enumerate(self._show(flat_n), start=1):
            owner = (self._rank + shift) % len(self._board)
            parts[owner].copy_(self._parts(other_n)[owner])
        self._show(flat_n)

    def _parts(self, flat_n: Tensor) -> tuple[Tensor, ...]:
        return flat_n.tensor_split(len(self._board))

    def _show(self, flat_n: Tensor) -> list[Tensor]:
        """Show a buffer as it will be once the current stream has come here, and wait for all: the others' buffers, the next rank's first."""
        stream = torch.cuda.current_stream(flat_n.device)
        ready = torch.cuda.Event()
        ready.record(stream)
        self._board[self._rank] = Shown(flat_n, ready)
        self._meeting.wait()
        shown = [self._board[(self._rank + shift) % len(self._board)] for shift in range(1, len(self._board))]
        self._meeting.wait()  # all have looked: the board may be written again
        self._board[self._rank] = None
        for other in shown:
            assert other is not None
            stream.wait_event(other.ready)
        return [other.buffer_n for other in shown if other is not None]
