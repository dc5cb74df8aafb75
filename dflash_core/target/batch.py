"""Rows that generate side by side, each begun when there is room for it and ended by itself; all of it on the device.

The device decides by itself when an answer ends; the host looks now and then, later than it happened, and never keeps the device waiting. A row that
has ended goes on doing nothing until it is given the next prompt.

Shapes: R rows, P prompts of an admission, T their width, M longest answer, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dflash_core.config import GenerationConfig
from dflash_core.errors import TargetError
from dflash_core.target.device import total_memory
from dflash_core.target.info import static_cache_bytes
from dflash_core.target.model import TargetModel
from dflash_core.target.sampling import pick_tokens
from dflash_core.target.static import StaticTarget

_WIDTHS = 32  # prompts are padded to a multiple of so many tokens: few shapes, each captured once


class OnItsWay(NamedTuple):
    """Tensors that are being copied to the host."""

    values: tuple[Tensor, ...]
    ready: torch.cuda.Event | None

    def get(self) -> tuple[Tensor, ...]:
        """The tensors; waits until they are there."""
        if self.ready is not None:
            self.ready.synchronize()
        return self.values


class Batch:
    """The rows of a generation.

    rows:           how many there are at present
    least_admitted: free rows that are worth an admission
    most_admitted:  prompts that one admission takes
    """

    def __init__(self, target: TargetModel, rows: int, longest: int, settings: GenerationConfig, stop_ids: frozenset[int]):
        """
        Args:
            rows: answers that are generated together.
            longest: tokens of the longest prompt.
        """
        self.rows, self._settings, self._device = rows, settings, target.device
        longest = -(-longest // _WIDTHS) * _WIDTHS
        M = settings.max_new_tokens
        too_large = TargetError(
            f"data.generation.batch_size = {rows}: so many answers of max_new_tokens = {M} after prompts of up to {longest} tokens do not fit "
            f"into the memory of {self._device}. Lower one of the two."
        )
        if static_cache_bytes(target.info, rows + 1, longest + M, target.dtype.itemsize) > sum(map(total_memory, target.devices)):
            raise too_large  # a CPU would say so by ending the process
        try:
            self.static = StaticTarget(target, rows + 1, longest + M)  # one row more, for what only fills up the shape of an admission
        except torch.OutOfMemoryError as error:
            raise too_large from error
        self.least_admitted = max(1, rows // 16)
        self.most_admitted = self.least_admitted if self._device.type == "cuda" else rows
        self._stop = torch.tensor(sorted(stop_ids), dtype=torch.int64, device=self._device)
        self._ids = torch.zeros((rows + 1, 1), dtype=torch.int64, device=self._device)
        self._start = torch.zeros(rows + 1, dtype=torch.int64, device=self._device)
        self._count = torch.zeros(rows + 1, dtype=torch.int64, device=self._device)
        self._alive = torch.zeros(rows + 1, dtype=torch.bool, device=self._device)
        self._tokens = torch.zeros((rows + 1, M + 1), dtype=torch.int64, device=self._device)  # the last column takes what nobody wants
        self._uniforms = torch.zeros((rows + 1, M if settings.temperature > 0.0 else 1), dtype=torch.float64, device=self._device)
        self._replay = self.static.capture(self._step) if self.static.graphs else None  # while no row is alive
        self._admit: dict[int, tuple[_Admission, Callable[[], None]]] = {}

    def step(self) -> None:
        """One more token for every row that is alive."""
        if self._replay is None:
            self._step()
        else:
            self._replay()

    def admit(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], rows: Sequence[int]) -> None:
        """Give prompts, at most ``most_admitted``, to rows that have ended; draws the first token of each answer.

        Where graphs are captured the shape depends on the length of a prompt alone, so that what it becomes does not depend on who comes with it.
        """
        spare = self.static.rows - 1
        if not self.static.graphs:
            admission = _Admission(len(prompts), max(map(len, prompts)), self._uniforms)
            admission.fill(prompts, seeds, rows, spare)
            self._begin(admission)
            return
        widths = [-(-len(prompt) // _WIDTHS) * _WIDTHS for prompt in prompts]
        for width in sorted(set(widths)):
            chosen = [index for index, own in enumerate(widths) if own == width]
            if width not in self._admit:
                admission = _Admission(self.most_admitted, width, self._uniforms)
                admission.fill([], [], [], spare)
                self._admit[width] = admission, self.static.capture(lambda admission=admission: self._begin(admission))  # type: ignore[misc]
            admission, begin = self._admit[width]
            admission.fill([prompts[index] for index in chosen], [seeds[index] for index in chosen], [rows[index] for index in chosen], spare)
            begin()

    def look(self) -> OnItsWay:
        """Which rows are alive, [rows] bool, as of now."""
        return self._fetch(self._alive[: self.rows])

    def answers(self, rows: Sequence[int]) -> OnItsWay:
        """Tokens [len(rows), M + 1] of rows that have ended, and how many of them count. The rows may be given away at once."""
        index = torch.tensor(rows, dtype=torch.int64)
        index = index.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else index
        return self._fetch(self._tokens[index], self._count[index])

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows, in this order, become rows 0, 1, … Only where nothing is captured."""
        index = torch.tensor(rows, dtype=torch.int64, device=self._device)
        self.static.move(index)
        for state in (self._ids, self._start, self._count, self._alive, self._tokens, self._uniforms):
            state[: len(rows)] = state[index]
        self.rows = len(rows)

    def _step(self) -> None:
        R = self.rows
        logits_RV = self.static.forward(self._ids[:R], self._start[:R]).logits[:, -1]
        alive, count = self._alive[:R], self._count[:R]
        column = count.clamp(max=self._uniforms.shape[1] - 1)[:, None]
        next_R = pick_tokens(logits_RV, self._settings, self._uniforms[:R].gather(1, column)[:, 0])
        self._tokens[:R].scatter_(1, torch.where(alive, count, self._settings.max_new_tokens)[:, None], next_R[:, None])
        count += alive
        alive &= self._goes_on(next_R, count)
        self._ids[:R] = next_R[:, None]
        self._start[:R] = (self._start[:R] + 1) * alive  # a row that has ended stands at 0, where it reads next to nothing

    def _begin(self, admission: _Admission) -> None:
        rows_P, lengths_P = admission.rows, admission.lengths
        logits_PV = self.static.prefill(admission.ids, lengths_P, rows_P).logits[:, 0]
        next_P = pick_tokens(logits_PV, self._settings, admission.uniforms[:, 0])
        one_P = torch.ones_like(rows_P)
        self._uniforms[rows_P] = admission.uniforms
        self._tokens[rows_P, 0] = next_P
        self._count[rows_P] = one_P
        self._ids[rows_P, 0] = next_P
        alive_P = self._goes_on(next_P, one_P)
        self._start[rows_P] = lengths_P * alive_P
        self._alive[rows_P] = alive_P

    def _goes_on(self, next_R: Tensor, count_R: Tensor) -> Tensor:
        return ~(next_R[:, None] == self._stop).any(-1) & (count_R < self._settings.max_new_tokens)

    def _fetch(self, *tensors: Tensor) -> OnItsWay:
        if self._device.type != "cuda":
            return OnItsWay(tuple(tensor.clone() for tensor in tensors), None)
        host = tuple(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True) for tensor in tensors)
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self._device))
        return OnItsWay(host, ready)


class _Admission:
    """Where the prompts of an admission lie on the device: ids [P, T], lengths, rows, and the numbers they draw with [P, M]."""

    def __init__(self, prompts: int, width: int, uniforms: Tensor):
        device = uniforms.device
        self.ids = torch.zeros((prompts, width), dtype=torch.int64, device=device)
        self.lengths = torch.ones(prompts, dtype=torch.int64, device=device)
        self.rows = torch.zeros(prompts, dtype=torch.int64, device=device)
        self.uniforms = torch.zeros((prompts, uniforms.shape[1]), dtype=torch.float64, device=device)

    def fill(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], rows: Sequence[int], spare: int) -> None:
        """Put prompts here; places that are left over are for the row ``spare``."""
        ids, lengths = np.zeros(self.ids.shape, dtype=np.int64), np.ones(self.lengths.shape, dtype=np.int64)
        taken, uniforms = np.full(self.rows.shape, spare, dtype=np.int64), np.zeros(self.uniforms.shape)
        for place, (prompt, seed, row) in enumerate(zip(prompts, seeds, rows, strict=True)):
            ids[place, : len(prompt)], lengths[place], taken[place] = prompt, len(prompt), row
            if uniforms.shape[1] > 1:
                uniforms[place] = np.random.Generator(np.random.Philox(seed)).random(uniforms.shape[1])
        for tensor, values in ((self.ids, ids), (self.lengths, lengths), (self.rows, taken), (self.uniforms, uniforms)):
            source = torch.from_numpy(values)
            tensor.copy_(source.pin_memory() if tensor.is_cuda else source, non_blocking=True)
