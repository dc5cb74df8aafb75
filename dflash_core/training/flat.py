"""One long buffer for all parameters, so that optimiser, synchronisation and comparison handle a few tensors instead of dozens.

    P elements: the parameters of the drafter, padding included

Matrices come first and vectors (the norms) after them, so that weight decay applies to one contiguous part. Every tensor starts at a
multiple of 64 elements, the alignment that compiled kernels and collectives want for any dtype. A later optimiser that is sharded over
the replicas cuts the same buffer into equal parts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

ALIGNMENT = 64


class FlatLayout:
    """Where each named tensor lies in a flat buffer. The same names and shapes give the same layout, in any order."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]):
        self.shapes = dict(sorted(shapes.items(), key=lambda item: (len(item[1]) < 2, item[0])))
        self.offsets: dict[str, int] = {}
        self.num_decayed = 0
        end = 0
        for name, shape in self.shapes.items():
            self.offsets[name] = end
            end += -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT
            if len(shape) >= 2:
                self.num_decayed = end
        self.size = end

    def views(self, flat_P: Tensor) -> dict[str, Tensor]:
        """Each tensor by name, as a view into ``flat_P``, which is of all tensors or of the vectors alone."""
        first = max(0, self.size - len(flat_P))
        places = {name: slice(start - first, start - first + math.prod(self.shapes[name])) for name, start in self.offsets.items() if start >= first}
        return {name: flat_P[place].view(self.shapes[name]) for name, place in places.items()}

    def checksums(self, flat_P: Tensor) -> Tensor:
        """[number of tensors] int64: each tensor's bits read as 32-bit integers and summed: exact in any order. For fp32 buffers."""
        return torch.stack([view.reshape(-1).view(torch.int32).sum(dtype=torch.int64) for view in self.views(flat_P).values()])
