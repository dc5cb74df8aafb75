"""A target whose layers tell what it will say, so that a small drafter learns to draft for it in seconds, and a trainer in a dozen lines.

Text goes round WORDS words in steps whose length its layers know: features, the token before and the slot's position all have to be right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn import functional

from dflash_core.drafter import IGNORE, DFlashConfig, DFlashDrafter, block_labels, block_positions, block_tokens, dflash_dense_mask
from dflash_core.target import TargetVocabulary
from tests.decoding.toys import Output
from tests.drafter.small import target_info

H, V, WORDS, BLOCK = 32, 64, 5, 3
TAPS = (1, 3)
RATE = 6e-3
INFO = target_info(num_layers=7, hidden_size=H, intermediate_size=48, num_heads=2, num_kv_heads=1, head_dim=16, vocab_size=V, eos_token_ids=())
CONFIG = DFlashConfig(
    target_name=INFO.name, num_target_layers=7, tap_layers=TAPS, hidden_size=H, intermediate_size=48, num_layers=1, num_heads=2, num_kv_heads=1,
    head_dim=16, vocab_size=V, rms_norm_eps=1e-5, rope_parameters=INFO.rope_parameters, max_position_embeddings=512, block_size=BLOCK,
    mask_token_id=60,
)  # fmt: skip


class TellingTarget:
    """Stands in for a ``TargetModel``. The first token of a prompt, 8 to 11, says by how many words each next one is further."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.device, self.dtype, self.info = torch.device("cpu"), torch.float32, INFO
        self.devices = (self.device,)
        self.decoder = SimpleNamespace(config=SimpleNamespace(num_kv_shared_layers=1))  # of a kind that is decoded with ``new_cache``
        head_VH = torch.randn(V, H, generator=generator)
        self.vocabulary = TargetVocabulary(head_VH, head_VH, INFO)
        self.codes = [torch.randn(V, H, generator=generator) for _ in range(INFO.num_layers)]  # every layer writes the stride in its own way

    def text(self, stride: Tensor, begin: Tensor, length: int) -> Tensor:
        """[B, length]: the stride's token, then words from ``begin`` on."""
        words = (begin[:, None] + torch.arange(length - 1) * stride[:, None]) % WORDS
        return torch.cat([stride[:, None] + 7, words], dim=1)

    def features(self, tokens_BT: Tensor, first_B: Tensor, taps: tuple[int, ...]) -> Tensor:
        return torch.cat([(self.codes[k][first_B][:, None] + 0.3 * self.codes[k][(tokens_BT + 32) % V]) for k in taps], dim=-1)

    def new_cache(self) -> list[int]:
        return []

    def crop_cache(self, cache: list[int], length: int) -> None:
        del cache[length:]

    def forward(self, ids_BT: Tensor, cache: list[int], *, tap_layers: tuple[int, ...] | None = None, logits_to_keep: int = 0) -> Output:
        cache += ids_BT[0].tolist()
        features = self.features(ids_BT, torch.tensor(cache[:1]), tap_layers) if tap_layers is not None else None
        logits = functional.one_hot((ids_BT + cache[0] - 7) % WORDS, V).float() * 9.0
        return Output(logits[:, -logits_to_keep:], features)


def train(target: TellingTarget, steps: int, labels_of: Callable[[Tensor], Tensor] = lambda labels: labels) -> tuple[DFlashDrafter, float]:
    """A drafter, and the share of labels that it had right at the end of its training. ``labels_of`` changes the labels."""
    drafter = DFlashDrafter(CONFIG).init_weights(1)
    optimiser = torch.optim.AdamW(drafter.parameters(), lr=RATE)
    generator = torch.Generator().manual_seed(1)
    B, N, T = 32, 4, 12
    positions, documents = torch.arange(T).expand(B, T), torch.zeros(B, T, dtype=torch.int32)
    right = 0.0
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = RATE * min(1.0, (step + 1) / 10) * (1 - step / steps)
        strides, begins = torch.randint(1, WORDS, (B,), generator=generator), torch.randint(0, WORDS, (B,), generator=generator)
        tokens = target.text(strides, begins, T)
        anchors = torch.rand(B, T - BLOCK - 2, generator=generator).topk(N, dim=1).indices.sort(dim=1).values + 2
        labels = labels_of(block_labels(tokens, torch.ones(B, T, dtype=torch.bool), documents, anchors, BLOCK)[:, :, 1:])
        hidden = drafter(
            target.features(tokens, tokens[:, 0], TAPS),
            target.vocabulary.embed(block_tokens(tokens, anchors, CONFIG).flatten(1)),
            positions,
            block_positions(positions, anchors, BLOCK).flatten(1),
            dflash_dense_mask(anchors, documents, BLOCK),
        )
        logits = target.vocabulary.logits(hidden.unflatten(1, (N, BLOCK))[:, :, 1:])
        loss = functional.cross_entropy(logits.flatten(0, 2), labels.flatten(), ignore_index=IGNORE)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        right = float((logits.argmax(-1) == labels)[labels != IGNORE].float().mean())
    return drafter.eval(), right


def served_as(drafter: DFlashDrafter, **changes: object) -> DFlashDrafter:
    """The same weights under another configuration."""
    other = DFlashDrafter(replace(drafter.config, **changes))  # type: ignore[arg-type]
    other.load_state_dict(drafter.state_dict())
    return other.eval()
