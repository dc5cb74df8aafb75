"""Is the drafted text the target's own? And if a token differs: did the drafter do it, or the last bits of a kernel?

In float32 the answer is a comparison of tokens. In lower precision a target that reads one token and a target that reads a block round
differently, so two texts may part where two tokens are all but equally likely, in any system and without any drafter. How much the target differs
from itself is measured: its own text is scored again, once token by token and once in blocks. A divergence counts against the drafter only where
the target's own gap between the two tokens exceeds that noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from dflash_core.decoding import Verifier


@dataclass(frozen=True)
class Divergence:
    """The first place where a text is not the target's own.

    position: index of the new token
    gap:      logit of the target's token minus that of the other one, as the target sees it token by token; None where one text has ended
    noise:    largest change of the gap between the target's two best tokens over its own text, from token by token to blocks
    """

    position: int
    gap: float | None
    noise: float

    @property
    def beyond_noise(self) -> bool:
        """True if rounding cannot explain it."""
        return self.gap is None or self.gap > self.noise


@torch.inference_mode()
def find_divergence(verifier: Verifier, prompt_ids: Sequence[int], own: Sequence[int], other: Sequence[int], block_size: int) -> Divergence | None:
    """Compare the target's ``own`` greedy text with the ``other`` one; None if they are the same.

    Args:
        verifier: the target, with room for the prompt, a text and a block; its first row is used.
        block_size: width of the passes that verified ``other``.
    """
    position = next((i for i, (a, b) in enumerate(zip_longest(own, other)) if a != b), None)
    if position is None:
        return None
    inside = position < min(len(own), len(other))
    logits_NV = _score(verifier, prompt_ids, own, 1)
    best_N2 = logits_NV.topk(2, dim=-1).indices
    gap = float(logits_NV[position, own[position]] - logits_NV[position, other[position]]) if inside else None
    gaps_N = _gaps(logits_NV, best_N2)
    del logits_NV
    noise = (gaps_N - _gaps(_score(verifier, prompt_ids, own, block_size), best_N2)).abs().max()
    return Divergence(position, gap, float(noise))


def _gaps(logits_NV: Tensor, pairs_N2: Tensor) -> Tensor:
    first_N, second_N = logits_NV.gather(-1, pairs_N2).unbind(-1)
    return first_N - second_N


def _score(verifier: Verifier, prompt_ids: Sequence[int], tokens: Sequence[int], width: int) -> Tensor:
    """Logits [N, V] (float32) that predict each of ``tokens``, the text being read ``width`` tokens a pass."""

    def place(position: int) -> Tensor:
        return torch.tensor([position], device=verifier.device)

    prompt = torch.tensor([list(prompt_ids)], device=verifier.device)
    rows = [verifier.prefill(prompt, place(len(prompt_ids)), place(0)).logits[0].float()]
    for start in range(0, len(tokens) - 1, width):
        piece = tokens[start : min(start + width, len(tokens) - 1)]
        ids = torch.tensor([[*piece, *[0] * (width - len(piece))]], device=verifier.device)  # of one width, for which there is one graph
        rows.append(verifier.step(ids, place(len(prompt_ids) + start)).logits[0, : len(piece)].float())
    return torch.cat(rows)
