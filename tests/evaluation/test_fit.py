"""An evaluation that does not fit into memory says which setting asks for too much, before it decodes anything."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from dflash_core.config import PipelineConfig
from dflash_core.decoding import Room
from dflash_core.drafter import DFlashDrafter
from dflash_core.errors import InputError
from dflash_core.evaluation import HeldoutJudge, evaluate_drafter
from dflash_core.evaluation.fit import fits
from dflash_core.target import TargetModel
from tests.evaluation.conftest import prompts_of


def changed(config: PipelineConfig, section: str, **changes: object) -> PipelineConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=changes)})


def test_requests_that_do_not_fit_are_refused_before_anything_is_decoded(
    config: PipelineConfig, target: TargetModel, drafter: DFlashDrafter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = Room(3, 4, 12, 4)
    wanted = room.cache_bytes(target.info, drafter.config, 4)
    settings = changed(config, "evaluation", batch_sizes=(1, 3))
    monkeypatch.setattr("dflash_core.evaluation.fit.free_memory", lambda device: wanted - 1)
    with pytest.raises(
        InputError, match=r"evaluation\.batch_sizes = 3: keys and values of 3 requests of up to 20 positions take .* GiB, and cpu has"
    ):
        evaluate_drafter(settings, target, drafter, prompts_of(), tmp_path)
    assert not (tmp_path / "prompts.jsonl").exists()
    monkeypatch.setattr("dflash_core.evaluation.fit.free_memory", lambda device: wanted)
    assert evaluate_drafter(settings, target, drafter, prompts_of(), tmp_path).ways[0].way.batch_size == 3


def test_an_evaluator_that_does_not_fit_beside_the_training_is_refused(
    config: PipelineConfig, target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_core.evaluation.fit.free_memory", lambda device: 1000)
    with pytest.raises(InputError, match=r"training\.evaluation\.prompts = 8: .*Lower it or training\.evaluation\.max_new_tokens"):
        HeldoutJudge(config, target, prompts_of())


def test_what_torch_says_when_memory_runs_out_becomes_a_setting_and_a_remedy(target: TargetModel, drafter: DFlashDrafter) -> None:
    expected = re.escape(
        "evaluation.max_new_tokens = 100: decoding 2 requests of up to 108 positions takes more than the memory of cpu. Lower it, or"
    )
    with pytest.raises(InputError, match=expected), fits(target, Room(2, 4, 100, 4), drafter.config, "evaluation.max_new_tokens", 100):
        raise torch.OutOfMemoryError
