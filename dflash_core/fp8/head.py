"""The target's frozen head in fp8, for the chunked cross-entropy.

The head is cast once. A chunk's logits come from the hidden states in e4m3; on the way back the gradient of the logits is softmax - one-hot, of which
the softmax is cast to e5m2 with a constant scale (it lies between 0 and 1), and the one-hot never becomes a number: its product is a row of the head.
So the largest part of the gradient of a slot that is wrong is not rounded more than bfloat16 rounds it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_core.fp8.cast import E4M3, E5M2, cast, product

SOFTMAX_SCALE = 2.0**-15
"""The softmax is stored divided by this: 1 becomes 32,768, of 57,344, and what is lost is below 1e-9."""


class Fp8Head:
    """``weight_VH`` and its cast. V vocabulary, H hidden, C slots of a chunk."""

    def __init__(self, weight_VH: Tensor):
        self.weight_VH = weight_VH
        self._cast = cast(weight_VH, E4M3)
        self._softmax_scale = torch.full((), SOFTMAX_SCALE, dtype=torch.float32, device=weight_VH.device)

    def logits(self, hidden_CH: Tensor, out: Tensor) -> Tensor:
        """[C, V] into ``out``, in bfloat16."""
        hidden = cast(hidden_CH, E4M3)
        return product(hidden.values, hidden.scale, self._cast.values, self._cast.scale, exact=False, out=out)

    def softmax_buffer(self, slots: int) -> Tensor:
        """[slots, V] for a chunk's softmax, divided by ``SOFTMAX_SCALE``."""
        return torch.empty((slots, self.weight_VH.shape[0]), dtype=E5M2, device=self.weight_VH.device)

    def pull_back(self, softmax_CV: Tensor, out: Tensor) -> Tensor:
        """``softmax @ head`` [C, H] into ``out``."""
        return product(softmax_CV, self._softmax_scale, self._cast.transposed, self._cast.scale, exact=True, out=out)
