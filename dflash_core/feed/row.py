"""One packed row, and rows stacked into a batch: the types that shards, live targets and workers share.

Shapes: T row length, F features of a token (taps · hidden size), N anchor slots, B rows of a batch. All are fixed for a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

_TENSORS = ("features", "feature_scales", "tokens", "document_ids", "positions", "loss_mask", "anchors", "last_hidden", "topk_ids", "topk_logprobs")


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
    feature_scales: [T, K] float32, a scale for each token and tapped layer where ``features`` are in fp8 (``shards.fp8``); else None
    last_hidden:  [T, H] what the target's head gets at each token, where the loss asks for it; else None. 0 in the padding
    topk_ids, topk_logprobs: [T, K] the target's likeliest next tokens at each token, as last_hidden
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
    feature_scales: torch.Tensor | None = None
    last_hidden: torch.Tensor | None = None
    topk_ids: torch.Tensor | None = None
    topk_logprobs: torch.Tensor | None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that a batch is stacked of, by name."""
        return _tensors(self)


@dataclass(frozen=True)
class Batch:
    """The tensors of rows, stacked: those of ``Row`` with a leading B."""

    features: torch.Tensor
    tokens: torch.Tensor
    document_ids: torch.Tensor
    positions: torch.Tensor
    loss_mask: torch.Tensor
    anchors: torch.Tensor
    feature_scales: torch.Tensor | None = None
    last_hidden: torch.Tensor | None = None
    topk_ids: torch.Tensor | None = None
    topk_logprobs: torch.Tensor | None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Those that are there, by name."""
        return _tensors(self)

    def to(self, device: torch.device | str) -> Batch:
        """The batch with all tensors on ``device``."""
        return self.map(lambda tensor: tensor.to(device))

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """The batch with ``function`` of every tensor in its place."""
        return Batch(**{name: function(tensor) for name, tensor in self.tensors.items()})

    def copy_(self, other: Batch) -> None:
        """Copy the tensors of a batch of the same shapes into these, without waiting for a device where the memory is pinned."""
        for name, tensor in self.tensors.items():
            tensor.copy_(getattr(other, name), non_blocking=True)


def collate(rows: Sequence[Row]) -> Batch:
    """Stack rows of equal shapes, in memory of the same kind. A single row is not copied."""
    tensors = {}
    for name in rows[0].tensors:
        values = [getattr(row, name) for row in rows]
        tensors[name] = values[0].unsqueeze(0) if len(values) == 1 else _stack(values)
    return Batch(**tensors)


def _stack(values: Sequence[torch.Tensor]) -> torch.Tensor:
    first = values[0]
    shape = (len(values), *first.shape)
    return torch.stack(list(values), out=torch.empty(shape, dtype=first.dtype, device=first.device, pin_memory=first.is_pinned()))


def _tensors(item: Row | Batch) -> dict[str, torch.Tensor]:
    return {name: tensor for name in _TENSORS if (tensor := getattr(item, name)) is not None}
