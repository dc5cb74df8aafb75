"""Drafters whose training looks well and that are wrong: evaluation tells each, and none becomes the champion."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from dflash_core.config import PipelineConfig
from dflash_core.drafter import IGNORE, DFlashDrafter
from dflash_core.evaluation import EvaluationResult, evaluate_drafter
from dflash_core.retrain.decision import decide
from tests.evaluation.conftest import prompts_of
from tests.evaluation.planted import CONFIG, TAPS, WORDS, TellingTarget, served_as, train

STEPS = 300


def other_words(labels: Tensor) -> Tensor:
    """Every word under another's name: as learnable as the right labels."""
    return torch.where(labels == IGNORE, labels, (labels + 2) % WORDS)


@pytest.fixture(scope="module")
def target() -> TellingTarget:
    return TellingTarget()


@pytest.fixture(scope="module")
def right(target: TellingTarget) -> DFlashDrafter:
    drafter, accuracy = train(target, STEPS)
    assert accuracy > 0.8
    return drafter


@pytest.fixture(scope="module")
def shuffled(target: TellingTarget) -> DFlashDrafter:
    drafter, accuracy = train(target, STEPS, other_words)
    assert accuracy > 0.8, "its training has to look well"
    return drafter


def untrained() -> DFlashDrafter:
    return DFlashDrafter(CONFIG).init_weights(1)


def evaluated(config: PipelineConfig, target: TellingTarget, drafter: DFlashDrafter, before: DFlashDrafter, folder: Path) -> EvaluationResult:
    prompts = prompts_of([[7 + stride, begin] for stride in range(1, WORDS) for begin in range(2)])
    every = config.evaluation.model_copy(update={"untrained_prompts": None})
    return evaluate_drafter(config.model_copy(update={"evaluation": every}), cast(Any, target), drafter, prompts, folder, untrained=before)


def test_the_right_drafter_is_accepted_and_promoted(config: PipelineConfig, target: TellingTarget, right: DFlashDrafter, tmp_path: Path) -> None:
    result = evaluated(config, target, right, untrained(), tmp_path)
    assert result.untrained is not None
    assert result.lossless == 1.0
    assert result.untrained.acceptance.mean_of_requests < 1.3
    assert result.trained.acceptance.mean_of_requests > 2.2
    assert decide(result, margin=0.01, champion="1").promote


@pytest.mark.parametrize("fault", ["labels", "taps-one-deeper", "taps-one-higher", "rope-base"])
def test_a_drafter_with_a_fault_is_not_accepted_and_not_promoted(
    fault: str, config: PipelineConfig, target: TellingTarget, right: DFlashDrafter, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Labels and taps leave nothing of what training gained; a wrong base of the rope leaves a part, since it turns neighbours nearly alike."""
    if fault == "labels":
        wrong = request.getfixturevalue("shuffled")
    elif fault == "rope-base":
        wrong = served_as(right, rope_parameters={"rope_type": "default", "rope_theta": 2.0})
    else:
        wrong = served_as(right, tap_layers=tuple(layer + (1 if fault == "taps-one-deeper" else -1) for layer in TAPS))
    result = evaluated(config, target, wrong, right, tmp_path)  # the champion, on the same prompts
    assert result.untrained is not None
    length, champions = result.trained.acceptance.mean_of_requests, result.untrained.acceptance.mean_of_requests
    assert result.lossless == 1.0, "the target verifies, so the text is its own all the same"
    assert length - 1.0 < (0.5 if fault == "rope-base" else 0.35) * (champions - 1.0)
    decision = decide(result, margin=0.01, champion="1")
    assert not decision.promote
    if fault == "labels":  # as the first drafter, beside what it was before its training
        first = evaluated(config, target, wrong, untrained(), tmp_path / "first")
        assert not decide(first, margin=0.0, champion=None).promote
    assert f"Its acceptance length is {length:.3f}, that of the champion (version 1) {champions:.3f}" in decision.reasons[1]
