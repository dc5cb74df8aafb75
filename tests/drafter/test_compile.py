"""The drafter compiles whole, once for all layouts of one shape, and computes the same."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from dflash_core.drafter import block_positions, block_tokens, dflash_block_mask, dflash_dense_mask, flex_copies, layer_masks
from tests.drafter.small import WINDOWED, Row, drafter_config, random_layout, small_drafter


def arguments(seed: int, mask: str, **changes: Any) -> tuple[object, ...]:
    config = drafter_config(**changes)
    row = Row(config, *random_layout(seed, T=40, N=6), seed)
    ids = block_tokens(row.tokens, row.anchors, config).flatten(1)
    build = {"dense": dflash_dense_mask, "block": dflash_block_mask, "copied": partial(dflash_block_mask, copies=flex_copies(config, 1))}[mask]
    positions = block_positions(row.positions, row.anchors, config.block_size).flatten(1)
    masks = layer_masks(lambda window: build(row.anchors, row.document_ids, config.block_size, window=window), config)
    return row.features, row.table[ids], row.positions, positions, masks


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_one_whole_graph_serves_every_layout_with_equal_values_and_gradients() -> None:
    eager, compiled = small_drafter(num_layers=1), small_drafter(num_layers=1)
    call = torch.compile(compiled, fullgraph=True, dynamic=False, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    for seed in (1, 2):
        inputs = arguments(seed, "dense")
        want, got = eager(*inputs), call(*inputs)
        torch.testing.assert_close(got, want)
        for drafter, hidden in ((eager, want), (compiled, got)):
            drafter.zero_grad()
            hidden.pow(2).sum().backward()
        for (name, a), b in zip(eager.named_parameters(), compiled.parameters(), strict=True):
            torch.testing.assert_close(b.grad, a.grad, msg=name)
    assert graphs() == 1


@pytest.mark.parametrize(("mask", "changes"), [("block", {"num_layers": 1}), ("copied", {"num_layers": 1}), ("block", WINDOWED)])
def test_a_block_mask_made_outside_the_compiled_drafter_needs_one_graph_too(mask: str, changes: dict[str, Any]) -> None:
    drafter = small_drafter(**changes)
    call = torch.compile(drafter, fullgraph=True, dynamic=False, backend="eager")
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        for seed in (1, 2):
            torch.testing.assert_close(call(*arguments(seed, mask, **changes)), drafter(*arguments(seed, "dense", **changes)), rtol=1e-4, atol=1e-4)
    assert graphs() == 1


@pytest.mark.parametrize("compiled", [False, True])
def test_activation_checkpointing_gives_the_same_values_and_gradients_from_fewer_kept_tensors(compiled: bool) -> None:
    kept, results, config = [], [], drafter_config()
    features, embeddings, context, blocks, mask = arguments(1, "dense")
    rotations = [small_drafter().rotation(positions, torch.float32) for positions in (context, blocks)]
    for checkpointing in (False, True):
        drafter = small_drafter(num_layers=1)
        drafter.activation_checkpointing = checkpointing
        call = drafter.forward_training
        call = torch.compile(call, fullgraph=True, dynamic=False, backend="aot_eager") if compiled else call
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor, saved=saved: saved.append(tensor.numel()) or tensor, lambda tensor: tensor):
            hidden = call(features, embeddings[:, :: config.block_size], embeddings[0, 1], *rotations, mask)
        kept.append(sum(saved))
        hidden.pow(2).sum().backward()
        results.append([hidden.detach(), *(parameter.grad for parameter in drafter.parameters())])
    for plain, checkpointed in zip(*results, strict=True):
        torch.testing.assert_close(checkpointed, plain)
    assert kept[1] < kept[0]
