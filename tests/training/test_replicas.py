"""The step: one loss and one gradient however the batch is split over replicas, micro-steps and rows."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from dflash_core.config import PipelineConfig
from dflash_core.drafter import DFlashConfig, DFlashDrafter, block_labels, block_positions, block_tokens, dflash_dense_mask, layer_masks
from dflash_core.feed import Row, collate
from dflash_core.objective import slot_weights
from dflash_core.training.replica import Replica
from dflash_core.training.sync import Tail
from tests.training.small import INFO, SmallRows, config, final_weights, losses, run, vocabulary


def replica(index: int = 0, **training: object) -> Replica:
    cfg = config(**training)
    drafter_config = DFlashConfig.from_target(INFO, cfg.drafter)
    made = Replica(index, torch.device("cpu"), cfg, drafter_config, vocabulary())
    made.load({name: parameter.detach() for name, parameter in DFlashDrafter(drafter_config).init_weights(0).named_parameters()})
    made.begin_step()
    return made


def gradient_of(groups: list[list[int]], weighting: str = "decay") -> torch.Tensor:
    """Averaged gradient and loss of rows in ``groups``: one micro-step a group, in turn on two replicas whose buffers are summed."""
    pair = [replica(0, objective={"weighting": weighting}), replica(1, objective={"weighting": weighting})]
    for i, ordinals in enumerate(groups):
        pair[i % 2].micro_step(collate([SmallRows().row(ordinal) for ordinal in ordinals]))
    total = pair[0].summed[0] + pair[1].summed[0]
    P = pair[0].layout.size
    denominator = total[P + Tail.DENOMINATOR]
    return torch.cat([total[:P] / denominator, total[P : P + 1] / denominator])


@settings(max_examples=8, deadline=None)
@given(data=st.data(), weighting=st.sampled_from(["decay", "dpace", "uniform"]))
def test_loss_and_gradient_do_not_depend_on_how_rows_are_split(data: st.DataObject, weighting: str) -> None:
    order = data.draw(st.permutations(range(6)))
    cuts = sorted(data.draw(st.sets(st.integers(1, 5), min_size=1, max_size=4)))
    groups = [list(order[a:b]) for a, b in zip([0, *cuts], [*cuts, 6], strict=True)]
    torch.testing.assert_close(gradient_of(groups, weighting), gradient_of([list(range(6))], weighting), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("window", [{}, {"sliding_window": 5, "full_attention_layers": [1]}], ids=["full", "windows"])
def test_the_step_is_that_of_plain_autograd_clipping_and_adamw(window: dict[str, Any]) -> None:
    made, cfg = replica(max_grad_norm=0.05, drafter=window), config(drafter=window)
    rows = [SmallRows().row(i) for i in range(2)]
    drafter_config = DFlashConfig.from_target(INFO, cfg.drafter)
    plain = DFlashDrafter(drafter_config).init_weights(0)
    total, denominators = torch.zeros(()), torch.zeros(())
    for row in rows:
        labels = block_labels(row.tokens[None], row.loss_mask[None], row.document_ids[None], row.anchors[None], 4)
        embeddings = vocabulary().embed(block_tokens(row.tokens[None], row.anchors[None], drafter_config)).flatten(1, 2)
        hidden = plain(
            row.features[None], embeddings, row.positions[None], block_positions(row.positions[None], row.anchors[None], 4).flatten(1),
            layer_masks(lambda window, row=row: dflash_dense_mask(row.anchors[None], row.document_ids[None], 4, window), drafter_config),
        )  # fmt: skip
        nll = torch.nn.functional.cross_entropy(vocabulary().logits(hidden)[0], labels.flatten(), reduction="none", ignore_index=-100)
        weights, denominator = slot_weights(cfg.objective, labels)
        total, denominators = total + (weights.flatten() * nll).sum(), denominators + denominator
    (total / denominators).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
    matrices = [parameter for parameter in plain.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in plain.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95)).step()

    for row in rows:
        made.micro_step(collate([row]))
    made.close_step(False)
    made.apply(0.01)
    totals = made.totals_later()()
    assert totals.loss == pytest.approx((total / denominators).item(), rel=1e-5)
    assert totals.grad_norm == pytest.approx(norm.item(), rel=1e-4)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(
            made.layout.views(made.moments.masters_P)[name], parameter.detach(), rtol=1e-4, atol=1e-4
        )  # 1 % of a step: the first one is the sign of a gradient, however small


def test_warm_up_leaves_weights_moments_and_count_as_they_were() -> None:
    made = replica()
    before = made.checksums()
    made.warm_up([SmallRows().row(0)])
    assert torch.equal(made.checksums(), before)
    assert made.updates == 0
    assert not made.summed[0].any()


def test_a_non_finite_gradient_changes_nothing_and_is_told() -> None:
    made = replica()
    before = made.checksums()
    row = SmallRows().row(0)
    row.features[5] = float("nan")
    made.micro_step(collate([row]))
    made.close_step(False)
    made.apply(0.01)
    totals = made.totals_later()()
    assert totals.skipped
    assert totals.nonfinite == (0,)
    assert torch.equal(made.checksums(), before)


def test_with_bfloat16_the_masters_stay_float32_and_small_updates_are_not_lost() -> None:
    made = replica(precision="bfloat16")
    assert {parameter.dtype for parameter in made.drafter.parameters()} == {torch.bfloat16}
    before = made.moments.masters_P.clone()
    for _ in range(3):
        made.begin_step()
        made.micro_step(collate([SmallRows().row(0)]))
        made.close_step(False)
        made.apply(1e-4)
    norms = slice(made.layout.num_decayed, None)
    moved = (made.moments.masters_P[norms] != before[norms]) & (before[norms] != 0)
    assert moved.any()  # around 1.0 a bf16 weight moves by 2**-8 at least: an update of 1e-4 would have been lost
    assert (made.moments.masters_P[norms] - before[norms]).abs().max() < 2**-9


def test_one_to_four_replicas_give_the_same_loss_curve(tmp_path: Path) -> None:
    curves = {}
    for replicas in (1, 2, 3, 4):
        run(config(replicas, accumulation_steps=12 // replicas, max_steps=5), tmp_path / str(replicas))
        curves[replicas] = losses(tmp_path / str(replicas))
    assert curves[1][-1] < curves[1][0] - 0.05
    for replicas in (2, 3, 4):
        assert all(math.isclose(a, b, rel_tol=2e-5) for a, b in zip(curves[1], curves[replicas], strict=True)), curves


@pytest.mark.parametrize(("replicas", "precision"), [(1, "float32"), (2, "float32"), (3, "float32"), (4, "float32"), (2, "bfloat16")])
def test_a_sharded_optimiser_gives_the_weights_of_the_other(tmp_path: Path, replicas: int, precision: str) -> None:
    for kind in ("all_reduce", "sharded"):
        run(config(replicas, max_steps=4, max_grad_norm=1e3, precision=precision, sync=kind, compare_replicas_every=1), tmp_path / kind)
    assert losses(tmp_path / "sharded") == pytest.approx(losses(tmp_path / "all_reduce"), rel=1e-6)
    if replicas < 3:  # of more, the order in which Gloo adds depends on where in the buffer a number lies
        assert final_weights(tmp_path / "sharded") == final_weights(tmp_path / "all_reduce")
    else:
        ours, theirs = (load_file(tmp_path / kind / "final" / "model.safetensors") for kind in ("sharded", "all_reduce"))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_a_sharded_optimiser_clips_skips_and_resumes_as_the_other_does(tmp_path: Path) -> None:
    class Poisoned(SmallRows):
        def row(self, ordinal: int) -> Row:
            row = super().row(ordinal)
            if ordinal == 4:
                row.features[7, 3] = float("nan")
            return row

    def settings(kind: str) -> PipelineConfig:
        return config(3, max_steps=6, max_grad_norm=0.05, checkpoint_every=3, keep_checkpoints=9, sync=kind)

    for kind in ("all_reduce", "sharded"):
        assert run(settings(kind), tmp_path / kind, Poisoned()).skipped_steps == 1
    expected = load_file(tmp_path / "all_reduce" / "final" / "model.safetensors")
    # the checkpoint of either is a checkpoint of the other
    shutil.copytree(tmp_path / "sharded" / "checkpoints" / "step-00000003", tmp_path / "resumed" / "checkpoints" / "step-00000003")
    run(settings("all_reduce"), tmp_path / "resumed", Poisoned())
    for kind in ("sharded", "resumed"):
        for name, weight in load_file(tmp_path / kind / "final" / "model.safetensors").items():
            torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-5)


def test_a_replica_holds_its_shard_of_masters_and_moments_alone() -> None:
    whole, part = replica(), replica(1, replicas=3, sync="sharded")
    assert all(buffer.numel() == part.layout.size // 3 for buffer in part.shards)
    assert part.layout.size - whole.layout.size < 3 * 64
    assert part.weights.numel() == part.layout.size


def test_every_row_is_trained_on_once_and_in_the_order_of_ordinals(tmp_path: Path) -> None:
    lines = {}
    for settings_ in ({"accumulation_steps": 2}, {"rows_per_microstep": 2}):
        folder = tmp_path / str(settings_)
        result = run(config(2, max_steps=3, queue_rows=8, **settings_), folder)
        lines[str(settings_)] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert result.slots == sum(int((labels_of(i) >= 0).sum()) for i in range(12))
    first, second = lines.values()
    assert [line["loss"] for line in first] == pytest.approx([line["loss"] for line in second], rel=1e-5)


def labels_of(ordinal: int) -> torch.Tensor:
    row = SmallRows().row(ordinal)
    return block_labels(row.tokens[None], row.loss_mask[None], row.document_ids[None], row.anchors[None], 4)
