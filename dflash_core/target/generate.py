"""Batched generation with the target: greedy or sampled, left-padded, with a full attention mask.

A prompt's randomness is its own: every prompt has a seed, its numbers are drawn before the first step, and one number picks
one token by the inverse of the cumulative distribution. So neither the order nor the company of a prompt changes its draws.

Shapes: B prompts of a batch, R rows still in it, T width of the padded prompts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from dflash_core.config import GenerationConfig
from dflash_core.data.types import Response
from dflash_core.errors import TargetError
from dflash_core.stages import Progress

if TYPE_CHECKING:
    from dflash_core.target.model import TargetModel


def generate(
    target: TargetModel,
    prompts: Sequence[Sequence[int]],
    settings: GenerationConfig,
    seeds: Sequence[int],
    stop_ids: frozenset[int],
    progress: Progress,
) -> list[Response]:
    """One response per prompt, in order. Batches are prompts of like length, so little is padded."""
    empty = [index for index, prompt in enumerate(prompts) if not prompt]
    if empty:
        raise TargetError(f"prompt {empty[0]} of {len(prompts)} has no tokens. Leave it out, or render it with a chat template.")
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    tokens: dict[int, list[int]] = {}
    for start in range(0, len(order), settings.batch_size):
        batch = order[start : start + settings.batch_size]
        answers = _generate_batch(target, [prompts[index] for index in batch], settings, [seeds[index] for index in batch], stop_ids)
        tokens.update(zip(batch, answers, strict=True))
        progress(len(tokens), len(prompts), "responses")
    return [Response(tuple(tokens[index]), "stop" if tokens[index][-1] in stop_ids else "length") for index in range(len(prompts))]


def _generate_batch(
    target: TargetModel, prompts: Sequence[Sequence[int]], settings: GenerationConfig, seeds: Sequence[int], stop_ids: frozenset[int]
) -> list[list[int]]:
    ids_BT, mask = _left_pad(prompts, settings.max_new_tokens, target.info.pad_token_id or 0)
    ids_BT, mask = ids_BT.to(target.device), mask.to(target.device)
    width = ids_BT.shape[1]
    uniforms = _uniforms(seeds, settings).to(target.device)
    cache = target.new_cache()
    logits_RV = target.forward(ids_BT, cache, attention_mask=mask[:, :width], logits_to_keep=1).logits[:, -1]
    answers: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))  # the prompt of each row
    open_rows = set(rows)
    for step in range(settings.max_new_tokens):
        next_R = pick_tokens(logits_RV, settings, uniforms[:, step])
        for prompt, token in zip(rows, next_R.tolist(), strict=True):
            if prompt in open_rows:
                answers[prompt].append(token)
                if token in stop_ids:
                    open_rows.discard(prompt)
        if not open_rows or step + 1 == settings.max_new_tokens:
            break
        if 2 * len(open_rows) <= len(rows):  # drop finished rows; each time at least half, so copies of the cache stay few
            keep = torch.tensor([row for row, prompt in enumerate(rows) if prompt in open_rows], device=target.device)
            cache.batch_select_indices(keep)
            next_R, mask, uniforms = next_R[keep], mask[keep], uniforms[keep]
            rows = [prompt for prompt in rows if prompt in open_rows]
        logits_RV = target.forward(next_R[:, None], cache, attention_mask=mask[:, : width + step + 1]).logits[:, -1]
    return answers


def pick_tokens(logits_RV: torch.Tensor, settings: GenerationConfig, uniforms_R: torch.Tensor) -> torch.Tensor:
    """Next token ids [R]: the likeliest at temperature 0, else drawn with one uniform number in [0, 1) per row.

    Temperature first, then top_k, then top_p of what is left, as servers do it. Ties of greedy decoding go to the lowest id.
    """
    if settings.temperature == 0.0:
        return logits_RV.argmax(-1)
    logits_RV = logits_RV.float() / settings.temperature
    ids_RV = None
    if 0 < settings.top_k < logits_RV.shape[-1]:
        logits_RV, ids_RV = logits_RV.topk(settings.top_k, dim=-1)
    elif settings.top_p < 1.0:
        logits_RV, ids_RV = logits_RV.sort(dim=-1, descending=True, stable=True)
    cumulative_RV = logits_RV.softmax(-1, dtype=torch.float64).cumsum(-1)
    # The nucleus is the shortest head of the sorted distribution that reaches top_p: it ends with the token that gets there.
    last_R1 = (cumulative_RV < settings.top_p).sum(-1, keepdim=True).clamp(max=logits_RV.shape[-1] - 1) if settings.top_p < 1.0 else None
    total_R1 = cumulative_RV[:, -1:] if last_R1 is None else cumulative_RV.gather(-1, last_R1)
    picked_R1 = torch.searchsorted(cumulative_RV, uniforms_R[:, None] * total_R1, right=True)
    picked_R1 = picked_R1.clamp(max=logits_RV.shape[-1] - 1) if last_R1 is None else torch.minimum(picked_R1, last_R1)
    return (picked_R1 if ids_RV is None else ids_RV.gather(-1, picked_R1)).squeeze(-1)


def _left_pad(prompts: Sequence[Sequence[int]], room: int, pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [B, T] with padding on the left, and the attention mask [B, T + room] with ones for tokens to come."""
    width = max(map(len, prompts))
    ids_BT = torch.full((len(prompts), width), pad, dtype=torch.int64)
    mask = torch.ones((len(prompts), width + room), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids_BT[row, width - len(prompt) :] = torch.tensor(list(prompt), dtype=torch.int64)
        mask[row, : width - len(prompt)] = 0
    return ids_BT, mask


def _uniforms(seeds: Sequence[int], settings: GenerationConfig) -> torch.Tensor:
    """One number in [0, 1) per prompt and step, float64 [B, max_new_tokens]; unused zeros when decoding is greedy."""
    if settings.temperature == 0.0:
        return torch.zeros((len(seeds), settings.max_new_tokens), dtype=torch.float64)
    return torch.from_numpy(np.stack([np.random.Generator(np.random.Philox(seed)).random(settings.max_new_tokens) for seed in seeds]))
