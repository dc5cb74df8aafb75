"""Training checkpoints: everything that the next step depends on, in a folder that is either whole or not there.

    <folder>/checkpoints/step-00000200/
        model.safetensors      fp32 master weights under the names that serving expects
        optimizer.safetensors  the optimiser's moments: exp_avg.<name>, exp_avg_sq.<name>
        state.json             step, next row, counters, the settings it belongs to, sha256 of the two files

    <folder>/best/model.safetensors        the weights with the longest acceptance length, where training is evaluated as it goes on

Rows, anchors and learning rates are functions of the step, so there is no generator and no schedule to save. A checkpoint is written under a
temporary name, synced and renamed; one that turns out damaged is passed over for the one before it, with a warning, and never silently
for a fresh start.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from dflash_core.disk import clear_disk_errors
from dflash_core.errors import CheckpointError
from dflash_core.stages import atomic_write, file_sha256, save_tensors, sync_files, sync_folder

logger = logging.getLogger(__name__)

FORMAT = 1
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
CHECKPOINTS_KEPT = "Checkpoints before it are kept, training.keep_checkpoints of them: free some space, and start again to go on from the last one."
BEST, FINAL = "best/model.safetensors", "final/model.safetensors"


def kept_weights(keep: str, *, has_best: bool) -> str:
    """The weights to evaluate and export under ``training.keep``, within the folder of the training."""
    return BEST if keep == "best" and has_best else FINAL


@dataclass(frozen=True)
class TrainingState:
    """Where a run stands after ``step`` optimiser steps.

    step:             finished steps, skipped ones included
    next_ordinal:     the first row that has not been used
    updates:          steps that changed the weights, which AdamW's bias correction counts
    skipped:          steps skipped for non-finite gradients, over the whole run
    skipped_in_row:   of these, those just now, one after the other
    slots:            supervised slots trained on
    seconds:          time spent in steps, over all starts
    """

    step: int = 0
    next_ordinal: int = 0
    updates: int = 0
    skipped: int = 0
    skipped_in_row: int = 0
    slots: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class TrainingCheckpoint:
    """A checkpoint in memory: fp32 tensors on the CPU, by parameter name. Muon's second moments are of the vectors alone."""

    state: TrainingState
    weights: Mapping[str, Tensor]
    exp_avg: Mapping[str, Tensor]
    exp_avg_sq: Mapping[str, Tensor]


@dataclass(frozen=True)
class BestWeights:
    """The weights in ``best/model.safetensors``: those after ``step``."""

    step: int
    acceptance_length: float


def save_best(folder: Path, weights: Mapping[str, Tensor], best: BestWeights, key: str) -> None:
    """Write ``<folder>/best/model.safetensors``. One file holds the weights and what they were found to be, so that it is always of one step.

    Args:
        key: of what the acceptance length was measured with
    """
    with clear_disk_errors(folder, _bytes_of(weights), CHECKPOINTS_KEPT, CheckpointError), atomic_write(folder / BEST) as temporary:
        save_tensors(weights, temporary, metadata={**{name: repr(value) for name, value in dataclasses.asdict(best).items()}, "key": key})


def read_best(folder: Path, key: str) -> BestWeights | None:
    """What ``save_best`` noted in the file; None if there is none, if it cannot be read, or if it was measured with something else.

    It may be of a later step than the checkpoint that training resumes from: those weights were trained and measured all the same.
    """
    try:
        with safe_open(folder / BEST, "pt") as file:
            noted = file.metadata() or {}
        best = BestWeights(int(noted["step"]), float(noted["acceptance_length"]))
    except (OSError, KeyError, ValueError, SafetensorError):
        return None
    return best if noted.get("key") == key else None


def folder_of_step(folder: Path, step: int) -> Path:
    """The checkpoint of a step among the checkpoints in ``folder``."""
    return folder / f"step-{step:08d}"


def save_training_checkpoint(folder: Path, checkpoint: TrainingCheckpoint, settings: Mapping[str, Any], keep: int) -> Path:
    """Write ``<folder>/step-<step>`` atomically, then delete all others but the ``keep`` - 1 before it.

    Args:
        settings: flat field path → JSON value of everything that the course of training depends on; a resume is refused when they differ
    Returns: the checkpoint's folder.
    Raises:
        CheckpointError: the disk is full; the checkpoints before it are kept.
    """
    final = folder_of_step(folder, checkpoint.state.step)
    moments = {f"{kind}.{name}": tensor for kind in ("exp_avg", "exp_avg_sq") for name, tensor in getattr(checkpoint, kind).items()}
    with clear_disk_errors(folder, _bytes_of(checkpoint.weights) + _bytes_of(moments), CHECKPOINTS_KEPT, CheckpointError):
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".step-*.tmp"):  # of a process that was killed while it wrote
            shutil.rmtree(leftover)
        temporary = folder / f".{final.name}.tmp"
        temporary.mkdir()
        try:
            save_tensors(checkpoint.weights, temporary / MODEL)
            save_tensors(moments, temporary / OPTIMIZER)
            facts = {
                "format": FORMAT,
                "state": dataclasses.asdict(checkpoint.state),
                "settings": dict(settings),
                "sha256": {name: file_sha256(temporary / name) for name in (MODEL, OPTIMIZER)},
            }
            (temporary / STATE).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
            sync_files(temporary)
        except BaseException:  # on a disk that is full, what was written of it would take up what is freed next
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        if final.exists():  # a damaged one of the same step, passed over when this run began
            shutil.rmtree(final)
        temporary.rename(final)
        sync_folder(folder)
    known = _newest_first(folder)
    newest = known.index(final)
    for other in known[:newest] + known[newest + keep :]:  # those before it in the list are of later steps: damaged, and passed over by this run
        shutil.rmtree(other)
    return final


def newest_training_checkpoint(folder: Path, settings: Mapping[str, Any]) -> TrainingCheckpoint | None:
    """The newest checkpoint that is whole, or None where there has been none yet.

    Raises:
        CheckpointError: it belongs to other settings (names every field with both values), or all checkpoints are damaged.
    """
    damaged: list[str] = []
    for candidate in _newest_first(folder):
        try:
            checkpoint = _load(candidate, settings)
        except _DamagedError as damage:
            damaged.append(f"{candidate.name}: {damage}")
            continue
        if damaged:
            logger.warning("Resuming from %s, because newer checkpoints are damaged (%s).", candidate, "; ".join(damaged))
        return checkpoint
    if damaged:
        raise CheckpointError(f"Every checkpoint in {folder} is damaged ({'; '.join(damaged)}). Delete the folder to train from the beginning.")
    return None


def check_same_settings(found: Mapping[str, Any], expected: Mapping[str, Any], where: Path) -> None:
    """Raises ``CheckpointError`` naming each field that differs, with both values."""
    changed = [
        f"{name} is {json.dumps(expected.get(name))} and was {json.dumps(found.get(name))}"
        for name in sorted({*found, *expected})
        if found.get(name) != expected.get(name)
    ]
    if changed:
        raise CheckpointError(
            f"{where} was made with other settings: {'; '.join(changed)}. Put the settings back to resume, or train in another folder to begin anew."
        )


def _bytes_of(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


class _DamagedError(Exception):
    pass


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"), reverse=True) if folder.is_dir() else []


def _load(folder: Path, settings: Mapping[str, Any]) -> TrainingCheckpoint:
    try:
        facts = json.loads((folder / STATE).read_bytes())
        if facts["format"] != FORMAT:
            raise CheckpointError(
                f"{folder} has format {facts['format']}, this version reads {FORMAT}. Use the version that wrote it, or train in another folder."
            )
        state, found, digests = TrainingState(**facts["state"]), facts["settings"], facts["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _DamagedError(f"{STATE} cannot be read ({error})") from error
    check_same_settings(found, json.loads(json.dumps(settings)), folder)
    try:
        for name in (MODEL, OPTIMIZER):
            if (digest := file_sha256(folder / name)) != digests[name]:
                raise _DamagedError(f"{name} has sha256 {digest[:12]} instead of {digests[name][:12]}")
        weights, moments = load_file(folder / MODEL), load_file(folder / OPTIMIZER)
    except (OSError, KeyError, SafetensorError) as error:
        raise _DamagedError(str(error)) from error
    split = {
        kind: {name.removeprefix(f"{kind}."): tensor for name, tensor in moments.items() if name.startswith(f"{kind}.")}
        for kind in ("exp_avg", "exp_avg_sq")
    }
    return TrainingCheckpoint(state, weights, split["exp_avg"], split["exp_avg_sq"])
