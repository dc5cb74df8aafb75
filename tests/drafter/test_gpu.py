"""On CUDA: flex_attention inside the compiled drafter equals dense attention, and the block mask is built without waiting for the GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dflash_core.drafter import DFlashDrafter, block_positions, dflash_block_mask, dflash_dense_mask
from tests.drafter.small import drafter_config, positions_of, random_layout

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def inputs(seed: int, T: int, N: int, S: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    documents, anchors = random_layout(seed, T, N)
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(1, T, 2 * 128, generator=generator)
    embeddings = torch.randn(1, N * S, 128, generator=generator)
    positions = positions_of(documents)[None]
    parts = (
        features.to(dtype),
        embeddings.to(dtype),
        positions,
        block_positions(positions, anchors[None], S).flatten(1),
        anchors[None],
        documents[None],
    )
    return tuple(part.cuda() for part in parts)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 6e-2)])
def test_the_compiled_drafter_with_flex_attention_equals_the_dense_one_in_values_and_gradients(dtype: torch.dtype, tolerance: float) -> None:
    torch.set_float32_matmul_precision("highest")
    S, T, N = 16, 520, 48
    config = drafter_config(hidden_size=128, intermediate_size=256, num_heads=8, num_kv_heads=2, head_dim=64, block_size=S)
    flex, dense = (DFlashDrafter(config).init_weights(0).to("cuda", dtype) for _ in range(2))
    call = torch.compile(flex, fullgraph=True, dynamic=False)
    torch._dynamo.utils.counters.clear()
    for seed in (1, 2, 3):
        features, embeddings, positions, slots, anchors, documents = inputs(seed, T, N, S, dtype)
        got = call(features, embeddings, positions, slots, dflash_block_mask(anchors, documents, S))
        want = dense(features, embeddings, positions, slots, dflash_dense_mask(anchors, documents, S))
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
        for drafter, hidden in ((flex, got), (dense, want)):
            drafter.zero_grad()
            (hidden.float() * embeddings.float()).mean().backward()
        for (name, a), b in zip(flex.named_parameters(), dense.parameters(), strict=True):
            assert a.grad is not None
            assert b.grad is not None
            error = (a.grad.float() - b.grad.float()).norm() / b.grad.float().norm().clamp(min=1e-12)
            assert error < tolerance, name
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_building_the_block_mask_never_waits_for_the_gpu() -> None:
    documents, anchors = random_layout(1, 2048, 512)
    documents, anchors = documents[None].cuda(), anchors[None].cuda()
    dflash_block_mask(anchors, documents, 16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        dflash_block_mask(anchors, documents, 16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
