"""Rules that need more than the settings: the target's own configuration, the files, the devices, the amount of data.

All of them run before anything expensive and raise ``ConfigError`` with field path, value and remedy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from dflash_core.config import PipelineConfig
from dflash_core.errors import ConfigError, Problem
from dflash_core.target.info import TargetInfo


def check_environment(config: PipelineConfig, source: str = "config") -> None:
    """Files that are named exist and devices that are named are there. Raises ``ConfigError``."""
    _raise(source, [*_file_problems(config), *_device_problems(config)])


def check_target(config: PipelineConfig, info: TargetInfo, source: str = "config") -> None:
    """The drafter's settings fit the target. Raises ``ConfigError``."""
    _raise(source, list(_target_problems(config, info)))


def check_schedule(config: PipelineConfig, steps_available: int, source: str = "config") -> None:
    """The data lasts for the steps that are asked for. Raises ``ConfigError``."""
    training = config.training
    if steps_available < 1:
        problem = Problem(
            "training.epochs", training.epochs,
            f"the data holds less than one step of {config.rows_per_step} rows of {training.row_length} tokens",
            "Add prompts, lower training.row_length or accumulation_steps, or raise training.epochs",
        )  # fmt: skip
        raise ConfigError(source, [problem])
    if training.max_steps is not None and training.max_steps > steps_available:
        problem = Problem(
            "training.max_steps", training.max_steps, f"the schedule is longer than the data: {training.epochs} epochs hold {steps_available} steps",
            f"Set training.max_steps to at most {steps_available}, raise training.epochs, or add prompts",
        )  # fmt: skip
        raise ConfigError(source, [problem])


def _raise(source: str, problems: Sequence[Problem]) -> None:
    if problems:
        raise ConfigError(source, problems)


def _file_problems(config: PipelineConfig) -> Iterator[Problem]:
    for index, item in enumerate(config.data.sources):
        if "://" not in item.source and not item.source.startswith("builtin:") and not Path(item.source).is_file():
            path = f"data.sources.{index}.source"
            yield Problem(path, item.source, "there is no such file", "Correct the path; it is relative to the folder you start in")
    cache = config.data.response_cache
    if cache is not None and not cache.is_file():
        yield Problem("data.response_cache", str(cache), "there is no such file", "Correct the path or leave it out")
    start = config.drafter.initial_checkpoint
    if start is not None and not (start / "config.json").is_file():
        yield Problem(
            "drafter.initial_checkpoint", str(start), "is not a drafter folder: it has no config.json", "Name a folder that 'dflashctl export' wrote"
        )


def _device_problems(config: PipelineConfig) -> Iterator[Problem]:
    named = [("target.device", config.target.device), ("evaluation.device", config.evaluation.device)]
    named += [(f"training.devices.{index}", device) for index, device in enumerate(config.training.devices)]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for path, device in named:
        kind, _, index_text = device.partition(":")
        if kind == "cuda" and int(index_text or 0) >= count:
            have = f"this machine has cuda:0 to cuda:{count - 1}" if count else "this machine has no CUDA device"
            yield Problem(path, device, f"there is no such device; {have}", "Name a device that is here; 'dflashctl doctor' lists them")


def _target_problems(config: PipelineConfig, info: TargetInfo) -> Iterator[Problem]:
    drafter = config.drafter
    deepest = info.num_layers - 2
    taps = drafter.tap_layers
    if taps is not None and taps[-1] > deepest:
        yield Problem(
            "drafter.tap_layers", list(taps), f"the target has {info.num_layers} layers, so taps go up to {deepest}", "Name layers within the target"
        )
    elif taps is None and config.num_taps > max(1, info.num_layers - 3):
        field = "drafter.num_taps" if drafter.num_taps else "drafter.num_layers"
        yield Problem(field, config.num_taps, f"more taps than the target's {info.num_layers} layers can give", "Lower drafter.num_taps")
    if drafter.mask_token_id >= info.vocab_size:
        yield Problem(
            "drafter.mask_token_id", drafter.mask_token_id, f"beyond the target's vocabulary of {info.vocab_size}", "Choose a spare special token"
        )
    special = {"end of sequence": info.eos_token_ids, "padding": (info.pad_token_id,), "beginning of sequence": (info.bos_token_id,)}
    for meaning, tokens in special.items():
        if drafter.mask_token_id in tokens:
            yield Problem(
                "drafter.mask_token_id", drafter.mask_token_id, f"is the target's {meaning} token", "Choose a spare special token of the tokenizer"
            )
    if config.training.row_length > info.max_position_embeddings and config.data.max_length > info.max_position_embeddings:
        yield Problem(
            "data.max_length", config.data.max_length, f"longer than the target's {info.max_position_embeddings} positions", "Lower data.max_length"
        )
