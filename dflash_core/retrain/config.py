"""The settings of a retraining: those of a pipeline, and a section ``retrain``.

``data.sources`` are the old data: the held-out prompts come from there, and what is replayed. ``retrain.prompts`` names where
new ones arrive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from dflash_core.config import PipelineConfig, PositiveInt, Section, parse_as, read_tree
from dflash_core.errors import Problem


class RetrainSection(Section):
    """What a retraining takes, and when its drafter becomes the champion."""

    prompts: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)] = Field(
        min_length=1,
        description="Where new prompts arrive: files, folders, or patterns (.jsonl, .jsonl.gz, .parquet, .log). A .jsonl or a .log may grow.",
    )
    min_new_prompts: PositiveInt = Field(1, description="With fewer new prompts nothing is done; they wait for the next time.")
    replay_fraction: float = Field(0.5, ge=0.0, lt=1.0, description="Share of old prompts among those that are trained on.")
    margin: float = Field(
        0.01, ge=0.0, description="How much longer the acceptance length must be than the champion's, as a share of it: 0.01 is one per cent."
    )


class RetrainConfig(PipelineConfig):
    """Everything a retraining needs."""

    retrain: RetrainSection = Field(description="New prompts, replay of old ones, and promotion.")

    @model_validator(mode="after")
    def _rules_of_retraining(self) -> RetrainConfig:
        problems = list(_problems_of_retraining(self))
        if problems:
            raise PydanticCustomError("cross_field", "{text}", {"text": "; ".join(map(str, problems)), "problems": problems})
        return self


def _problems_of_retraining(config: RetrainConfig) -> Iterator[Problem]:
    if (drawn := next((index for index, item in enumerate(config.data.sources) if item.drawn), None)) is not None:
        remedy = "Draw them once with 'dflashctl prompts', and name that file"
        yield Problem(f"data.sources.{drawn}.source", "target", "the old prompts of a retraining are read before there is a target", remedy)
    if config.training.max_steps is not None:
        message = "how many prompts arrive is not known beforehand, and a run that wants more steps than they hold fails"
        yield Problem("training.max_steps", config.training.max_steps, message, "Leave it out and set training.epochs")
    if config.drafter.initial_checkpoint is not None:
        message = "a retraining begins from the registered champion"
        yield Problem("drafter.initial_checkpoint", str(config.drafter.initial_checkpoint), message, "Leave it out")
    if not config.tracking.enabled:
        yield Problem("tracking.enabled", False, "the champion is a registered model", "Set it to true")


def load_retrain_config(path: str | Path, overrides: Sequence[str] = ()) -> RetrainConfig:
    """Read a YAML file with a section ``retrain``. Raises ``ConfigError`` as ``load_config`` does."""
    return parse_as(RetrainConfig, read_tree(RetrainConfig, path, overrides), str(path))


def load_any_config(path: str | Path, overrides: Sequence[str] = ()) -> PipelineConfig:
    """A ``RetrainConfig`` if the file has a section ``retrain``, else a ``PipelineConfig``. Raises ``ConfigError`` as ``load_config`` does."""
    tree = read_tree(PipelineConfig, path, overrides)
    return parse_as(RetrainConfig if "retrain" in tree else PipelineConfig, tree, str(path))
