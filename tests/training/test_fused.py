"""What only CUDA replicas use, tried on the CPU: handed gradients, the Triton update, the compiled preparation."""

from __future__ import annotations

import pytest
import torch

from dflash_core.drafter import DFlashConfig, DFlashDrafter
from dflash_core.feed import collate
from dflash_core.training.compiled import prepare
from tests.forks import Forks
from tests.training.small import INFO, SmallRows, config


def test_handed_gradients_and_the_fused_update_train_as_the_cpu_replica_does(interpreter: Forks) -> None:
    interpreter.run_module("tests.training.interpreted_adamw")


@pytest.mark.parametrize("rows", [1, 2])
def test_the_preparation_compiles_whole_and_gives_the_same(rows: int) -> None:
    drafter_config = DFlashConfig.from_target(INFO, config().drafter)
    drafter = DFlashDrafter(drafter_config).bfloat16()
    compiled = torch.compile(prepare, fullgraph=True, dynamic=False, backend="aot_eager")
    batches = [collate([SmallRows().row(i + j) for j in range(rows)]) for i in (0, 5)]
    for batch in batches:
        arguments = (drafter, batch.tokens, batch.loss_mask, batch.document_ids, batch.positions, batch.anchors, "flex")
        with torch.no_grad():
            actual, expected = compiled(*arguments), prepare(*arguments)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        assert len(actual.mask.kv_num_blocks) == (2 if rows == 1 else rows)  # copies for the two query heads of a group


@pytest.mark.parametrize("weight", ["*bf16", "*fp32"])
def test_the_kernels_compile_for_hopper(weight: str) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dflash_core.training.adamw_kernel import BLOCK, NORM_BLOCK, _adamw_kernel, _square_sum_kernel

    pointers = {"weight_ptr": weight, "gradient_ptr": weight}
    pointers |= dict.fromkeys(("master_ptr", "first_ptr", "second_ptr", "scale_ptr", "rate_ptr", "updates_ptr"), "*fp32")
    numbers = {"size": "i32"} | dict.fromkeys(("beta1", "beta2", "eps", "decay"), "fp32")
    norm = {"gradient_ptr": weight, "partial_ptr": "*fp32", "size": "i32"}
    for kernel, signature, block in ((_adamw_kernel, pointers | numbers, BLOCK), (_square_sum_kernel, norm, NORM_BLOCK)):
        source = ASTSource(fn=kernel, signature=signature | {"BLOCK": "constexpr"}, constexprs={"BLOCK": block})
        assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
