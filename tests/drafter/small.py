"""A small drafter, its target's facts, and random rows for the tests of this folder."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dflash_core.drafter import DFlashConfig, DFlashDrafter, block_positions, block_tokens, dflash_dense_mask, layer_masks
from dflash_core.target.info import TargetInfo

VOCABULARY = 64
WINDOWED = {"sliding_window": 6, "sliding_layers": (0,)}
"""A change of ``drafter_config``: the first of its layers sees six positions, in the middle of most documents."""


def target_info(**changes: Any) -> TargetInfo:
    """A Llama-like target of 8 layers that exists on paper only."""
    info = TargetInfo(
        name="paper-target", path="/nowhere", revision=None, digest="d" * 64, tokenizer_digest="e" * 64, template_digest=None, model_type="llama",
        num_layers=8, hidden_size=24, intermediate_size=40, num_heads=6, num_kv_heads=2, head_dim=8, vocab_size=VOCABULARY, rms_norm_eps=1e-5,
        attention_bias=False, rope_theta=10000.0, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, max_position_embeddings=512,
        tie_word_embeddings=True, eos_token_ids=(1, 2), pad_token_id=0, bos_token_id=1, embedding_scale=1.0, logit_softcap=None, logit_scale=1.0,
    )  # fmt: skip
    return replace(info, **changes)


def drafter_config(**changes: Any) -> DFlashConfig:
    """Two layers, two taps, blocks of four."""
    info = target_info()
    config = DFlashConfig(
        target_name=info.name, num_target_layers=8, tap_layers=(1, 5), hidden_size=24, intermediate_size=40, num_layers=2, num_heads=6,
        num_kv_heads=2, head_dim=8, vocab_size=VOCABULARY, rms_norm_eps=1e-5,
        rope_parameters=info.rope_parameters, max_position_embeddings=512, block_size=4,
        mask_token_id=16,
    )  # fmt: skip
    return replace(config, **changes)


def small_drafter(**changes: Any) -> DFlashDrafter:
    """With larger weights than a fresh one, so that a leak cannot hide below the tolerance."""
    drafter = DFlashDrafter(drafter_config(**changes)).init_weights(0)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter.mul_(10)
    return drafter


def random_layout(seed: int, T: int, N: int) -> tuple[Tensor, Tensor]:
    """Document ids [T] int32 of packed documents with padding at the end, and anchors [N], some slots empty, the row's edges likely."""
    draw = random.Random(seed)
    documents: list[int] = []
    while len(documents) < T and draw.random() < 0.9:
        documents += [documents[-1] + 1 if documents else 0] * draw.choice([1, 2, 5, 17, 60, 150])
    documents = (documents + [-1] * T)[:T]
    valid = [t for t in range(T - 1) if documents[t] >= 0 and documents[t] == documents[t + 1]]
    edges = [t for t in valid if t == 0 or documents[t - 1] != documents[t] or t + 2 == T or documents[t + 2] != documents[t]]
    wanted = draw.randint(0, N)
    chosen = set(draw.sample(edges, min(len(edges), wanted // 2)))
    rest = [t for t in valid if t not in chosen]
    chosen.update(draw.sample(rest, min(len(rest), wanted - len(chosen))))
    anchors = sorted(chosen)
    return torch.tensor(documents, dtype=torch.int32), torch.tensor(anchors + [-1] * (N - len(anchors)))


def positions_of(document_ids_T: Tensor) -> Tensor:
    """Position of each token within its document."""
    out, last, count = [], None, 0
    for document in document_ids_T.tolist():
        count = count + 1 if document == last else 0
        last = document
        out.append(count)
    return torch.tensor(out)


class Row:
    """Everything a forward pass of one row needs, from a layout and a seed."""

    def __init__(self, config: DFlashConfig, document_ids_T: Tensor, anchors_N: Tensor, seed: int = 0):
        self.config, self.document_ids, self.anchors = config, document_ids_T[None], anchors_N[None]
        T = len(document_ids_T)
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, VOCABULARY, (1, T), generator=generator)
        self.features = torch.randn(1, T, config.feature_size, generator=generator)
        self.table = torch.randn(VOCABULARY, config.hidden_size, generator=generator)
        self.positions = positions_of(document_ids_T)[None]

    def hidden(self, drafter: DFlashDrafter) -> Tensor:
        """[N, S, H] of all blocks in one pass."""
        S = self.config.block_size
        ids = block_tokens(self.tokens, self.anchors, self.config).flatten(1)
        positions = block_positions(self.positions, self.anchors, S).flatten(1)
        mask = layer_masks(lambda window: dflash_dense_mask(self.anchors, self.document_ids, S, window), self.config)
        return drafter(self.features, self.table[ids], self.positions, positions, mask).view(-1, S, self.config.hidden_size)
