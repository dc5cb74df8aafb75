"""Distillation end to end: what is stored of the target is what it says of the very tokens that are learnt, and training takes it in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_core import pipeline, runners
from dflash_core.config import load_config
from dflash_core.drafter import DFlashConfig, block_labels, teacher_states
from dflash_core.errors import ConfigError, ShardError
from dflash_core.feed import collate
from dflash_core.feed.source import ShardRows
from dflash_core.plan import Plan
from dflash_core.shards import TEACHER_COLUMNS, ShardDataset
from tests.tiny_run import STEPS, write_tiny_run
from tests.training import small

STORED, DISTILLED = "extraction.teacher=last_hidden", "objective.distillation={weight: 0.5, temperature: 2.0}"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny_run(tmp_path_factory.mktemp("distillation"))
    plan = Plan(load_config(path, [STORED]))
    for stage in ("target", "responses", "samples", "shards"):
        pipeline.run_stage(plan, stage)
    return path


@pytest.mark.parametrize("kind", ["last_hidden", "topk"])
def test_the_teacher_of_a_slot_says_the_greedy_response_that_is_its_label(path: Path, kind: str) -> None:
    plan = Plan(load_config(path, [f"extraction.teacher={kind}", DISTILLED]))
    config, training = DFlashConfig.from_target(plan.info, plan.config.drafter), plan.config.training
    rows = ShardRows(ShardDataset(pipeline.run_stage(plan, "shards").folder), training, seed=0, further=TEACHER_COLUMNS[kind])
    batch = collate([rows.row(0), rows.row(1)])
    labels_BNS = block_labels(batch.tokens, batch.loss_mask, batch.document_ids, batch.anchors, config.block_size, config.spec)
    states = batch.last_hidden if kind == "last_hidden" else batch.topk_ids
    assert states is not None
    teacher_BNPX = teacher_states(states, batch.anchors, config.block_size, config.spec)
    said_BNP = teacher_BNPX[..., 0] if kind == "topk" else runners.vocabulary_of(plan).logits(teacher_BNPX).argmax(-1)
    labels_BNP = labels_BNS[..., config.spec.first_predicting_slot :]
    labelled = labels_BNP >= 0
    assert labelled.sum() > 20
    assert torch.equal(said_BNP[labelled], labels_BNP[labelled])


def test_training_with_it_gives_another_drafter_than_without_from_the_same_shards(path: Path) -> None:
    weights = []
    for settings in ([STORED], [STORED, DISTILLED], ["extraction.teacher=topk", "extraction.teacher_tokens=8", DISTILLED]):
        plan = Plan(load_config(path, settings))
        assert plan.stage("shards").cached == (settings[0] == STORED)
        pipeline.run_stage(plan, "shards")
        assert pipeline.run_stage(plan, "train").manifest.counts["steps"] == STEPS
        weights.append(runners.trained_drafter(plan).state_dict())
    plain, distilled, from_likeliest = (weight["fc.weight"] for weight in weights)
    assert not torch.equal(plain, distilled)
    assert not torch.equal(distilled, from_likeliest)


def test_replicas_distil_together_as_one_does_alone(tmp_path: Path) -> None:
    for replicas, accumulation in ((1, 2), (2, 1)):
        settings = small.config(replicas, accumulation_steps=accumulation, **small.DISTILLED)
        assert small.run(settings, tmp_path / str(replicas), small.RowsOfATeacher()).finished
    alone, together = small.losses(tmp_path / "1"), small.losses(tmp_path / "2")
    assert alone == pytest.approx(together, rel=1e-4)
    assert alone[-1] < alone[0]


def test_shards_without_the_column_are_refused_before_training_and_so_is_a_configuration_that_makes_none(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"stores nothing of the target's distribution.*Set extraction.teacher to last_hidden or topk"):
        load_config(path, [DISTILLED])
    plan = Plan(load_config(path))
    dataset = ShardDataset(pipeline.run_stage(plan, "shards").folder)
    with pytest.raises(ShardError, match=r"needs the column 'last_hidden'.*has features, tokens, loss_mask"):
        ShardRows(dataset, plan.config.training, seed=0, further=TEACHER_COLUMNS["last_hidden"])
