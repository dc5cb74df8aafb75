"""What training computes is the drafter itself: the same states and the same gradients, with what nobody looks at left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash_core.drafter import block_positions, block_tokens, dflash_dense_mask, layer_masks
from tests.drafter.small import WINDOWED, Row, drafter_config, random_layout, small_drafter


@pytest.mark.parametrize("changes", [{"num_layers": 1}, {}, WINDOWED, {"num_layers": 3, "sliding_window": 4, "sliding_layers": (0, 1, 2)}])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_training_pass_equals_the_whole_one_in_the_slots_that_predict_and_in_all_gradients(changes: dict[str, Any], checkpointing: bool) -> None:
    whole, trained = (small_drafter(**changes) for _ in range(2))
    trained.activation_checkpointing = checkpointing
    config = drafter_config(**changes)
    S, N = config.block_size, 7
    for seed in range(3):
        row = Row(config, *random_layout(seed, T=50, N=N), seed)
        ids = block_tokens(row.tokens, row.anchors, config)
        positions = block_positions(row.positions, row.anchors, S).flatten(1)
        mask = layer_masks(lambda window, row=row: dflash_dense_mask(row.anchors, row.document_ids, S, window), config)
        want = whole(row.features, row.table[ids].flatten(1, 2), row.positions, positions, mask).unflatten(1, (N, S))[:, :, 1:]
        rotations = [trained.rotation(x, torch.float32) for x in (row.positions, positions)]
        got = trained.forward_training(row.features, row.table[ids[..., 0]], row.table[config.mask_token_id], *rotations, mask)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        upstream = torch.randn(want.shape, generator=torch.Generator().manual_seed(seed))
        for drafter, states in ((whole, want), (trained, got)):
            drafter.zero_grad()
            (states * upstream).sum().backward()
        for (name, a), b in zip(whole.named_parameters(), trained.parameters(), strict=True):
            torch.testing.assert_close(b.grad, a.grad, rtol=1e-3, atol=1e-4, msg=name)
