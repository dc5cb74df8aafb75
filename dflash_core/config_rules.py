"""Rules between settings, which no field can check by itself: sizes that must fit into each other, and ways of training that exclude each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dflash_core.config_section import devices_of
from dflash_core.errors import Problem

if TYPE_CHECKING:
    from dflash_core.config import DataConfig, DrafterConfig, EvaluationConfig, PipelineConfig

_MOST_DRAWN = 10_000_000


def cross_field_problems(config: PipelineConfig) -> Iterator[Problem]:
    """Everything that is wrong between the settings of a configuration."""
    yield from _sizes(config)
    yield from _drawn(config.data)
    yield from _taps(config.drafter)
    yield from _window(config.drafter)
    yield from _schedule_and_queue(config)
    yield from _devices(config)
    yield from _spread(config)
    yield from _online(config)
    yield from _torchrun(config)
    yield from _fp8(config)
    yield from _sets(config)
    yield from _distillation(config)


def _sizes(config: PipelineConfig) -> Iterator[Problem]:
    data, drafter, training, evaluation = config.data, config.drafter, config.training, config.evaluation
    if drafter.block_size > training.row_length:
        yield Problem(
            "drafter.block_size", drafter.block_size, f"a block does not fit into a row of training.row_length = {training.row_length}",
            "Lower drafter.block_size or raise training.row_length",
        )  # fmt: skip
    if data.max_length > training.row_length:
        yield Problem(
            "data.max_length", data.max_length, f"samples would not fit into rows of training.row_length = {training.row_length}",
            "Set data.max_length to at most training.row_length",
        )  # fmt: skip
    if training.num_anchors > training.row_length - 1:
        yield Problem(
            "training.num_anchors", training.num_anchors,
            f"a row of training.row_length = {training.row_length} has at most {training.row_length - 1} anchors",
            "Lower training.num_anchors; about an eighth of the row length is usual",
        )  # fmt: skip
    yield from block_size_problems(evaluation, drafter.block_size)


def block_size_problems(evaluation: EvaluationConfig, trained: int) -> Iterator[Problem]:
    """Block sizes of decoding that a drafter trained with blocks of ``trained`` tokens cannot draft."""
    asked = [("evaluation.block_size", evaluation.block_size)]
    asked += [(f"evaluation.block_sizes.{index}", size) for index, size in enumerate(evaluation.block_sizes)]
    for field, size in asked:
        if size is not None and size > trained:
            message = f"larger than the block size that the drafter is trained with, {trained}"
            yield Problem(field, size, message, "Decode with blocks of the trained size or smaller ones")


def _drawn(data: DataConfig) -> Iterator[Problem]:
    drawn = [index for index, item in enumerate(data.sources) if item.drawn]
    if not drawn:
        return
    first = drawn[0]
    limit = data.sources[first].limit
    if limit is None:
        yield Problem(f"data.sources.{first}.limit", None, "a target writes without end", "Say how many requests are to be drawn")
    elif limit > _MOST_DRAWN:
        message = f"more requests than the {_MOST_DRAWN:,} that are drawn at a time, as all of them are in memory until they are written"
        yield Problem(f"data.sources.{first}.limit", limit, message, "Lower it")
    if len(drawn) > 1:
        message = f"is data.sources.{first} already, and would write the same again"
        yield Problem(f"data.sources.{drawn[1]}.source", "target", message, f"Raise data.sources.{first}.limit instead")
    if data.regenerate == "never":
        message = "what the target writes as a user has no responses, which data.regenerate = never keeps"
        yield Problem(f"data.sources.{first}.source", "target", message, "Set data.regenerate to auto, or leave the source out")


def _taps(drafter: DrafterConfig) -> Iterator[Problem]:
    taps = drafter.tap_layers
    if taps is not None and (list(taps) != sorted(set(taps)) or not taps or taps[0] < 0):
        yield Problem("drafter.tap_layers", list(taps), "must be 0-based, ascending and without repetition", "Sort the list and drop repetitions")
    if taps is not None and drafter.num_taps not in (None, len(taps)):
        yield Problem("drafter.num_taps", drafter.num_taps, f"drafter.tap_layers names {len(taps)} layers", "Leave drafter.num_taps out")


def _window(drafter: DrafterConfig) -> Iterator[Problem]:
    window, full = drafter.sliding_window, list(drafter.full_attention_layers)
    if window is not None and window < drafter.block_size:
        message = f"smaller than drafter.block_size = {drafter.block_size}: a block would not see itself"
        yield Problem("drafter.sliding_window", window, message, "Raise it; 2048 and 4096 are usual")
    if full and window is None:
        remedy = "Set drafter.sliding_window, or leave the layers out: all have full attention without it"
        yield Problem("drafter.full_attention_layers", full, "there is no drafter.sliding_window for the other layers", remedy)
    elif full != sorted(set(full)) or (full and not 0 <= full[0] <= full[-1] < drafter.num_layers):
        message = f"must be ascending, without repetition, of the layers 0 to {drafter.num_layers - 1}"
        yield Problem("drafter.full_attention_layers", full, message, "Correct the list")
    elif len(full) == drafter.num_layers:
        message = f"no layer is left for drafter.sliding_window = {window}"
        yield Problem("drafter.full_attention_layers", full, message, "Leave drafter.sliding_window out, or name fewer layers")


def _schedule_and_queue(config: PipelineConfig) -> Iterator[Problem]:
    training = config.training
    if training.schedule == "wsd" and training.warmup_fraction + training.decay_fraction > 1.0:
        yield Problem(
            "training.decay_fraction", training.decay_fraction,
            f"with training.warmup_fraction = {training.warmup_fraction} the schedule is longer than the run",
            "Keep warmup_fraction + decay_fraction at most 1",
        )  # fmt: skip
    together = config.rows_per_step // training.accumulation_steps
    if training.queue_rows < together:
        message = f"smaller than the {together} rows that the replicas take at a time"
        yield Problem("training.queue_rows", training.queue_rows, message, "Raise training.queue_rows")


def _devices(config: PipelineConfig) -> Iterator[Problem]:
    training, devices = config.training, list(config.training.devices)
    cuda = [device for device in devices if device != "cpu"]
    if cuda and "cpu" in devices:
        yield Problem("training.devices", devices, "mixes cpu and cuda replicas", "Use replicas of one kind")
    if training.launcher == "threads" and 1 < len(set(cuda)) < len(cuda):
        message = "several replicas share one of several GPUs, between which NCCL takes one replica each"
        yield Problem("training.devices", devices, message, "Name each GPU once, or one GPU alone")
    if training.cuda_graphs is True and not cuda:
        remedy = "Set training.cuda_graphs to auto, or name CUDA devices in training.devices"
        yield Problem("training.cuda_graphs", True, f"training.devices = {devices} has no CUDA device", remedy)
    if training.sync == "sharded" and training.optimizer == "muon":
        yield Problem("training.sync", "sharded", "training.optimizer = muon needs whole matrices", "Set training.sync to all_reduce")


def devices_of_targets(config: PipelineConfig) -> list[tuple[str, str]]:
    """Every setting, by field path, that may spread a target over devices."""
    named = [("target.device", config.target.device), ("evaluation.device", config.evaluation.device)]
    named += [(f"extraction.devices.{index}", device) for index, device in enumerate(config.extraction.devices or ())]
    named += [(f"training.target_devices.{index}", device) for index, device in enumerate(config.training.target_devices)]
    return named


def _spread(config: PipelineConfig) -> Iterator[Problem]:
    for field, device in devices_of_targets(config):
        parts = devices_of(device)
        if len(set(parts)) > 1 and "cpu" in parts:
            yield Problem(field, device, "mixes cpu and cuda", "Spread the target over GPUs, or leave it on the CPU")
        elif len(set(parts)) < len(parts) and "cpu" not in parts:
            yield Problem(field, device, "names a GPU twice", "Name each device of a target once")


def _online(config: PipelineConfig) -> Iterator[Problem]:
    training, targets = config.training, list(config.target_devices)
    if training.feed == "shards":
        if training.target_devices:
            remedy = "Set training.feed to online, or leave training.target_devices out"
            yield Problem("training.target_devices", list(training.target_devices), "training.feed is shards, which need no target", remedy)
        return
    if len({part.partition(":")[0] for device in (*targets, *training.devices) for part in devices_of(device)}) > 1:
        message = f"training.devices = {list(training.devices)}: features do not move between cpu and cuda"
        yield Problem("training.target_devices", targets, message, "Use devices of one kind for both")
    if config.extraction.feature_dtype == "fp8":
        remedy = "Set extraction.feature_dtype to bfloat16"
        yield Problem("extraction.feature_dtype", "fp8", "saves disk, of which training.feed = online uses none", remedy)


def _torchrun(config: PipelineConfig) -> Iterator[Problem]:
    training, targets = config.training, config.target_devices
    if training.launcher == "threads":
        return
    if targets and len(targets) % len(training.devices):
        message = f"the {len(training.devices)} processes of training.launcher = torchrun cannot share them evenly"
        remedy = "Name as many for each entry of training.devices, those of all first processes first"
        yield Problem("training.target_devices", list(targets), message, remedy)


def _fp8(config: PipelineConfig) -> Iterator[Problem]:
    training = config.training
    if training.precision != "fp8":
        return
    if "cpu" in training.devices:
        yield Problem("training.precision", "fp8", "needs CUDA devices", "Set bfloat16 or float32, or name CUDA devices in training.devices")
    for field, value, count in (
        ("training.row_length", training.row_length, training.row_length),
        ("training.num_anchors", training.num_anchors, training.num_anchors * config.drafter.block_size),
    ):
        if count % 16:
            message = f"makes rows of {count}, and products in fp8 want multiples of 16"
            yield Problem(field, value, message, f"Round {field} up, or set training.precision to bfloat16")


def _sets(config: PipelineConfig) -> Iterator[Problem]:
    names = [item.name for item in config.evaluation.sets]
    for index, name in enumerate(names):
        if name in ("heldout", "overall") or name in names[:index]:
            message = "is the name of the held-out prompts' figures, or of all" if name not in names[:index] else "names two sets"
            yield Problem(f"evaluation.sets.{index}.name", name, message, "Choose another name")


def _distillation(config: PipelineConfig) -> Iterator[Problem]:
    weight = config.objective.distillation.weight
    if weight > 0 and config.extraction.teacher == "none":
        message = f"stores nothing of the target's distribution, which objective.distillation.weight = {weight} needs"
        yield Problem("extraction.teacher", "none", message, "Set extraction.teacher to last_hidden or topk, or the weight to 0")
    if weight > 0 and config.training.feed == "online":
        message = "live targets give their tapped layers alone"
        yield Problem("objective.distillation.weight", weight, message, "Set training.feed to shards, or the weight to 0")
