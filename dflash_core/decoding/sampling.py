"""How the next token is chosen, and how drafted tokens are accepted so that the choice stays the target's own.

Shapes: B requests, S positions of a verified block, K = S - 1 drafted tokens, V vocabulary. With K = 0 the two verdicts
below are plain autoregressive decoding, which is why the baseline needs no code of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 is greedy. ``top_k`` 0 and ``top_p`` 1 keep the whole vocabulary."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    @property
    def greedy(self) -> bool:
        """True if tokens are chosen without any draw."""
        return self.temperature == 0.0


@dataclass(frozen=True)
class Verdict:
    """What verification found: per request (int64 [B]) the drafted tokens kept, 0..K, and the target's own token that follows them."""

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


def draw(weights: Tensor, generator: torch.Generator) -> Tensor:
    """One index (int64) per row of ``weights`` [..., V], with probability in proportion to it."""
    flat = weights.reshape(-1, weights.shape[-1])
    return torch.multinomial(flat, 1, generator=generator).view(weights.shape[:-1])


def verify_greedy(target_logits_BSV: Tensor, drafted_BK: Tensor) -> Verdict:
    """Keep the longest prefix of the draft that the target would have chosen itself."""
    choice_BS = target_logits_BSV.argmax(dim=-1)
    accepted_B = (choice_BS[:, :-1] == drafted_BK).long().cumprod(dim=1).sum(dim=1)
    return Verdict(accepted_B, choice_BS.gather(1, accepted_B[:, None])[:, 0])


def verify_sampled(target_BSV: Tensor, draft_BKV: Tensor, drafted_BK: Tensor, generator: torch.Generator) -> Verdict:
    """Speculative rejection sampling: the tokens kept and added are distributed exactly as the target's.

    A drafted token x is kept with probability min(1, p(x)/q(x)); the first one refused is replaced by a draw from
    (p - q)+, and after a block kept whole the next token is drawn from p (Leviathan et al. 2023, algorithm 1; Chen et al. 2023).

    Args:
        target_BSV: the target's probabilities p after each position of the block.
        draft_BKV: the drafter's probabilities q that ``drafted_BK`` was drawn from, after the same temperature and filters or any others.
    """
    p_BK = target_BSV[:, :-1].gather(-1, drafted_BK[..., None])[..., 0]
    q_BK = draft_BKV.gather(-1, drafted_BK[..., None])[..., 0]
    uniform_BK = torch.rand(p_BK.shape, generator=generator, device=p_BK.device)
    accepted_B = (uniform_BK * q_BK < p_BK).long().cumprod(dim=1).sum(dim=1)
    rows = torch.arange(len(accepted_B), device=accepted_B.device)
    p_BV = target_BSV[rows, accepted_B]
    q_BV = functional.pad(draft_BKV, (0, 0, 0, 1))[rows, accepted_B]  # nothing was drafted after the last token: q = 0, the residual is p
    residual_BV = (p_BV - q_BV).clamp_min(0.0)
    empty = residual_BV.sum(-1, keepdim=True) == 0.0  # p = q up to rounding: p/q was 1, so only rounding refuses a token here
    return Verdict(accepted_B, draw(torch.where(empty, p_BV, residual_BV), generator))
