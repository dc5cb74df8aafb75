"""Warm-up: everything that training will run is run here first, on the main thread, one device after the other, while no worker exists.

    report = warm_up(config, run_id=..., dataset=..., info=..., vocabulary=..., folder=...)     # leaves a TrainingSession for this run

Threads that compile at the same time break each other (see ``guard``).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dflash_core.checks import check_schedule
from dflash_core.config import PipelineConfig, digest_of
from dflash_core.drafter import DFlashConfig, DFlashDrafter, load_checkpoint, shape_differences, start_from_target
from dflash_core.errors import CheckpointError
from dflash_core.feed import LiveSamples, Loader, Row, RowSource, ShardRows, loaders_of, steps_available, target_loaders
from dflash_core.shards import TEACHER_COLUMNS, ShardDataset, expected_of
from dflash_core.target import TargetInfo, TargetVocabulary
from dflash_core.training.checkpoints import TrainingCheckpoint, TrainingState, newest_training_checkpoint
from dflash_core.training.compile_cache import found_graphs, with_compile_cache
from dflash_core.training.course import config_settings
from dflash_core.training.evaluator import Evaluator, Judge
from dflash_core.training.guard import compiled_graphs, prepare_for_threads
from dflash_core.training.memory import memory_in_use, prefer_expandable_segments
from dflash_core.training.ranks import check_launcher, this_rank
from dflash_core.training.replica import Replica, compute_dtype
from dflash_core.training.session import TrainingSession, intra_op_threads, require_main_thread
from dflash_core.training.sync import GradientSync, compare, connect, in_threads


@dataclass(frozen=True)
class DeviceWarmUp:
    """Warm-up of one replica: seconds, graphs that Dynamo traced, how many of them had been compiled before, memory in use before and after (bytes).

    Compiled before: by an earlier run, or for an earlier replica of this one.
    """

    replica: int
    device: str
    seconds: float
    graphs: int
    graphs_found: int
    memory_before: int
    memory_after: int


@dataclass(frozen=True)
class EvaluatorWarmUp:
    """Warm-up of the evaluator: seconds, graphs that it had compiled, memory in use on its device before and after (bytes).

    acceptance_length: of the weights that training goes on from
    """

    device: str
    seconds: float
    graphs: int
    memory_before: int
    memory_after: int
    acceptance_length: float


@dataclass(frozen=True)
class WarmUpReport:
    """What warm-up did. Small and JSON-able (``dataclasses.asdict``), fit to be returned by a task."""

    run_id: str
    config_digest: str
    seconds: float
    devices: tuple[DeviceWarmUp, ...]
    resumed_step: int
    total_steps: int
    num_parameters: int
    evaluator: EvaluatorWarmUp | None = None


def warm_up(
    config: PipelineConfig, *, run_id: str, dataset: ShardDataset | LiveSamples, info: TargetInfo, vocabulary: TargetVocabulary, folder: Path,
    judge: Callable[[], Judge] | None = None,
) -> WarmUpReport:  # fmt: skip
    """Build, load and warm every target and replica, on the main thread, and leave a ``TrainingSession`` for ``run_id`` and these settings.

    Args:
        dataset:    hidden states of ``info``'s tapped layers; or the samples that ``info``'s target is run over during training
        vocabulary: the target's embedding and head; copied to each device that lacks them
        folder:     of the training stage; its newest whole checkpoint is resumed
        judge:      makes who measures the weights as ``training.evaluation`` says; without it nothing is evaluated

    Raises:
        WarmUpError: not called on the main thread.
        ShardError: the shards are of another target or of other layers, or trimmed to less than the drafter sees.
        TargetError: a target that is to feed training cannot be loaded or run.
        ConfigError: the data holds less than one step.
        CheckpointError: the checkpoint in ``folder`` belongs to other settings, or all are damaged.
    """
    require_main_thread("Warm-up")
    check_launcher(config)
    tap_layers = DFlashConfig.from_target(info, config.drafter).tap_layers
    settings = {**config_settings(config), "digest of the target": info.digest}
    if isinstance(dataset, ShardDataset):
        dataset.card.require(expected_of(info, tap_layers), dataset.folder)
        dataset.card.require_window(config.drafter.farthest_seen, dataset.folder)
        further = TEACHER_COLUMNS[config.extraction.teacher] if config.objective.distillation.weight > 0 else ()
        loaders = loaders_of(ShardRows(dataset, config.training, config.run.seed, further=further))
        settings["digest of the shards"] = dataset.digest
    else:
        ranks = this_rank()
        targets = config.target_devices if ranks is None else config.target_devices[ranks.rank :: ranks.size]
        loaders = target_loaders(dataset, config, tap_layers, targets)
        settings["digest of the samples that the target is run over"] = dataset.samples.digest
    return warm_up_source(config, run_id=run_id, loaders=loaders, settings=settings, info=info, vocabulary=vocabulary, folder=folder, judge=judge)


def warm_up_source(
    config: PipelineConfig,
    *,
    run_id: str,
    loaders: Sequence[Loader],
    settings: Mapping[str, Any],
    info: TargetInfo,
    vocabulary: TargetVocabulary,
    folder: Path,
    judge: Callable[[], Judge] | None = None,
) -> WarmUpReport:
    """``warm_up`` for rows of any source. ``settings`` are the fields that a resumed run must have in common with its checkpoint.

    Raises also:
        TrainingError: the processes of a run under torchrun have different settings, or one has gone.
    """
    check_launcher(config)
    ranks = this_rank()
    require_main_thread("Warm-up")
    started = time.monotonic()
    prepare_for_threads()
    devices = [torch.device(name) for name in config.training.devices]
    if devices[0].type == "cuda":
        prefer_expandable_segments()
    drafter_config = DFlashConfig.from_target(info, config.drafter)
    source = loaders[0].source
    total_steps = count_steps(config, source)
    settings = {**settings, "optimiser steps of the run (training.max_steps, or what training.epochs hold)": total_steps}
    if ranks is not None:
        ranks.agree("settings", digest_of(settings))  # and none looks for a checkpoint before the first rank has cleaned up
    checkpoint = newest_training_checkpoint(folder / "checkpoints", settings)
    state = checkpoint.state if checkpoint else TrainingState()
    here = range(len(devices)) if ranks is None else range(ranks.rank, ranks.rank + 1)
    threads = max(1, torch.get_num_threads() // len(here)) if devices[0].type == "cpu" else torch.get_num_threads()
    rows = [source.row(i) for i in range(config.training.rows_per_microstep)]
    build = partial(_build, config, drafter_config, info, vocabulary, {index: devices[index] for index in here}, rows, checkpoint)
    with intra_op_threads(threads):
        compiles = devices[0].type == "cuda" or config.training.compile == "on"
        replicas, reports = with_compile_cache(devices, build) if compiles else build()
        if ranks is None:
            syncs = connect(devices, config.training.stall_timeout_s, config.training.sync)
        else:
            ranks.agree("step to go on from", str(state.step))  # waits until all are warm, which no collective could
            syncs = [ranks.connect(devices[ranks.rank], config.training.stall_timeout_s, config.training.sync)]
        rehearse(replicas, syncs)
        for row in rows:
            if row.give_back is not None:
                row.give_back(None)
        del checkpoint, build, rows
        gc.collect()
        evaluator = first = of_evaluator = None
        if judge is not None and config.training.evaluation.every_steps and replicas[0].index == 0:
            before, graphs = memory_in_use(torch.device(config.training.evaluation_device)), compiled_graphs()
            evaluator = Evaluator(judge(), replicas[0], drafter_config, folder)
            first = evaluator.warm_up(state.step)
            of_evaluator = EvaluatorWarmUp(
                str(evaluator.device), first.seconds, compiled_graphs() - graphs, before, memory_in_use(evaluator.device),
                first.figures["acceptance_length"],
            )  # fmt: skip
    TrainingSession(
        config, run_id, folder, list(loaders), settings, state, replicas, syncs, total_steps, threads, ranks, evaluator, first,
    ).register()  # fmt: skip
    return WarmUpReport(
        run_id, config.digest, time.monotonic() - started, tuple(reports), state.step, total_steps, drafter_config.num_parameters(), of_evaluator,
    )  # fmt: skip


def _build(
    config: PipelineConfig, drafter_config: DFlashConfig, info: TargetInfo, vocabulary: TargetVocabulary,
    devices: Mapping[int, torch.device], rows: Sequence[Row], checkpoint: TrainingCheckpoint | None,
) -> tuple[list[Replica], list[DeviceWarmUp]]:  # fmt: skip
    """Replicas, by index, with their weights, warmed up one after the other."""
    replicas, reports = [], []
    vocabularies: dict[torch.device, TargetVocabulary] = {}
    start = initial_drafter(config, drafter_config, info).state_dict() if checkpoint is None else checkpoint.weights
    for index, device in devices.items():
        before, graphs, found, watch = memory_in_use(device), compiled_graphs(), found_graphs(), time.monotonic()
        if device not in vocabularies:
            vocabularies[device] = _vocabulary_on(vocabulary, info, device, config.training.precision)
        replica = Replica(index, device, config, drafter_config, vocabularies[device])
        if checkpoint is None:
            replica.load(start)
        else:
            replica.load(start, checkpoint.exp_avg, checkpoint.exp_avg_sq, checkpoint.state.updates)
        replica.warm_up(rows)
        replicas.append(replica)
        seconds, graphs, found = time.monotonic() - watch, compiled_graphs() - graphs, found_graphs() - found
        reports.append(DeviceWarmUp(index, str(device), seconds, graphs, found, before, memory_in_use(device)))
    return replicas, reports


def rehearse(replicas: Sequence[Replica], syncs: Sequence[GradientSync]) -> None:
    """Sum and compare once, on the buffers and streams of training: what they need of memory is there before the first step.

    Collectives need all ranks at once, so this takes threads; nothing in them compiles, and they have ended when this returns.
    """

    def meet(number: int) -> None:
        replica, sync = replicas[number], syncs[number]
        with replica.on_device():
            sync.sum_gradients(replica)
            sync.share_weights(replica)
            compare(sync, replica.checksums(), replica.describe_checksum, 0)
            replica.begin_step()

    in_threads(len(replicas), meet, "rehearsal")


def initial_drafter(config: PipelineConfig, drafter_config: DFlashConfig, info: TargetInfo) -> DFlashDrafter:
    """The drafter that training starts from: ``drafter.initial_checkpoint`` if there is one, else as ``drafter.initial_weights`` says.

    Raises:
        CheckpointError: the initial checkpoint cannot be read, or is of a drafter of another shape.
        ConfigError: the target's layers do not fit the drafter's.
    """
    start = config.drafter.initial_checkpoint
    if start is None:
        if config.drafter.initial_weights == "target":
            return start_from_target(drafter_config, info, config.run.seed)
        return DFlashDrafter(drafter_config).init_weights(config.run.seed)
    drafter = load_checkpoint(start)
    differing = shape_differences(drafter.config, drafter_config)
    if differing:
        raise CheckpointError(f"The drafter in {start} has another shape: {'; '.join(differing)}. Choose one made for this target and settings.")
    return drafter


def count_steps(config: PipelineConfig, source: RowSource) -> int:
    """Optimiser steps of the run: ``training.max_steps``, else as many as the epochs hold. Raises ``ConfigError`` if the data cannot fill them."""
    available = steps_available(source, config.training.epochs, config.rows_per_step)
    check_schedule(config, available)
    return config.training.max_steps or available


def _vocabulary_on(vocabulary: TargetVocabulary, info: TargetInfo, device: torch.device, precision: str) -> TargetVocabulary:
    """The vocabulary on a device: float32 on the CPU, where the loss multiplies in float32 whatever the precision, else as the drafter computes."""
    dtype = torch.float32 if device.type == "cpu" else compute_dtype(precision)
    embedding = vocabulary.embedding_weight.to(device=device, dtype=dtype)
    tied = vocabulary.head_weight is vocabulary.embedding_weight
    return TargetVocabulary(embedding, embedding if tied else vocabulary.head_weight.to(device=device, dtype=dtype), info)
