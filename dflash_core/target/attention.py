"""Attention within each of several documents that lie side by side in one row.

On CUDA it is torch's flash attention for variable lengths, which skips what is not seen and makes no mask; elsewhere, and where the model caps its
logits, documents are attended one after the other.

Shapes: T tokens of all documents, t of one, Q query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional


@dataclass(frozen=True)
class Documents:
    """Some documents in one row.

    ids, positions: [1, T] int64
    ends:           [documents + 1] int32, 0 and where each document ends
    lengths:        tokens of each
    """

    ids: torch.Tensor
    positions: torch.Tensor
    ends: torch.Tensor
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, documents: Sequence[torch.Tensor], device: torch.device) -> Documents:
        """Lay out documents [t] of integers on the CPU, and send them to ``device`` without waiting for it."""
        lengths = tuple(len(ids) for ids in documents)
        values = {
            "ids": torch.cat([ids.long() for ids in documents])[None],
            "positions": torch.cat([torch.arange(length) for length in lengths])[None],
            "ends": torch.tensor([0, *lengths]).cumsum(0).int(),
        }
        if device.type == "cuda":  # from other memory than pinned a copy waits for all that the device has still to do
            values = {name: value.pin_memory().to(device, non_blocking=True) for name, value in values.items()}
        return cls(**values, lengths=lengths)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    documents: Documents,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    told: dict[str, Any] | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each document, as Transformers calls it: query [1, Q, T, D], key and value [1, K, T, D] → [1, T, Q, D].

    Args:
        sliding_window: a token sees itself and ``sliding_window - 1`` tokens before it.
        softcap: c of c·tanh(logits / c).
        s_aux: [Q] logits of sinks, which take part in the softmax and have no value (gpt-oss).
        told: filled with the four above, for whoever wants to know what a module passes.
    """
    if told is not None:
        told.update(scaling=scaling, sliding_window=sliding_window, softcap=softcap, s_aux=s_aux)
    window = sliding_window if sliding_window is not None and sliding_window < max(documents.lengths) else None
    if _flash_takes(query, softcap):
        return _flash(query, key, value, documents, scaling, window, s_aux)[None], None
    parts = zip(*(x.split(documents.lengths, dim=2) for x in (query, key, value)), strict=True)
    if softcap is None and s_aux is None:
        outputs = [_one_document(q, k, v, scaling, window) for q, k, v in parts]
    else:
        outputs = [_by_hand(q, k, v, scaling, window, softcap, s_aux) for q, k, v in parts]
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _flash_takes(query: torch.Tensor, softcap: float | None) -> bool:
    size = query.shape[-1]
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and size <= 256 and size % 8 == 0 and softcap is None


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents, scaling: float | None, window: int | None, s_aux: Any
) -> torch.Tensor:
    longest = max(documents.lengths)
    output_TQD, logsumexp_QT, *_ = torch.ops.aten._flash_attention_forward(
        *(x[0].transpose(0, 1) for x in (query, key, value)), documents.ends, documents.ends, longest, longest, 0.0, True, False,
        scale=scaling, window_size_left=None if window is None else window - 1, window_size_right=None if window is None else 0,
    )  # fmt: skip
    if s_aux is not None:  # the softmax with the sink is that without it, times the share that the sink leaves
        output_TQD = output_TQD * torch.sigmoid(logsumexp_QT.T - s_aux.float()).unsqueeze(-1).to(output_TQD.dtype)
    return output_TQD


def _one_document(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None, window: int | None) -> torch.Tensor:
    if window is None or window >= q.shape[2]:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=_seen(q.shape[2], window, q.device), scale=scaling, enable_gqa=True)


def _by_hand(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None, window: int | None, softcap: float | None, s_aux: torch.Tensor | None
) -> torch.Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    logits = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    logits = logits.masked_fill(~_seen(q.shape[2], window, q.device), float("-inf"))
    if s_aux is not None:
        logits = torch.cat([logits, s_aux.to(logits.dtype)[None, :, None, None].expand(*logits.shape[:3], 1)], dim=-1)
    weights = torch.softmax(logits, dim=-1, dtype=torch.float32)[..., : k.shape[2]]
    return weights.to(v.dtype) @ v


def _seen(tokens: int, window: int | None, device: torch.device) -> torch.Tensor:
    """What each token sees of its document, [t, t] bool."""
    seen = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()
    return seen if window is None else seen.triu(1 - window)
