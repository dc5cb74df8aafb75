"""One packed row, and rows stacked into a batch: the types that shards, live targets and workers share.

Shapes: T row length, F features of a token (taps · hidden size), N anchor slots, B rows of a batch. All are fixed for a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

TENSORS = ("features", "tokens", "document_ids", "positions", "loss_mask", "anchors")


@dataclass(frozen=True)
class Row:
    """Whole samples side by side, padded to the row length.

    ordinal:      place in the order of the whole run; epochs run on
    epoch:        epoch the row belongs to, from 0
    features:     [T, F] hidden states of the tapped layers, in the stored precision; 0 in the padding
    tokens:       [T] int64; 0 in the padding
    document_ids: [T] int32, 0, 1, … for the samples of the row; -1 in the padding
    positions:    [T] int64, position of the token in its sample; 0 in the padding
    loss_mask:    [T] bool, True where the target produced the token; False in the padding
    anchors:      [N] int64, ascending row indices; slots that stay empty are -1 and come last
    sample_ids:   ids of the samples, by document id
    give_back:    where the features lie in a buffer of a live target's GPU: call it once nobody reads them any more, with the event after which
                  the buffer may be written again, or None if that is now
    """

    ordinal: int
    epoch: int
    features: torch.Tensor
    tokens: torch.Tensor
    document_ids: torch.Tensor
    positions: torch.Tensor
    loss_mask: torch.Tensor
    anchors: torch.Tensor
    sample_ids: tuple[str, ...]
    give_back: Callable[[torch.cuda.Event | None], None] | None = None


@dataclass(frozen=True)
class Batch:
    """The tensors of rows, stacked: those of ``Row`` with a leading B."""

    features: torch.Tensor
    tokens: torch.Tensor
    document_ids: torch.Tensor
    positions: torch.Tensor
    loss_mask: torch.Tensor
    anchors: torch.Tensor

    def to(self, device: torch.device | str) -> Batch:
        """The batch with all tensors on ``device``."""
        return self.map(lambda tensor: tensor.to(device))

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """The batch with ``function`` of every tensor in its place."""
        return Batch(**{name: function(getattr(self, name)) for name in TENSORS})

    def copy_(self, other: Batch) -> None:
        """Copy the tensors of a batch of the same shapes into these, without waiting for a device where the memory is pinned."""
        for name in TENSORS:
            getattr(self, name).copy_(getattr(other, name), non_blocking=True)


def collate(rows: Sequence[Row]) -> Batch:
    """Stack rows of equal shapes. A single row is not copied."""
    tensors = {}
    for name in TENSORS:
        values = [getattr(row, name) for row in rows]
        tensors[name] = values[0].unsqueeze(0) if len(values) == 1 else torch.stack(values)
    return Batch(**tensors)
