"""The DFlash drafter: a few Qwen3-style layers that draft a whole block of tokens from the target's hidden states in one pass.

    B rows   T context tokens   Q = N * S draft positions   X = T + Q   F = K * H tapped features   H hidden   D head size

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
from torch.utils.checkpoint import checkpoint

from dflash_core.drafter.cache import DrafterCache
from dflash_core.drafter.config import DFlashConfig
from dflash_core.drafter.layers import DraftLayer, KeysValues, Mask, Masks, Products, RMSNorm, Rotation
from dflash_core.drafter.masks import LayerMasks
from dflash_core.drafter.rope import rope_frequencies

INITIAL_STD = 0.02


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
