"""Run in a process of its own with TRITON_INTERPRET=1: the CUDA replica's update and its ways with gradients against the CPU's, on the CPU."""

from __future__ import annotations

import torch

from dflash_core.drafter import DFlashConfig, DFlashDrafter
from dflash_core.feed import collate
from dflash_core.training.adamw_kernel import adamw_
from dflash_core.training.gradients import HandedGradients
from dflash_core.training.optimizer import FusedAdamW, Moments, halves, joined
from dflash_core.training.replica import Replica
from tests.training.small import INFO, SmallRows, config, vocabulary


def replica(handed: bool, packed: bool, precision: str) -> Replica:
    cfg = config(1, accumulation_steps=2 if packed else 1, precision=precision, max_grad_norm=0.5, weight_decay=0.1)
    drafter_config = DFlashConfig.from_target(INFO, cfg.drafter)
    made = Replica(0, torch.device("cpu"), cfg, drafter_config, vocabulary())
    if handed:
        dtype = torch.float32 if packed else getattr(torch, precision)
        made.moments = Moments(made.layout, getattr(torch, precision), made.device, shard=made.shard, split=True)
        made.drafter = DFlashDrafter.around(drafter_config, made.layout.views(made.weights), made.device)
        made._gradients = HandedGradients(made.layout, made.drafter, dtype, made.tail.size, made.device, packed=packed, shard=made.shard)
        made._optimizer = FusedAdamW(made.shard, cfg.training, made.moments)
    made.load({name: parameter.detach() for name, parameter in DFlashDrafter(drafter_config).init_weights(0).named_parameters()})
    return made


def train(made: Replica, packed: bool) -> list[object]:
    """Four steps, the third with a NaN among its features."""
    totals = []
    for step in range(4):
        made.begin_step()
        for micro_step in range(2 if packed else 1):
            row = SmallRows().row(2 * step + micro_step)
            if step == 2:
                row.features[5] = float("nan")
            made.micro_step(collate([row]))
        made.close_step(False)
        made.apply(1e-2)
        totals.append(made.totals_later()())
    return totals


def check_that_what_is_no_number_shows_in_the_weights() -> None:
    """Masters that are NaN, of whatever bits."""
    weight, low = torch.zeros(5, dtype=torch.bfloat16), torch.zeros(5, dtype=torch.int16)
    first = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x7F808000, 0], dtype=torch.int32).view(torch.float32)
    one = torch.tensor(1.0)
    adamw_(
        weight, low, torch.zeros(5), first, torch.zeros(5), scale=one, learning_rate=one, updates=one, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1,
    )  # fmt: skip
    assert weight.isnan().tolist() == joined(weight, low).isnan().tolist() == [True] * 4 + [False]


def check_that_halves_are_updated_as_the_whole() -> None:
    """Five steps of the kernel on masters in one piece and in halves: the same bits, and weights that are the masters rounded."""
    whole, gradients = torch.randn(3000, generator=torch.Generator().manual_seed(0)), torch.randn(5, 3000, generator=torch.Generator().manual_seed(1))
    weight, low = halves(whole)
    scalars = {"scale": torch.tensor(0.5), "learning_rate": torch.tensor(1e-4), "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    moments = [[torch.zeros(3000) for _ in range(2)] for _ in range(2)]
    for number, gradient in enumerate(gradients, start=1):
        for masters, mine in (((whole, None), moments[0]), ((weight, low), moments[1])):
            adamw_(*masters, gradient, *mine, updates=torch.tensor(float(number)), **scalars)
        assert torch.equal(joined(weight, low), whole)
        assert torch.equal(weight, halves(whole)[0])
    assert all(torch.equal(one, other) for one, other in zip(*moments, strict=True))


if __name__ == "__main__":
    check_that_halves_are_updated_as_the_whole()
    check_that_what_is_no_number_shows_in_the_weights()
    for packed in (False, True):
        for precision in ("float32", "bfloat16"):
            expected, actual = (replica(handed, packed, precision) for handed in (False, True))
            expected_totals, totals = train(expected, packed), train(actual, packed)
            loose = precision == "bfloat16"  # weights round ties the other way, and a bit in a weight is one in what follows
            for ours, theirs in zip(actual.moments.by_name(actual.shards), expected.moments.by_name(expected.shards), strict=True):
                for name, other in theirs.items():
                    assert ours[name].dtype == torch.float32
                    assert (ours[name] - other).norm() < (5e-2 if loose else 1e-5) * other.norm()
            for one, other in zip(totals, expected_totals, strict=True):
                assert (one.skipped, one.nonfinite, one.labelled) == (other.skipped, other.nonfinite, other.labelled)
                assert one.skipped or abs(one.grad_norm / other.grad_norm - 1) < (5e-2 if loose else 1e-4)
            assert [total.skipped for total in totals] == [False, False, True, False]
            assert actual.updates == 3
            actual.warm_up([SmallRows().row(0)])
            assert actual.updates == 3
