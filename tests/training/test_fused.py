"""What only CUDA replicas use, tried on the CPU: handed gradients, the Triton update, the compiled preparation."""

from __future__ import annotations

import pytest
import torch

from dflash_core.drafter import DFlashConfig, DFlashDrafter
from dflash_core.feed import collate
from dflash_core.training import replica
from dflash_core.training.compiled import prepare
from dflash_core.training.meeting import Meeting
from dflash_core.training.optimizer import FusedAdamW, halves, joined
from dflash_core.training.sync import GradientSync
from tests.forks import Forks
from tests.training.small import INFO, SmallRows, config, vocabulary


def test_handed_gradients_and_the_fused_update_train_as_the_cpu_replica_does(interpreter: Forks) -> None:
    interpreter.run_module("tests.training.interpreted_adamw")


def test_a_master_that_is_no_number_is_none_in_the_weights_either() -> None:
    kinds = [0x7FFFFFFF, -1, 0x7F800001, 0x7F808000, 0x7FC00000]  # the first is what a GPU makes
    masters = torch.tensor([*kinds, 0x7F800000, 0x7F7FFFFF], dtype=torch.int32).view(torch.float32)
    weight, low = halves(masters)
    assert torch.equal(weight.isnan(), masters.isnan())
    assert weight[5:].isinf().all()  # the last rounds up to it
    assert torch.equal(joined(weight, low)[5:], masters[5:])
    assert joined(weight, low)[:5].isnan().all()


def test_masters_in_halves_are_the_same_numbers_and_the_upper_half_is_the_nearest_bfloat16() -> None:
    bits = torch.randint(-(2**31), 2**31, (500, 400), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    bits[:, ::4] = bits[:, ::4] & ~0xFFFF | 0x8000  # halfway between two
    masters = bits.view(torch.float32)
    masters = masters.masked_fill(~masters.isfinite(), 0.0)
    weight, low = halves(masters)
    assert (weight.dtype, low.dtype, weight.shape, low.shape) == (torch.bfloat16, torch.int16, masters.shape, masters.shape)
    assert torch.equal(joined(weight, low).view(torch.int32), masters.view(torch.int32))
    halfway = masters.view(torch.int32) & 0xFFFF == 0x8000
    assert torch.equal(weight[~halfway], masters.to(torch.bfloat16)[~halfway])
    assert torch.equal(weight.float().abs()[halfway].view(torch.int32), masters.abs()[halfway].view(torch.int32) + 0x8000)  # away from zero


@pytest.mark.parametrize("split", [False, True])
def test_a_replica_whose_masters_are_in_halves_takes_and_gives_what_others_do(split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "splits_masters", lambda training, kind: split)
    cfg = config(1, precision="bfloat16")
    if split:  # the CPU's takes whole masters alone
        monkeypatch.setattr(replica.Replica, "_make_optimizer", lambda self: FusedAdamW(self.shard, cfg.training, self.moments))
    drafter_config = DFlashConfig.from_target(INFO, cfg.drafter)
    made = replica.Replica(0, torch.device("cpu"), cfg, drafter_config, vocabulary())
    generator, shapes = torch.Generator().manual_seed(0), drafter_config.tensor_shapes()
    given = [{name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} for _ in range(3)]
    made.load(*given, updates=7)
    gathered = replica.gather(made, GradientSync(0, 1, Meeting(1), None))
    assert gathered is not None
    for found, expected in zip(gathered, given, strict=True):
        assert all(torch.equal(found[name], expected[name]) for name in shapes)
    assert made.updates == 7
    for name, parameter in made.drafter.named_parameters():
        torch.testing.assert_close(parameter.detach().float(), given[0][name], rtol=2**-8, atol=0)


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


@pytest.mark.parametrize(("weight", "gradient"), [("*i16", "*bf16"), ("*i16", "*fp32"), ("*fp32", "*fp32")])
def test_the_kernels_compile_for_hopper(weight: str, gradient: str) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dflash_core.training.adamw_kernel import BLOCK, NORM_BLOCK, _adamw_kernel, _square_sum_kernel

    split = weight == "*i16"
    pointers = {"weight_ptr": weight, "low_ptr": "*i16", "gradient_ptr": gradient}
    pointers |= dict.fromkeys(("first_ptr", "second_ptr", "scale_ptr", "rate_ptr", "updates_ptr"), "*fp32")
    numbers = {"size": "i32"} | dict.fromkeys(("beta1", "beta2", "eps", "decay"), "fp32")
    norm = {"gradient_ptr": gradient, "partial_ptr": "*fp32", "size": "i32"}
    constants = {"SPLIT": split, "BLOCK": BLOCK} | ({} if split else {"low_ptr": None})
    cases = ((_adamw_kernel, pointers | numbers, constants), (_square_sum_kernel, norm, {"BLOCK": NORM_BLOCK}))
    for kernel, signature, constexprs in cases:
        source = ASTSource(fn=kernel, signature=signature | dict.fromkeys(constexprs, "constexpr"), constexprs=constexprs)
        assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
