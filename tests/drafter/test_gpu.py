"""On CUDA: the compiled drafter under either form of the mask equals dense attention; making the mask never waits for the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_core.drafter import DFlashDrafter, block_positions, dflash_block_mask, dflash_dense_mask, interval_mask, layer_masks
from tests.drafter.small import drafter_config, positions_of, random_layout, small_drafter

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


def error(found: Tensor | None, exact: Tensor | None) -> float:
    """Relative distance from what float32 gives."""
    assert found is not None
    assert exact is not None
    return float((found.detach().float() - exact.detach()).norm() / exact.detach().norm().clamp(min=1e-12))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("window", [{}, {"sliding_window": 100, "sliding_layers": (0,)}], ids=["full", "windows"])
@pytest.mark.parametrize(
    ("dtype", "build"), [(torch.float32, dflash_block_mask), (torch.bfloat16, dflash_block_mask), (torch.bfloat16, interval_mask)]
)
def test_the_compiled_drafter_is_as_exact_as_the_dense_one_in_values_and_gradients(
    dtype: torch.dtype, build: Callable[..., Any], window: dict[str, Any], checkpointing: bool
) -> None:
    torch.set_float32_matmul_precision("highest")
    torch._dynamo.reset()  # another drafter of the same shape would find this one's graph
    S, T, N = 16, 520, 48
    config = drafter_config(hidden_size=128, intermediate_size=256, num_heads=8, num_kv_heads=2, head_dim=64, block_size=S, **window)
    compiled, dense, exact = (DFlashDrafter(config).init_weights(0).to("cuda", dtype) for _ in range(3))
    exact.float()
    compiled.activation_checkpointing = checkpointing
    call = torch.compile(compiled.forward_training, fullgraph=True, dynamic=False)
    torch._dynamo.utils.counters.clear()
    for seed in (1, 2, 3):
        features, embeddings, positions, slots, anchors, documents = inputs(seed, T, N, S, dtype)
        upstream = embeddings.unflatten(1, (N, S))[:, :, 1:].float()
        hidden = {}
        for drafter, function, mask in (
            (compiled, call, build),
            (dense, dense.forward_training, dflash_dense_mask),
            (exact, exact.forward_training, dflash_dense_mask),
        ):
            masks = layer_masks(lambda window, a=anchors, d=documents, mask=mask: mask(a, d, S, window=window), config)
            rotations = [drafter.rotation(x, drafter.fc.weight.dtype) for x in (positions, slots)]
            hidden[drafter] = function(features, embeddings[:, ::S], embeddings[0, 1], *rotations, masks)
            drafter.zero_grad()
            (hidden[drafter].float() * upstream).mean().backward()
        assert error(hidden[compiled], hidden[exact]) < 2 * error(hidden[dense], hidden[exact]) + 1e-5
        for (name, a), b, c in zip(compiled.named_parameters(), dense.parameters(), exact.parameters(), strict=True):
            assert error(a.grad, c.grad) < 2 * error(b.grad, c.grad) + 1e-4, name
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("window", [0, 300])
def test_building_the_block_mask_never_waits_for_the_gpu(window: int) -> None:
    documents, anchors = random_layout(1, 2048, 512)
    documents, anchors = documents[None].cuda(), anchors[None].cuda()
    dflash_block_mask(anchors, documents, 16, window=window)
    torch.cuda.set_sync_debug_mode("error")
    try:
        dflash_block_mask(anchors, documents, 16, window=window)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_drafting_with_windows_on_the_gpu_equals_drafting_on_the_cpu() -> None:
    torch.set_float32_matmul_precision("highest")
    drafter = small_drafter(head_dim=16, sliding_window=40, sliding_layers=(0,))
    generator = torch.Generator().manual_seed(0)
    features, block = torch.randn(3, 150, 48, generator=generator), torch.randn(3, 4, 24, generator=generator)
    drafted = []
    for device in ("cpu", "cuda"):
        there, anchors = drafter.to(device), torch.tensor([150, 20, 77], device=device)
        cache = there.new_cache(rows=3, capacity=160)
        there.read_context(features.to(device), torch.zeros_like(anchors), cache)
        drafted.append(there.draft(block.to(device), anchors, cache).cpu())
    torch.testing.assert_close(drafted[1], drafted[0], rtol=1e-4, atol=1e-4)
