"""Attention to a static cache, where every row stands at a position of its own: the launcher of the kernels and their plain twin.

    R rows   A query heads   G key/value heads   S new tokens of a row   C slots of a row   D head size

Token s of row r stands at start_R[r] + s, has been put into that slot, and sees the slots up to its own (of a sliding layer the last ``window`` of
those). What lies in later slots is never looked at.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

_PROGRAMS = 264  # two for each multiprocessor of an H100 or H200: below that, rows are cut up
_MOST_SPLITS = 32


def store(k_RGSD: Tensor, v_RGSD: Tensor, keys_RGCD: Tensor, values_RGCD: Tensor, start_R: Tensor) -> None:
    """Put new keys and values into their slots, in place. What would stand beyond the last slot goes into that one, several perhaps."""
    if k_RGSD.device.type == "cuda":
        launch_store(k_RGSD, v_RGSD, keys_RGCD, values_RGCD, start_R)
    else:
        store_plain(k_RGSD, v_RGSD, keys_RGCD, values_RGCD, start_R)


def attend(
    q_RASD: Tensor, keys_RGCD: Tensor, values_RGCD: Tensor, start_R: Tensor, *,
    scale: float, window: int | None = None, softcap: float | None = None, sinks_A: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention [R, S, A, D] of S tokens of each row to what its slots hold, their own keys included.

    Args:
        window: a token sees itself and the ``window`` - 1 tokens before it; None: all.
        softcap: c of c·tanh(scores / c) (Gemma 2).
        sinks_A: a score of each head that takes part in the softmax and has no value (gpt-oss).
    """
    function = launch_attend if q_RASD.device.type == "cuda" else attend_plain
    return function(q_RASD, keys_RGCD, values_RGCD, start_R, scale=scale, window=window, softcap=softcap, sinks_A=sinks_A)


def store_plain(k_RGSD: Tensor, v_RGSD: Tensor, keys_RGCD: Tensor, values_RGCD: Tensor, start_R: Tensor) -> None:
    """``store`` in plain PyTorch."""
    R, G, S, _D = k_RGSD.shape
    if R == 1 and (start := int(start_R)) + S < keys_RGCD.shape[2]:  # slices are copied to far sooner than indices
        keys_RGCD[:, :, start : start + S], values_RGCD[:, :, start : start + S] = k_RGSD, v_RGSD
        return
    slots_RS = (start_R[:, None] + torch.arange(S, device=start_R.device)).clamp(max=keys_RGCD.shape[2] - 1)
    rows, heads = torch.arange(R, device=start_R.device), torch.arange(G, device=start_R.device)
    index = (rows[:, None, None], heads[None, :, None], slots_RS[:, None, :])
    keys_RGCD[index], values_RGCD[index] = k_RGSD, v_RGSD


def attend_plain(
    q_RASD: Tensor, keys_RGCD: Tensor, values_RGCD: Tensor, start_R: Tensor, *,
    scale: float, window: int | None = None, softcap: float | None = None, sinks_A: Tensor | None = None, live: int | None = None,
) -> Tensor:  # fmt: skip
    """``attend`` in plain PyTorch. ``live``: slots that any row has filled; default: by ``start_R``, read from the device."""
    R, A, S, _D = q_RASD.shape
    G, slots = keys_RGCD.shape[1:3]
    live = min(int(start_R.max()) + S, slots) if live is None else live
    k, v = keys_RGCD[:, :, :live], values_RGCD[:, :, :live]
    # The heads of a group become queries of the one head that they share.
    q = q_RASD.reshape(R, G, -1, q_RASD.shape[-1])
    plain = softcap is None and sinks_A is None
    one = R == 1 and not start_R.is_cuda  # whose place may be asked for
    if plain and one and S == 1 and window is None and live == int(start_R) + 1:
        return functional.scaled_dot_product_attention(q, k, v, scale=scale).reshape(R, A, S, -1).transpose(1, 2)
    seen = _seen_by_one(int(start_R), S, A // G, live, slots, window) if one else _seen(start_R, S, A // G, live, slots, window)
    if plain:
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
    else:
        scores = (q @ k.mT).float() * scale
        scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks_A is not None:
            sinks = sinks_A.float().view(1, G, A // G, 1, 1).expand(R, G, A // G, S, 1).reshape(R, G, -1, 1)
            scores = torch.cat([scores, sinks], dim=-1)
        out = scores.softmax(-1)[..., :live].to(v.dtype) @ v
    return out.reshape(R, A, S, -1).transpose(1, 2)


def _seen(start_R: Tensor, S: int, group: int, live: int, slots: int, window: int | None) -> Tensor:
    """Which of the first ``live`` slots every query of a group of heads sees, bool [R, 1, group * S, live]."""
    position_RS1 = (start_R[:, None] + torch.arange(S, device=start_R.device)).clamp(max=slots - 1)[..., None]
    slot = torch.arange(live, device=start_R.device)
    seen_RSC = slot <= position_RS1
    if window is not None:
        seen_RSC &= slot > position_RS1 - window
    return seen_RSC[:, None].expand(len(start_R), group, S, live).reshape(len(start_R), 1, -1, live)


@functools.lru_cache(maxsize=4)
def _seen_by_one(start: int, S: int, group: int, live: int, slots: int, window: int | None) -> Tensor:
    """``_seen`` of one row on the CPU, made once for all layers of a pass."""
    return _seen(torch.tensor([start]), S, group, live, slots, window)


def launch_store(k_RGSD: Tensor, v_RGSD: Tensor, keys_RGCD: Tensor, values_RGCD: Tensor, start_R: Tensor) -> None:
    """``store`` by the kernel. Keys and values are laid out alike, each head's D numbers side by side."""
    import triton

    from dflash_core.target.static_kernel import store_kernel

    R, G, S, D = k_RGSD.shape
    store_kernel[(R * S,)](
        k_RGSD, v_RGSD, keys_RGCD, values_RGCD, start_R, *k_RGSD.stride()[:3], *v_RGSD.stride()[:3], *keys_RGCD.stride()[:3],
        S, keys_RGCD.shape[2] - 1, G * D, D=D, BLOCK=triton.next_power_of_2(G * D), num_warps=4,
    )  # fmt: skip


def launch_attend(
    q_RASD: Tensor, keys_RGCD: Tensor, values_RGCD: Tensor, start_R: Tensor, *,
    scale: float, window: int | None = None, softcap: float | None = None, sinks_A: Tensor | None = None, splits: int | None = None,
) -> Tensor:  # fmt: skip
    """``attend`` by the kernels. ``splits``: pieces that a row's keys are cut into; default: by how many programs there are without."""
    import triton

    from dflash_core.target.static_kernel import attend_kernel, combine_kernel

    R, A, S, D = q_RASD.shape
    G, C = keys_RGCD.shape[1:3]
    padded = max(16, triton.next_power_of_2(D))
    # Float32 is multiplied without tensor cores, whose operands lie in registers: tiles of 64 queries spill 14 kB a thread, those of 16 nothing.
    M = 16 if q_RASD.dtype == torch.float32 else min(64, max(16, triton.next_power_of_2(S * A // G)))
    tiles = triton.cdiv(S * A // G, M)
    K = 64 if padded <= 128 else 32
    if splits is None:
        splits = min(triton.cdiv(_PROGRAMS, R * G * tiles), _MOST_SPLITS, triton.cdiv(C, K))
    out = q_RASD.new_empty((R, S, A, D))
    parts, states = out, out
    if splits > 1:
        parts = torch.empty((R * G, tiles, splits, M, padded), dtype=torch.float32, device=out.device)
        states = torch.empty((R * G, tiles, splits, 2, M), dtype=torch.float32, device=out.device)
    sinks = out if sinks_A is None else sinks_A
    heads = {"GROUP": A // G, "D": D, "DP": padded, "M": M, "SPLITS": splits, "SINKS": sinks_A is not None}
    attend_kernel[(R * G, tiles, splits)](
        q_RASD, keys_RGCD, values_RGCD, start_R, sinks, out, parts, states, *q_RASD.stride()[:3], *keys_RGCD.stride()[:3], *out.stride()[:3],
        S, G, C, scale, softcap or 1.0, window or 0,
        KEYS=K, WINDOWED=window is not None, CAPPED=softcap is not None, **heads, num_warps=4, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        combine_kernel[(R * G, tiles)](parts, states, sinks, out, *out.stride()[:3], S, G, **heads, num_warps=4)
    return out
