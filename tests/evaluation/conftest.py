from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from dflash_core.config import PipelineConfig, parse_config
from dflash_core.drafter import DFlashConfig, DFlashDrafter
from dflash_core.evaluation import EvaluationPrompt
from dflash_core.target import TargetModel
from tests.target.tiny import save_tiny_target

TOKENS = [[257, 40 + n, 41, 7 * n] for n in range(5)]


def prompts_of(tokens: Sequence[Sequence[int]] = TOKENS, name: str = "heldout") -> list[EvaluationPrompt]:
    """Prompts of a set, each a conversation of its own."""
    return [EvaluationPrompt(name, f"prompt-{number}", f"prompt-{number}", tuple(prompt)) for number, prompt in enumerate(tokens)]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_target("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture
def target(tiny_folder: str) -> TargetModel:
    return TargetModel.from_pretrained(tiny_folder, dtype=torch.float32)


@pytest.fixture
def config() -> PipelineConfig:
    return parse_config(
        {
            "target": {"model": "tiny"},
            "data": {"sources": [{"source": "prompts.jsonl"}], "max_length": 64},
            "drafter": {"num_layers": 1, "block_size": 4, "mask_token_id": 259, "tap_layers": [0, 2]},
            "training": {"row_length": 64, "num_anchors": 8},
            "evaluation": {"max_new_tokens": 12, "untrained_prompts": 2},
        }
    )


@pytest.fixture
def drafter(target: TargetModel, config: PipelineConfig) -> DFlashDrafter:
    return DFlashDrafter(DFlashConfig.from_target(target.info, config.drafter)).init_weights(1)
