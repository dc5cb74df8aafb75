"""Acceptance as it is measured while training goes on."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from dflash_core.config import PipelineConfig
from dflash_core.drafter import DFlashDrafter
from dflash_core.errors import DataError
from dflash_core.evaluation import HeldoutJudge, evaluate_drafter
from dflash_core.target import TargetModel
from tests.evaluation.conftest import TOKENS, prompts_of


def during(config: PipelineConfig, max_new_tokens: int) -> PipelineConfig:
    settings = config.training.evaluation.model_copy(update={"every_steps": 1, "max_new_tokens": max_new_tokens})
    return config.model_copy(update={"training": config.training.model_copy(update={"evaluation": settings})})


def test_it_is_the_acceptance_of_the_evaluation_after_training_for_whatever_weights_the_drafter_has_by_then(
    config: PipelineConfig, target: TargetModel, drafter: DFlashDrafter, tmp_path: Path
) -> None:
    prompts = prompts_of([prompt + [5] * (3 * n) for n, prompt in enumerate(TOKENS * 2)])  # more than fit into a batch, of different lengths
    judge = HeldoutJudge(during(config, config.evaluation.max_new_tokens), target, prompts)
    found = []
    for seed in (1, 2):
        drafter.init_weights(seed)
        with torch.no_grad():
            drafter.norm.weight.mul_(seed)  # sharper or not, the same buffers
        expected = evaluate_drafter(config, target, copy.deepcopy(drafter), prompts, tmp_path / str(seed)).trained.acceptance
        figures = judge.measure(drafter, lambda: True)
        assert figures is not None
        assert figures["acceptance_length"] == pytest.approx(expected.mean_of_requests)
        assert figures["acceptance_length_pooled"] == pytest.approx(expected.pooled)
        assert [figures[f"accepted_slot_{slot}"] for slot in (1, 2, 3)] == pytest.approx(list(expected.per_position))
        found.append(figures)
    assert found[0] != found[1]


def test_it_gives_up_when_asked_to_and_refuses_to_measure_nothing(config: PipelineConfig, target: TargetModel, drafter: DFlashDrafter) -> None:
    assert HeldoutJudge(during(config, 4), target, prompts_of()).measure(drafter, lambda: False) is None
    with pytest.raises(DataError, match="left no prompt to evaluate on during training"):
        HeldoutJudge(during(config, 4), target, [])


def test_figures_of_other_prompts_or_lengths_are_not_compared(config: PipelineConfig, target: TargetModel) -> None:
    keys = [
        HeldoutJudge(during(config, tokens), target, prompts).key
        for tokens, prompts in ((4, prompts_of()), (5, prompts_of()), (4, prompts_of(TOKENS[:2])))
    ]
    assert len(set(keys)) == 3
