"""A target's weights, from its folder into a model of Transformers on the devices where it will run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from dflash_core.config import TargetConfig
from dflash_core.errors import TargetError
from dflash_core.target.info import TargetInfo, read_target_info
from dflash_core.target.spread import place, without_hooks


def load(info: TargetInfo, dtype: torch.dtype, devices: Sequence[str], trust_remote_code: bool) -> tuple[Any, tuple[int, ...]]:
    """The model, its layers spread over the devices in their order, and the first layer on each of them.

    Raises:
        TargetError: files are missing or damaged, weights do not fit the configuration, or the kind of model is not supported.
    """
    from transformers import AutoModelForCausalLM

    device_map: dict[str, str] | None = None
    first_layers: tuple[int, ...] = (0,)
    if len(devices) > 1:
        device_map, first_layers = place(info, devices, trust_remote_code)
    elif info.quantisation:
        device_map = {"": devices[0]}  # packed weights go where they stay at once
    try:
        with _no_progress_bar():
            model, report = AutoModelForCausalLM.from_pretrained(
                info.path,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
                device_map=device_map,
            )
    except Exception as error:  # Transformers raises many kinds here; all mean that this model cannot be used
        raise TargetError(
            f"{info.path}: the target cannot be loaded: {type(error).__name__}: {error}. Check the folder and the installed transformers."
        ) from error
    absent = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if absent:
        raise TargetError(
            f"{info.path}: {len(absent)} tensors are missing from the weights or are not of the shape in config.json: {', '.join(absent[:5])}"
            ". They would be random numbers. Fetch the model again, or correct its config.json."
        )
    if info.quantisation:
        _unpack(model)
    return model.to(devices[0]) if device_map is None else without_hooks(model), first_layers


def find(source: str | Path, trust_remote_code: bool, revision: str | None) -> TargetInfo:
    """What is known of a target in a folder, or of the name of one, as in ``target.model``."""
    if Path(source).expanduser().is_dir():
        return read_target_info(source, trust_remote_code=trust_remote_code)
    from dflash_core.target.fetch import resolve_target

    return resolve_target(TargetConfig(model=str(source), revision=revision, trust_remote_code=trust_remote_code))


@torch.no_grad()
def _unpack(model: Any) -> None:
    """Run one token: some kinds of quantised weights (compressed-tensors) are unpacked by the first pass of the whole model; ours are of parts."""
    model.eval()(input_ids=torch.zeros((1, 1), dtype=torch.int64, device=model.get_input_embeddings().weight.device))


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
