"""What is known of each row of logits after one pass over it, and how the gradient follows from it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Softmax(NamedTuple):
    """Of C rows of logits. The gradient of a row's loss with respect to its logits, softmax - one-hot, is

        scale * what the pass has left in the row   everywhere but at the label, where it has left 0
        at_label                                    at the label

    so its product with the head is ``scale * (row @ head) + at_label * head[label]``. The label's part never goes through the precision of
    the product: a slot that is nearly certain has a gradient that is a small difference there.

    nll:      [C] -log p(label); 0 for rows without a label
    hit:      [C] bool, the label is the most likely token
    scale:    [C] 1 / sum of the exponentials; 0 or anything finite for rows without a label
    at_label: [C] p(label) - 1, times the slope of the softcap where there is one
    """

    nll: Tensor
    hit: Tensor
    scale: Tensor
    at_label: Tensor

    @classmethod
    def empty(cls, labels_C: Tensor, dtype: torch.dtype = torch.float32) -> Softmax:
        """Room for rows of ``labels_C``, on its device."""
        nll, scale, at_label = (torch.empty(labels_C.shape, dtype=dtype, device=labels_C.device) for _ in range(3))
        return cls(nll, torch.empty_like(labels_C, dtype=torch.bool), scale, at_label)

    def rows(self, part: slice) -> Softmax:
        """Views of some rows."""
        return Softmax(*(values[part] for values in self))
