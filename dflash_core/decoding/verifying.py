"""The target's side of decoding: it reads the next tokens of every request of a batch, each from its own position on.

Reading at a position forgets what was read at it and behind it before, so what verification refuses needs no more than to be read over.

Shapes: R requests, T tokens, F tapped features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from dflash_core.target import TargetModel, TargetOutput


class Verifier(Protocol):
    """A target with the cache of a batch: a ``StaticTarget``, or what stands in for it."""

    graphs: bool

    @property
    def device(self) -> torch.device:
        """Where everything is."""
        ...

    def prefill(self, ids_RT: Tensor, lengths_R: Tensor, rows_R: Tensor, tap_layers: Sequence[int] | None = None) -> TargetOutput:
        """Read prompts, shorter ones padded on the right: logits [R, 1, V] after each, and features [R, T, F]."""
        ...

    def forward(self, ids_RT: Tensor, start_R: Tensor, tap_layers: Sequence[int] | None = None) -> TargetOutput:
        """Read T tokens of each row at the positions from ``start_R`` on: logits [R, T, V] and features [R, T, F]."""
        ...

    def step(self, ids_RT: Tensor, start_R: Tensor, tap_layers: Sequence[int] | None = None) -> TargetOutput:
        """``forward`` as a graph of its own, if ``graphs``: the same tensors each time for inputs of the same shape."""
        ...

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """What runs ``function`` again, at once: a CUDA graph if ``graphs``."""
        ...


class GrowingTarget:
    """One request on a CPU, and a cache that grows with it: ready at once, and for targets whose layers a ``StaticTarget`` does not know."""

    graphs = False

    def __init__(self, target: TargetModel):
        self._target = target
        self._cache: Any = target.new_cache()  # refuses here what cannot be decoded

    @property
    def device(self) -> torch.device:
        """See ``Verifier``."""
        return self._target.device

    def prefill(self, ids_RT: Tensor, lengths_R: Tensor, rows_R: Tensor, tap_layers: Sequence[int] | None = None) -> TargetOutput:
        """See ``Verifier``."""
        self._cache = self._target.new_cache()
        return self._target.forward(ids_RT, self._cache, tap_layers=tap_layers, logits_to_keep=1)

    def forward(self, ids_RT: Tensor, start_R: Tensor, tap_layers: Sequence[int] | None = None) -> TargetOutput:
        """See ``Verifier``. Tokens behind the target's last position are not read: zeros come out."""
        start = int(start_R)
        self._target.crop_cache(self._cache, start)
        missing = max(0, start + ids_RT.shape[1] - self._target.info.max_position_embeddings)
        output = self._target.forward(ids_RT[:, : ids_RT.shape[1] - missing], self._cache, tap_layers=tap_layers)
        if not missing:
            return output
        features = None if output.features is None else functional.pad(output.features, (0, 0, 0, missing))
        return type(output)(functional.pad(output.logits, (0, 0, 0, missing)), features)

    step = forward

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """See ``Verifier``."""
        return function
