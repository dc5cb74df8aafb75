"""Run in a process of its own with TRITON_INTERPRET=1: the CUDA replica's update and its ways with gradients against the CPU's, on the CPU."""

from __future__ import annotations

import torch

from dflash_core.drafter import DFlashConfig, DFlashDrafter
from dflash_core.feed import collate
from dflash_core.training.gradients import HandedGradients
from dflash_core.training.optimizer import FusedAdamW
from dflash_core.training.replica import Replica
from tests.training.small import INFO, SmallRows, config, vocabulary


def replica(handed: bool, packed: bool, precision: str) -> Replica:
    cfg = config(1, accumulation_steps=2 if packed else 1, precision=precision, max_grad_norm=0.5, weight_decay=0.1)
    drafter_config = DFlashConfig.from_target(INFO, cfg.drafter)
    made = Replica(0, torch.device("cpu"), cfg, drafter_config, vocabulary())
    if handed:
        dtype = torch.float32 if packed else getattr(torch, precision)
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


if __name__ == "__main__":
    for packed in (False, True):
        for precision in ("float32", "bfloat16"):
            expected, actual = (replica(handed, packed, precision) for handed in (False, True))
            expected_totals, totals = train(expected, packed), train(actual, packed)
            loose = precision == "bfloat16"  # the interpreter truncates to bfloat16, so the weights differ in their last bit
            for buffer, other in zip(actual.moments.buffers, expected.moments.buffers, strict=True):
                assert (buffer - other).norm() < (5e-2 if loose else 1e-5) * other.norm()
            for one, other in zip(totals, expected_totals, strict=True):
                assert (one.skipped, one.nonfinite, one.labelled) == (other.skipped, other.nonfinite, other.labelled)
                assert one.skipped or abs(one.grad_norm / other.grad_norm - 1) < (5e-2 if loose else 1e-4)
            assert [total.skipped for total in totals] == [False, False, True, False]
            assert actual.updates == 3
            actual.warm_up([SmallRows().row(0)])
            assert actual.updates == 3
