"""Toy targets and proposers small enough to know every probability, and the chi-square test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dflash_core.decoding import GREEDY, Decoder, Generation, Proposer, Sampling


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
    """A target whose next-token logits depend on the last two tokens, and its own verifier: its cache is what it has read, a row a request.

    Features are the tokens themselves, so that a proposer can check what it is given.
    """

    graphs = False
    device = torch.device("cpu")

    def __init__(self, logits_VVV: Tensor, max_position_embeddings: int = 1000):
        self.logits_VVV = logits_VVV
        sizes = {"max_position_embeddings": max_position_embeddings, "vocab_size": len(logits_VVV)}
        self.info = SimpleNamespace(name="markov", **sizes, eos_token_ids=(), pad_token_id=None)
        self.passes = 0

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        return function

    def prefill(self, ids_RT: Tensor, lengths_R: Tensor, rows_R: Tensor, tap_layers: Any = None) -> Output:
        R, T = ids_RT.shape
        self.read_RX = torch.full((R, max(T, self.info.max_position_embeddings) + 64), -1)
        output = self.forward(ids_RT, torch.zeros_like(lengths_R), tap_layers)
        return Output(output.logits[torch.arange(R), lengths_R - 1][:, None], output.features)

    def forward(self, ids_RT: Tensor, start_R: Tensor, tap_layers: Any = None) -> Output:
        self.passes += 1
        places_RT = start_R[:, None] + torch.arange(ids_RT.shape[1])
        self.read_RX.scatter_(1, places_RT, ids_RT)
        before_RT = torch.where(places_RT > 0, self.read_RX.gather(1, (places_RT - 1).clamp(min=0)), 0)
        features = ids_RT[..., None].float() if tap_layers is not None else None
        return Output(self.logits_VVV[before_RT, ids_RT], features)

    step = forward

    def greedy_text(self, context: Sequence[int], new: int, stop: Sequence[int] = ()) -> list[int]:
        """The chain of likeliest tokens after ``context``, up to the first stop token."""
        choices, text = self.logits_VVV.argmax(-1).tolist(), list(context)
        while len(text) < len(context) + new and (len(text) == len(context) or text[-1] not in stop):
            text.append(choices[text[-2] if len(text) > 1 else 0][text[-1]])
        return text[len(context) :]

    def next_probabilities(self, context: list[int]) -> Tensor:
        return self.logits_VVV[context[-2] if len(context) > 1 else 0, context[-1]].softmax(-1)


def decode(
    target: MarkovTarget, proposer: Proposer | None, prompts: Sequence[Sequence[int]], new: int, block: int = 4, stop: tuple[int, ...] = (),
    sampling: Sampling = GREEDY, seeds: Sequence[int] | None = None, rows: int | None = None,
) -> list[Generation]:  # fmt: skip
    """All prompts as one batch."""
    decoder = Decoder(
        target.info, target, proposer,  # type: ignore[arg-type]
        rows=rows or len(prompts), capacity=2000, max_new_tokens=new, block_size=block if proposer else 1, stop_ids=stop, sampling=sampling,
    )  # fmt: skip
    return decoder.generate(prompts, seeds)


class SequenceProposer:
    """Drafts from known continuations, ``right`` tokens of each block correctly and the others wrongly; 'right = None' makes it an oracle."""

    tap_layers = (0,)

    def __init__(self, sequences: Sequence[Sequence[int]], vocabulary: int, count: int, right: int | None = None):
        self.known_RX = torch.zeros(len(sequences), max(map(len, sequences)) + 100, dtype=torch.int64)
        for row, sequence in enumerate(sequences):
            self.known_RX[row, : len(sequence)] = torch.tensor(sequence)
        self.vocabulary, self.count, self.right = vocabulary, count, count if right is None else right
        self.read_RX = torch.full_like(self.known_RX, -1)

    def read(self, features_RTF: Tensor, start_R: Tensor) -> None:
        self.read_RX.scatter_(1, start_R[:, None] + torch.arange(features_RTF.shape[1]), features_RTF[..., 0].long())

    def propose(self, last_R: Tensor, anchor_R: Tensor) -> Tensor:
        slots_K = torch.arange(self.count)
        before_RX = torch.arange(self.known_RX.shape[1]) < anchor_R[:, None]
        assert bool((self.read_RX[before_RX] == self.known_RX[before_RX]).all()), "the features of every committed position are there"
        known_RK = self.known_RX.gather(1, anchor_R[:, None] + 1 + slots_K)
        tokens_RK = torch.where(slots_K < self.right, known_RK, (known_RK + 1) % self.vocabulary)
        return torch.nn.functional.one_hot(tokens_RK, self.vocabulary).float() * 50.0


class RandomProposer:
    """Drafts with fixed logits per slot, whatever came before."""

    tap_layers = (0,)

    def __init__(self, logits_KV: Tensor):
        self.logits_KV = logits_KV

    def read(self, features_RTF: Tensor, start_R: Tensor) -> None:
        pass

    def propose(self, last_R: Tensor, anchor_R: Tensor) -> Tensor:
        return self.logits_KV.expand(len(last_R), *self.logits_KV.shape)
