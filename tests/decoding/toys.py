"""Toy targets and proposers small enough to know every probability, and the chi-square test."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def chi_square_fits(tokens: Tensor, probabilities_V: Tensor, level: float = 1e-4) -> bool:
    """False if ``tokens`` would be drawn from ``probabilities_V`` this badly or worse with a chance below ``level``."""
    counts = torch.bincount(tokens.flatten(), minlength=len(probabilities_V)).double()
    expected = probabilities_V.double() * tokens.numel()
    possible = expected > 0
    if bool(counts[~possible].sum() > 0):
        return False
    statistic = ((counts - expected).square() / expected)[possible].sum()
    freedom = torch.tensor((int(possible.sum()) - 1) / 2, dtype=torch.float64)
    return bool(torch.special.gammaincc(freedom, statistic / 2) > level)


@dataclass
class Output:
    logits: Tensor
    features: Tensor | None


class MarkovTarget:
    """A target whose next-token logits depend on the last two tokens; its cache is the list of tokens it has read.

    Features are the tokens themselves, so that a proposer can check what it is given.
    """

    def __init__(self, logits_VVV: Tensor, max_position_embeddings: int = 1000):
        self.logits_VVV = logits_VVV
        self.device = torch.device("cpu")
        self.info = SimpleNamespace(max_position_embeddings=max_position_embeddings, eos_token_ids=())
        self.fed: list[list[int]] = []
        self.longest = 0

    def new_cache(self) -> list[int]:
        return []

    def crop_cache(self, cache: list[int], length: int) -> None:
        assert length <= len(cache)
        del cache[length:]

    def forward(self, ids_BT: Tensor, cache: list[int], *, tap_layers: Any = None, logits_to_keep: int = 0) -> Output:
        fresh = ids_BT[0].tolist()
        self.fed.append(fresh)
        rows = []
        for token in fresh:
            before = cache[-1] if cache else 0
            cache.append(token)
            rows.append(self.logits_VVV[before, token])
        self.longest = max(self.longest, len(cache))
        features = ids_BT[..., None].float() if tap_layers is not None else None
        return Output(torch.stack(rows)[None, -logits_to_keep:], features)

    def next_probabilities(self, context: list[int]) -> Tensor:
        return self.logits_VVV[context[-2] if len(context) > 1 else 0, context[-1]].softmax(-1)


class SequenceProposer:
    """Drafts from a known continuation, ``right`` tokens of each block correctly and the others wrongly; 'right = None' makes it an oracle."""

    tap_layers = (0,)

    def __init__(self, sequence: list[int], vocabulary: int, right: int | None = None):
        self.sequence, self.vocabulary, self.right = sequence, vocabulary, right
        self.committed: list[int] = []

    def propose(self, features_BTF: Tensor, last_B: Tensor, anchor: int, count: int) -> Tensor:
        self.committed += features_BTF[0, :, 0].long().tolist()
        assert len(self.committed) == anchor, "the features of every committed position, once each"
        known = [*self.sequence, *([0] * count)][anchor + 1 : anchor + 1 + count]
        right = count if self.right is None else self.right
        tokens = torch.tensor([token if slot < right else (token + 1) % self.vocabulary for slot, token in enumerate(known)])
        return torch.nn.functional.one_hot(tokens, self.vocabulary).float()[None] * 50.0


class RandomProposer:
    """Drafts with fixed logits per slot, whatever came before."""

    tap_layers = (0,)

    def __init__(self, logits_KV: Tensor):
        self.logits_KV = logits_KV

    def propose(self, features_BTF: Tensor, last_B: Tensor, anchor: int, count: int) -> Tensor:
        return self.logits_KV[None, :count]
