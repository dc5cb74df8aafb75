"""One long buffer for all parameters, so that optimiser, synchronisation and comparison handle a few tensors instead of dozens.

    P elements: the parameters of the drafter, padding included

Matrices come first and vectors (the norms) after them, so that weight decay applies to one contiguous part. Every tensor starts at a
multiple of 64 elements, the alignment that compiled kernels and collectives want for any dtype. An optimiser that is sharded over the
replicas cuts the same buffer into equal parts, wherever a tensor begins or ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 64


@dataclass(frozen=True)
class Shard:
    """A part of a flat buffer: where it starts, its elements, and how many of them, from its start, decay."""

    start: int
    size: int
    num_decayed: int

    @property
    def slice(self) -> slice:
        """Of the whole buffer."""
        return slice(self.start, self.start + self.size)


class FlatLayout:
    """Where each named tensor lies in a flat buffer. The same names and shapes give the same layout, in any order.

    The buffer can be cut into ``parts`` shards of one size.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], parts: int = 1):
        self.shapes = dict(sorted(shapes.items(), key=lambda item: (len(item[1]) < 2, item[0])))
        self.offsets: dict[str, int] = {}
        self.num_decayed = 0
        end = 0
        for name, shape in self.shapes.items():
            self.offsets[name] = end
            end += -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT
            if len(shape) >= 2:
                self.num_decayed = end
        self.size = -(-end // (ALIGNMENT * parts)) * ALIGNMENT * parts
        self._parts = parts

    def shard(self, part: int) -> Shard:
        """Part ``part`` of ``parts``."""
        size = self.size // self._parts
        return Shard(part * size, size, min(max(self.num_decayed - part * size, 0), size))

    def pieces(self, shard: Shard) -> Iterator[tuple[str, slice, slice]]:
        """What of each tensor lies in a shard: name, which of its elements, and where in the shard."""
        for name, start in self.offsets.items():
            first, last = max(start, shard.start), min(start + math.prod(self.shapes[name]), shard.start + shard.size)
            if first < last:
                yield name, slice(first - start, last - start), slice(first - shard.start, last - shard.start)

    def views(self, flat_P: Tensor) -> dict[str, Tensor]:
        """Each tensor by name, as a view into ``flat_P``, which is of all tensors or of the vectors alone."""
        first = max(0, self.size - len(flat_P))
        places = {name: slice(start - first, start - first + math.prod(self.shapes[name])) for name, start in self.offsets.items() if start >= first}
        return {name: flat_P[place].view(self.shapes[name]) for name, place in places.items()}

    def checksums(self, flat_P: Tensor) -> Tensor:
        """[number of tensors] int64: each tensor's bits read as integers of their size and summed: exact in any order. Elements have 4 or 2 bytes."""
        bits = torch.int32 if flat_P.element_size() == 4 else torch.int16
        return torch.stack([view.reshape(-1).view(bits).sum(dtype=torch.int64) for view in self.views(flat_P).values()])
