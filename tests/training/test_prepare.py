"""What a batch comes to is traced whole, once for every layout, whatever the form of its masks and with windows or without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash_core.drafter import BlockMaskTensors, DFlashConfig, DFlashDrafter, IntervalMask, LayerMasks
from dflash_core.feed import collate
from dflash_core.training.compiled import prepare
from tests.training.small import INFO, SmallRows, config

FORMS = {"fused": IntervalMask, "flex": BlockMaskTensors, "dense": torch.Tensor}
SLIDE, MIXED = {"sliding_window": 5}, {"sliding_window": 5, "full_attention_layers": [1]}


@pytest.mark.parametrize(
    ("attention", "window"),
    [("fused", {}), ("flex", {}), ("flex", SLIDE), ("fused", MIXED), ("flex", MIXED), ("dense", MIXED)],
    ids=["fused", "flex", "flex-slide", "fused-mixed", "flex-mixed", "dense-mixed"],
)
def test_one_graph_prepares_every_batch_for_the_layers_that_the_drafter_has(attention: str, window: dict[str, Any]) -> None:
    drafter = DFlashDrafter(DFlashConfig.from_target(INFO, config(drafter=window).drafter))
    form = FORMS[attention]
    compiled = torch.compile(prepare, fullgraph=True, dynamic=False, backend="eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for ordinal in range(2):
        batch = collate([SmallRows().row(ordinal)])
        arguments = (drafter, batch.tokens, batch.loss_mask, batch.document_ids, batch.positions, batch.anchors, attention)
        got, want = compiled(*arguments), prepare(*arguments)
        pairs = list(zip(got.mask, want.mask, strict=True)) if isinstance(want.mask, LayerMasks) else [(got.mask, want.mask)]
        assert [mask is not None for _, mask in pairs] == ([True] if not window else ["full_attention_layers" in window, True])
        for found, exact in pairs:
            if exact is None or form is torch.Tensor:
                assert found is exact is None or torch.equal(found, exact)
                continue
            assert isinstance(found, form)
            assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(found, exact, strict=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
