"""One layer of the drafter: grouped-query attention from the block to the context and to the block itself, then SwiGLU, with Qwen3's norms.

    B rows   T context tokens   Q = N * S draft positions   X = T + Q   H hidden   A attention heads   G key/value heads   D head size

Parameter names are those that every serving runtime expects.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask

from dflash_core.drafter.attention import IntervalMask, block_attention
from dflash_core.drafter.config import DFlashConfig
from dflash_core.drafter.flex import flex
from dflash_core.drafter.masks import LayerMasks
from dflash_core.fp8 import fp8_linears

DENSE_GROUP = 128  # draft positions that share one call of dense attention; measured on CPU: 64 and 256 are slower
KeysValues = tuple[Tensor, Tensor]
Rotation = tuple[Tensor, Tensor]
Mask = Tensor | BlockMask | IntervalMask
Masks = Mask | LayerMasks[Mask]


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in float32 whatever the input."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Products(nn.Module):
    """A part of a layer whose products may be in fp8."""

    def __init__(self) -> None:
        super().__init__()
        self.fp8 = False

    def products(self, x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
        """What each of the linear layers makes of ``x``."""
        return fp8_linears(x, *(linear.weight for linear in linears)) if self.fp8 else tuple(linear(x) for linear in linears)

    def joint_products(self, x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
        """``products`` by one product with all weights in training, where the gradient of ``x`` is one product then, instead of a sum of several.

        Copying the weights together costs less than that sum where they are small beside ``x`` (benchmarks/RESULTS.md).
        """
        if self.fp8 or not torch.is_grad_enabled():
            return self.products(x, *linears)
        joint = functional.linear(x, torch.cat([linear.weight for linear in linears]))
        return joint.split([linear.out_features for linear in linears], dim=-1)


class Attention(Products):
    """Grouped-query attention from the block to the context and to the block itself."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        H, self.head_dim = config.hidden_size, config.head_dim
        q, kv = config.num_heads * self.head_dim, config.num_kv_heads * self.head_dim
        self.enable_gqa = config.num_heads != config.num_kv_heads
        self.group = max(1, DENSE_GROUP // config.block_size) * config.block_size
        self.q_proj = nn.Linear(H, q, bias=False)
        self.k_proj = nn.Linear(H, kv, bias=False)
        self.v_proj = nn.Linear(H, kv, bias=False)
        self.o_proj = nn.Linear(q, H, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def queries_keys_values(self, x_BQH: Tensor, rotation: Rotation) -> tuple[Tensor, KeysValues]:
        """[B, Q, A, D], and two of [B, Q, G, D]."""
        q, k, v = self._normed(self.joint_products(x_BQH, self.q_proj, self.k_proj, self.v_proj))
        return rotate(q, rotation), (rotate(k, rotation), v)

    def unrotated(self, x_XH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [..., A, D], keys and values [..., G, D] without their positions, of few rows: beside those the weights are large."""
        return self._normed(self.products(x_XH, self.q_proj, self.k_proj, self.v_proj))

    def _normed(self, products: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self._heads(x) for x in products)
        return self.q_norm(q), self.k_norm(k), v

    def keys_values(self, x_BXH: Tensor, rotation: Rotation) -> KeysValues:
        """Two of [B, X, G, D]."""
        k, v = self.products(x_BXH, self.k_proj, self.v_proj)
        return self.of_products(k, v, rotation)

    def of_products(self, k_BXK: Tensor, v_BXK: Tensor, rotation: Rotation) -> KeysValues:
        """``keys_values`` of what ``k_proj`` and ``v_proj`` have made, [B, X, G * D]."""
        return rotate(self.k_norm(self._heads(k_BXK)), rotation), self._heads(v_BXK)

    def attend(self, q_BQAD: Tensor, context: KeysValues, block: KeysValues, mask: Mask) -> Tensor:
        """[B, Q, A, D], under one of the three forms of the mask."""
        if isinstance(mask, IntervalMask):
            return block_attention(q_BQAD, *context, *block, mask)
        q_BAQD = q_BQAD.transpose(1, 2)
        k_BGXD, v_BGXD = (torch.cat(pair, dim=1).transpose(1, 2) for pair in zip(context, block, strict=True))
        out_BAQD = flex(q_BAQD, k_BGXD, v_BGXD, mask) if isinstance(mask, BlockMask) else self._dense(q_BAQD, k_BGXD, v_BGXD, mask)
        return out_BAQD.transpose(1, 2)

    def _dense(self, q_BAQD: Tensor, k_BGXD: Tensor, v_BGXD: Tensor, mask: Tensor) -> Tensor:
        """SDPA for one group of whole blocks after the other: blocks never see each other, so a group needs the context and its own keys only.

        At T = Q = 1024 this is a third less work than Q x (T + Q), and SDPA takes it without repeating the key/value heads.
        """
        Q = q_BAQD.shape[2]
        T = k_BGXD.shape[2] - Q
        outs = []
        for start in range(0, Q, self.group):
            end = min(start + self.group, Q)
            k, v = (torch.cat([x[:, :, :T], x[:, :, T + start : T + end]], dim=2) for x in (k_BGXD, v_BGXD))
            seen = torch.cat([mask[:, :, start:end, :T], mask[:, :, start:end, T + start : T + end]], dim=3)
            outs.append(functional.scaled_dot_product_attention(q_BAQD[:, :, start:end], k, v, attn_mask=seen, enable_gqa=self.enable_gqa))
        return torch.cat(outs, dim=2)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class MLP(Products):
    """SwiGLU."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.products(x, self.gate_proj, self.up_proj)
        return self.products(functional.silu(gate) * up, self.down_proj)[0]


class DraftLayer(nn.Module):
    """One layer of the block stream."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def queries_keys_values(self, x_BQH: Tensor, rotation: Rotation) -> tuple[Tensor, KeysValues]:
        """[B, Q, A, D], and two of [B, Q, G, D]."""
        return self.self_attn.queries_keys_values(self.input_layernorm(x_BQH), rotation)

    def first_queries_keys_values(
        self, anchors_BNH: Tensor, mask_H: Tensor, rotation: Rotation, block_size: int
    ) -> tuple[Tensor, KeysValues]:  # fmt: skip
        """``queries_keys_values`` of blocks that hold an anchor's token and mask tokens, which differ by their positions alone."""
        (B, N, H), attention = anchors_BNH.shape, self.self_attn
        copies = 16 - B * N % 16 if attention.fp8 else 1  # products in fp8 want multiples of 16 rows
        distinct = self.input_layernorm(torch.cat([anchors_BNH.flatten(0, 1), mask_H.expand(copies, H)]))
        q, k, v = attention.unrotated(distinct)

        def blocks(x_RAD: Tensor) -> Tensor:
            anchors, masks = x_RAD[: B * N].unflatten(0, (B, N, 1)), x_RAD[B * N].expand(B, N, block_size - 1, *x_RAD.shape[1:])
            return torch.cat([anchors, masks], dim=2).flatten(1, 2)

        return rotate(blocks(q), rotation), (rotate(blocks(k), rotation), blocks(v))

    def finish(self, x_BQH: Tensor, attended_BQAD: Tensor) -> Tensor:
        """[B, Q, H]: what follows attention."""
        x_BQH = x_BQH + self.self_attn.products(attended_BQAD.flatten(2), self.self_attn.o_proj)[0]
        return x_BQH + self.mlp(self.post_attention_layernorm(x_BQH))


def rotate(x_BXAD: Tensor, rotation: Rotation) -> Tensor:
    """Rotate pairs (i, i + D/2) of each head by the angles of its position."""
    cos, sin = rotation
    first, second = x_BXAD.chunk(2, dim=-1)
    return x_BXAD * cos + torch.cat([-second, first], dim=-1) * sin
