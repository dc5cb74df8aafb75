"""How the next token is chosen, and how drafted tokens are accepted so that the choice stays the target's own.

Shapes: R requests, S positions of a verified block, K = S - 1 drafted tokens, V vocabulary. With K = 0 the two verdicts
below are plain autoregressive decoding, which is why the baseline needs no code of its own.

All is arithmetic on the device, of shapes that no value changes, so that it can be part of a CUDA graph. Whatever is random comes in as uniform
numbers: of a table with a row per request (``uniform_table``), so that a request's draws do not depend on the company it is in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from dflash_core.config_section import COLDEST
from dflash_core.errors import InputError, Problem


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 is greedy. ``top_k`` 0 and ``top_p`` 1 keep the whole vocabulary. Raises ``InputError`` where nothing could be drawn."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        problems = []
        if not (self.temperature == 0.0 or COLDEST <= self.temperature < math.inf):
            problems.append(Problem("temperature", self.temperature, f"is neither 0 nor at least {COLDEST}", "Use 0 for greedy decoding"))
        if not 0.0 < self.top_p <= 1.0:
            problems.append(Problem("top_p", self.top_p, "must be above 0 and at most 1", "Use 1 to keep the whole vocabulary"))
        if self.top_k < 0:
            problems.append(Problem("top_k", self.top_k, "must not be negative", "Use 0 to keep the whole vocabulary"))
        if problems:
            raise InputError("sampling", problems)

    @property
    def greedy(self) -> bool:
        """True if tokens are chosen without any draw."""
        return self.temperature == 0.0


GREEDY = Sampling()


@dataclass(frozen=True)
class Verdict:
    """What verification found: per request (int64 [R]) the drafted tokens kept, 0..K, and the target's own token that follows them."""

    accepted: Tensor
    following: Tensor


def token_probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities (float32, shape of ``logits``) after temperature, then top-k, then top-p over the last axis: the order of Transformers.

    Top-p keeps the most likely tokens until their sum reaches ``top_p``, the one that crosses it included.
    """
    scores = logits.float() / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        kth = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < kth, float("-inf"))
    if sampling.top_p < 1.0:
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)  # probability of all tokens that are more likely
        dropped = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, before >= sampling.top_p)
        scores = scores.masked_fill(dropped, float("-inf"))
    return functional.softmax(scores, dim=-1)


def uniform_table(seeds: Sequence[int], count: int) -> Tensor:
    """Numbers in [0, 1), float32 [R, count] on the CPU: a row is a function of its seed."""
    return torch.from_numpy(np.stack([np.random.Generator(np.random.Philox(seed)).random(count, dtype=np.float32) for seed in seeds]))


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """One index (int64) per row of ``weights`` [..., V], with probability in proportion to it, by a number in [0, 1) of ``uniform`` [...]."""
    sums = weights.cumsum(-1, dtype=torch.float64)  # in float32 the many small weights of a large vocabulary would be rounded away
    return torch.searchsorted(sums, uniform[..., None] * sums[..., -1:], right=True)[..., 0]


def verify_greedy(target_logits_RSV: Tensor, drafted_RK: Tensor, count_R: Tensor) -> Verdict:
    """Keep the longest prefix of the draft that the target would have chosen itself, of which no more than ``count_R`` tokens count."""
    choice_RS = target_logits_RSV.argmax(dim=-1)
    accepted_R = ((choice_RS[:, :-1] == drafted_RK) & _within(drafted_RK, count_R)).long().cumprod(dim=1).sum(dim=1)
    return Verdict(accepted_R, choice_RS.gather(1, accepted_R[:, None])[:, 0])


def verify_sampled(target_RSV: Tensor, draft_RKV: Tensor, drafted_RK: Tensor, count_R: Tensor, uniform_RS: Tensor) -> Verdict:
    """Speculative rejection sampling: the tokens kept and added are distributed exactly as the target's.

    A drafted token x is kept with probability min(1, p(x)/q(x)); the first one refused is replaced by a draw from
    (p - q)+, and after a block kept whole the next token is drawn from p (Leviathan et al. 2023, algorithm 1; Chen et al. 2023).

    Args:
        target_RSV: the target's probabilities p after each position of the block.
        draft_RKV: the drafter's probabilities q that ``drafted_RK`` was drawn from, after the same temperature and filters or any others.
        count_R: drafted tokens that count, int64 [R]; where it is below K the draft ends there.
        uniform_RS: numbers in [0, 1): one per drafted token and one for the token that follows.
    """
    p_RK = target_RSV[:, :-1].gather(-1, drafted_RK[..., None])[..., 0]
    q_RK = draft_RKV.gather(-1, drafted_RK[..., None])[..., 0]
    kept_RK = (uniform_RS[:, :-1] * q_RK < p_RK) & _within(drafted_RK, count_R)
    accepted_R = kept_RK.long().cumprod(dim=1).sum(dim=1)
    rows_R = torch.arange(len(accepted_R), device=accepted_R.device)
    p_RV = target_RSV[rows_R, accepted_R]
    q_RV = functional.pad(draft_RKV, (0, 0, 0, 1))[rows_R, accepted_R]
    q_RV = q_RV * (accepted_R < count_R)[:, None]  # nothing was drafted after the last token: q = 0, the residual is p
    residual_RV = (p_RV - q_RV).clamp_min(0.0)
    empty_R1 = residual_RV.sum(-1, keepdim=True) == 0.0  # p = q up to rounding: p/q was 1, so only rounding refuses a token here
    return Verdict(accepted_R, draw(torch.where(empty_R1, p_RV, residual_RV), uniform_RS[:, -1]))


def _within(drafted_RK: Tensor, count_R: Tensor) -> Tensor:
    return torch.arange(drafted_RK.shape[1], device=count_R.device) < count_R[:, None]
