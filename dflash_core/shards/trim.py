"""Which rows of a sample training uses: what a trimmed dataset stores, and what the rows of training hold.

    features                 the tokens that some block sees as context, wherever its anchor is drawn: ``seen``
    what the target says     the tokens at which it says a token that some slot is to predict: ``taught``

So of a long prompt before a short answer little is left, where all draft layers have a sliding window. Without one only the end of a sample goes.

Shapes: t tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from dflash_core.drafter import seen_context, valid_anchors

if TYPE_CHECKING:
    from dflash_core.data import SampleTable

SEEN, TAUGHT = "seen", "taught"
_AT_ONCE = 1024  # samples


def used_rows(samples: SampleTable, members: Sequence[int], window: int) -> dict[str, list[torch.Tensor]]:
    """``seen`` and ``taught`` of some samples, bool [t] each. ``window`` is that of a drafter whose layers all have one, else 0."""
    masks = [torch.from_numpy(np.array(samples.loss_mask(i), dtype=np.bool_)) for i in members]
    lengths = [len(mask) for mask in masks]
    mask_T, document_ids_T = torch.cat(masks), torch.arange(len(masks)).repeat_interleave(torch.tensor(lengths))
    # a slot's label is supervised, as is all before it from its anchor on, so the token where the target says the label could be an anchor itself
    used = {SEEN: seen_context(mask_T, document_ids_T, window), TAUGHT: valid_anchors(mask_T, document_ids_T)}
    return {name: list(rows_T.split(lengths)) for name, rows_T in used.items()}


def count_used(samples: SampleTable, window: int) -> dict[str, int]:
    """How many tokens of all samples ``seen`` and ``taught`` are."""
    total = {SEEN: 0, TAUGHT: 0}
    for first in range(0, len(samples), _AT_ONCE):
        used = used_rows(samples, range(first, min(first + _AT_ONCE, len(samples))), window)
        total = {name: count + int(torch.cat(used[name]).sum()) for name, count in total.items()}
    return total


def runs(mask: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Where True stands in a row in ``mask``, [t]: (first, one after the last) of each run, ascending."""
    edges = np.flatnonzero(np.concatenate([mask[:1], mask[1:] != mask[:-1], mask[-1:]]))
    return [(first, after) for first, after in edges.reshape(-1, 2).tolist()]


def kept(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The rows of ``values`` [t, …] where ``mask`` [t] is True; a view where they are one run."""
    pieces = [values[first:after] for first, after in runs(mask.numpy())]
    return pieces[0] if len(pieces) == 1 else torch.cat([values[:0], *pieces])
