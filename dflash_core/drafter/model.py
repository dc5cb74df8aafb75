"""The DFlash drafter: a few Qwen3-style layers that draft a whole block of tokens from the target's hidden states in one pass.

    B rows   T context tokens   Q = N * S draft positions   X = T + Q   F = K * H tapped features   H hidden
    A attention heads   G key/value heads   D head size

The context is ``H_t = hidden_norm(fc(features))``, once for all layers. A layer's queries come from the block stream only; its keys and values
come from the context and the (normed) block stream, side by side. The context gets no norm, query, output projection or MLP of a layer
(arXiv 2602.06036, section 3; parameter names as every serving runtime expects them).

Training sees many blocks of a row at once, under a mask; drafting sees one block after a cached context. Both are the same function.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

from dflash_core.drafter.attention import IntervalMask, block_attention
from dflash_core.drafter.cache import DrafterCache
from dflash_core.drafter.config import DFlashConfig
from dflash_core.drafter.masks import LayerMasks
from dflash_core.drafter.rope import rope_frequencies
from dflash_core.fp8 import fp8_linears

INITIAL_STD = 0.02
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
        q, k, v = self.unrotated(x_BQH)
        return rotate(q, rotation), (rotate(k, rotation), v)

    def unrotated(self, x_XH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [..., A, D], keys and values [..., G, D] without their positions."""
        q, k, v = (self._heads(x) for x in self.joint_products(x_XH, self.q_proj, self.k_proj, self.v_proj))
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


class DFlashDrafter(nn.Module):
    """The trainable part: no embedding and no head, which are the target's own.

    Parameters are named and shaped as ``config.tensor_shapes()`` says; ``inv_freq`` stays float32 under any cast.
    """

    inv_freq: Tensor

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        self.activation_checkpointing = False  # in training: keep the layers' inputs alone, and run each layer again in the backward pass
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList([DraftLayer(config) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        with torch.device("cpu"):
            inv_freq, self.rope_factor = rope_frequencies(config.rope_parameters, config.head_dim, config.max_position_embeddings)
        self._exact_inv_freq = inv_freq
        self.register_buffer("inv_freq", inv_freq.clone(), persistent=False)

    @classmethod
    def around(cls, config: DFlashConfig, weights: Mapping[str, Tensor], device: torch.device) -> DFlashDrafter:
        """A drafter whose parameters are these tensors on ``device`` themselves. Nothing is drawn for it first: a billion draws take ten seconds."""
        with torch.device("meta"):
            drafter = cls(config)
        drafter.load_state_dict(weights, assign=True)
        return drafter.to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DFlashDrafter:
        super()._apply(fn, recurse)
        self.inv_freq = self._exact_inv_freq.to(self.inv_freq.device)  # a cast to bfloat16 must not reach the frequencies
        return self

    def init_weights(self, seed: int) -> DFlashDrafter:
        """Fresh weights, the same on every device: matrices normal with deviation 0.02, norms one. Returns self."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() == 1:
                    parameter.fill_(1.0)
                    continue
                digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()  # a tensor's draw depends on its name, not on its turn
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * INITIAL_STD)
        return self

    def use_fp8(self) -> None:
        """From now on the layers multiply in fp8; ``fc``, which sees the target's features, stays as it is."""
        for part in self.modules():
            if isinstance(part, Products):
                part.fp8 = True

    def forward(
        self,
        features_BTF: Tensor,
        block_embeddings_BQH: Tensor,
        context_positions_BT: Tensor,
        block_positions_BQ: Tensor,
        mask: Masks,
    ) -> Tensor:
        """Hidden states of all blocks of each row, ready for the target's head.

        Args:
            features_BTF:         [B, T, F] the target's tapped features, any float dtype
            block_embeddings_BQH: [B, Q, H] the target's embeddings of the block tokens
            context_positions_BT: [B, T] int64 absolute positions
            block_positions_BQ:   [B, Q] int64 absolute positions
            mask:                 ``dflash_dense_mask`` (CPU), ``dflash_block_mask`` (inside torch.compile, on CUDA) or ``interval_mask`` (CUDA),
                                  as ``layer_masks`` arranges them for layers with a sliding window

        Returns:
            [B, Q, H] in the dtype of the weights, after the final norm.
        """
        dtype = self.fc.weight.dtype
        context_rotation, block_rotation = self.rotation(context_positions_BT, dtype), self.rotation(block_positions_BQ, dtype)
        context_BTH = self.context(features_BTF)
        x_BQH = block_embeddings_BQH.to(dtype)
        for i, layer in enumerate(self._draft_layers()):
            q, block = layer.queries_keys_values(x_BQH, block_rotation)
            context = layer.self_attn.keys_values(context_BTH, context_rotation)
            x_BQH = layer.finish(x_BQH, layer.self_attn.attend(q, context, block, self._mask_of(i, mask)))
        return self.norm(x_BQH)

    def forward_training(
        self,
        features_BTF: Tensor,
        anchor_embeddings_BNH: Tensor,
        mask_embedding_H: Tensor,
        context_rotation: Rotation,
        block_rotation: Rotation,
        mask: Masks,
    ) -> Tensor:
        """``forward`` of what training needs: hidden states [B, N, P, H] of the P slots of each block that predict a token.

        The same function with less to do. All slots but the first hold the mask token, so the first layer's norms and products see each of them
        alike, and are computed once for all. After the last layer's attention nothing looks at slots that predict nothing.

        Args:
            anchor_embeddings_BNH: [B, N, H] the target's embedding of the first token of each block
            mask_embedding_H:      [H] that of the mask token, in all other slots
            context_rotation, block_rotation: of the positions, as ``rotation`` gives them. Compiled from here on, a kernel reads cosines and
                sines; compiled with them, each works those of every element out anew, which made rope's backward pass seven times slower.
        """
        layers, S = list(self._draft_layers()), self.config.block_size
        context_BTH = self.context(features_BTF)
        dtype = context_BTH.dtype
        anchors_BN1H, mask_H = anchor_embeddings_BNH[:, :, None].to(dtype), mask_embedding_H.to(dtype)
        x_BQH = torch.cat([anchors_BN1H, mask_H.expand(*anchors_BN1H.shape[:2], S - 1, -1)], dim=2).flatten(1, 2)
        contexts = self._keys_values_of_layers(context_BTH, context_rotation)
        for i, (layer, context) in enumerate(zip(layers, contexts, strict=True)):

            def through(x_BQH: Tensor, context: KeysValues, layer: DraftLayer = layer, i: int = i) -> Tensor:
                attention = layer.self_attn
                if i == 0:
                    q, block = layer.first_queries_keys_values(anchor_embeddings_BNH.to(dtype), mask_H, block_rotation, S)
                else:
                    q, block = layer.queries_keys_values(x_BQH, block_rotation)
                attended = attention.attend(q, context, block, self._mask_of(i, mask))
                if i == len(layers) - 1:
                    x_BQH, attended = (self._predicting(x) for x in (x_BQH, attended))
                return layer.finish(x_BQH, attended)

            if self.activation_checkpointing:
                x_BQH = checkpoint(through, x_BQH, context, use_reentrant=False, preserve_rng_state=False)
            else:
                x_BQH = through(x_BQH, context)
        return self.norm(x_BQH).unflatten(1, (anchors_BN1H.shape[1], -1))

    def _keys_values_of_layers(self, context_BTH: Tensor, rotation: Rotation) -> list[KeysValues]:
        """``keys_values`` of the context in every layer."""
        attentions = [layer.self_attn for layer in self._draft_layers()]
        made = attentions[0].joint_products(context_BTH, *(linear for attention in attentions for linear in (attention.k_proj, attention.v_proj)))
        return [attention.of_products(k, v, rotation) for attention, k, v in zip(attentions, made[::2], made[1::2], strict=True)]

    def _mask_of(self, layer: int, masks: Masks) -> Mask:
        if not self.config.sliding_layers:
            assert not isinstance(masks, LayerMasks), "no layer has a sliding window"
            return masks
        assert isinstance(masks, LayerMasks), "layer_masks makes the masks of a drafter that has sliding windows"
        mask = masks.sliding if self.config.window_of(layer) else masks.full
        assert mask is not None
        return mask

    def _predicting(self, x_BQX: Tensor) -> Tensor:
        """[B, N * P, ...]: of each block the slots that predict a token."""
        S = self.config.block_size
        return x_BQX.unflatten(1, (-1, S))[:, :, self.config.spec.first_predicting_slot :].flatten(1, 2)

    def context(self, features_BTF: Tensor) -> Tensor:
        """[B, T, H]: what all layers see of the target's features."""
        return self.hidden_norm(self.fc(features_BTF.to(self.fc.weight.dtype)))

    def new_cache(self, rows: int = 1, capacity: int = 256) -> DrafterCache:
        """A cache for drafting with room for ``capacity`` positions a row, on the device and in the dtype of the weights."""
        return DrafterCache(self.config, rows, capacity, self.fc.weight.dtype, self.fc.weight.device)

    @torch.no_grad()
    def read_context(self, features_RTF: Tensor, start_R: Tensor, cache: DrafterCache) -> None:
        """Put keys and values of the target's features of T positions of each row, from ``start_R`` (int64 [R]) on, into the cache.

        Which of these positions are context for a draft is decided by its anchor alone; those from the anchor on are written over later.
        """
        context_RTH = self.context(features_RTF)
        positions_RT = start_R[:, None] + torch.arange(features_RTF.shape[1], device=start_R.device)
        rotation = self.rotation(positions_RT, context_RTH.dtype)
        for i, layer in enumerate(self._draft_layers()):
            cache.write(i, *layer.self_attn.keys_values(context_RTH, rotation), start_R)

    @torch.no_grad()
    def draft(self, block_embeddings_RSH: Tensor, anchor_R: Tensor, cache: DrafterCache) -> Tensor:
        """Hidden states [R, S, H] of a block a row, which follows the first ``anchor_R`` positions in the cache.

        Args:
            block_embeddings_RSH: [R, S, H] the target's embeddings of [last token, mask, mask, ...]
            anchor_R:             int64 [R] position of the last token. The block's own keys and values are put into the cache from there on
        """
        x_RSH = block_embeddings_RSH.to(self.fc.weight.dtype)
        S = x_RSH.shape[1]
        positions_RS = anchor_R[:, None] + torch.arange(S, device=anchor_R.device)
        rotation = self.rotation(positions_RS, x_RSH.dtype)
        for i, layer in enumerate(self._draft_layers()):
            q, block = layer.queries_keys_values(x_RSH, rotation)
            cache.write(i, *block, anchor_R)
            x_RSH = layer.finish(x_RSH, cache.attend(i, q, anchor_R))
        return self.norm(x_RSH)

    def _draft_layers(self) -> Iterable[DraftLayer]:
        return cast(Iterable[DraftLayer], self.layers)

    def rotation(self, positions_BX: Tensor, dtype: torch.dtype) -> Rotation:
        """Cosine and sine [B, X, 1, D] of the positions, computed in float32."""
        angles = positions_BX[..., None].float() * self.inv_freq
        angles = torch.cat([angles, angles], dim=-1)[:, :, None]
        return (angles.cos() * self.rope_factor).to(dtype), (angles.sin() * self.rope_factor).to(dtype)


def flex_copies(config: DFlashConfig, rows: int) -> int:
    """Copies of the lists that the block mask of ``rows`` rows should hold, which decides how ``flex`` lays the heads out."""
    return config.num_heads // config.num_kv_heads if rows == 1 else 1


def flex(q_BAQD: Tensor, k_BGXD: Tensor, v_BGXD: Tensor, mask: BlockMask) -> Tensor:
    """flex_attention [B, A, Q, D], laid out so that the longest program of its backward pass is short.

    Left to itself that pass walks all query heads of a group in one program, and the first tile of context, which nearly every query sees, keeps
    one multiprocessor busy for longer than an even share of all work (benchmarks/RESULTS.md). So of one row the heads of a group become a batch
    over the same keys and values, for which the mask holds copies; of several rows keys and values are repeated, since flex_attention shares
    them over a whole batch or not at all.
    """
    group = q_BAQD.shape[1] // k_BGXD.shape[1]
    if mask.kv_num_blocks.shape[0] == q_BAQD.shape[0]:
        if group > 1:
            k_BGXD, v_BGXD = k_BGXD.repeat_interleave(group, dim=1), v_BGXD.repeat_interleave(group, dim=1)
        return flex_attention(q_BAQD, k_BGXD, v_BGXD, block_mask=mask)
    q_RGQD = q_BAQD[0].unflatten(0, (-1, group)).transpose(0, 1)  # R query heads of a group
    return flex_attention(q_RGQD, k_BGXD, v_BGXD, block_mask=mask).transpose(0, 1).flatten(0, 1)[None]


def rotate(x_BXAD: Tensor, rotation: Rotation) -> Tensor:
    """Rotate pairs (i, i + D/2) of each head by the angles of its position."""
    cos, sin = rotation
    first, second = x_BXAD.chunk(2, dim=-1)
    return x_BXAD * cos + torch.cat([-second, first], dim=-1) * sin
