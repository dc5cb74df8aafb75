"""What a run will cost before it runs: rows, bytes on disk, memory and time of each stage.

Counts are exact where an earlier stage has been run and guessed from the settings otherwise. Time is operations over the
rate of a matrix product, and bytes over the rate of a matrix-vector product, both measured here in a fraction of a second;
expect a factor of two either way.
"""

from __future__ import annotations

import gzip
import math
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet
import torch

from dflash_core.config import PromptSource, devices_of
from dflash_core.data.benchmarks import REQUESTS
from dflash_core.drafter import DFlashConfig
from dflash_core.evaluation.ways import further_ways
from dflash_core.pipeline import planned_steps
from dflash_core.plan import Plan
from dflash_core.shards.columns import feature_columns

# Share of the measured matrix-product rate that a stage reaches, from runs of the demo on two cores.
_EFFICIENCY = {"responses": 0.25, "shards": 0.6, "train": 0.5}
_BYTES = {"float32": 4, "bfloat16": 2, "fp8": 2}
_ROWS_OF_UNKNOWN = 10_000


@dataclass(frozen=True)
class Estimate:
    """Of one stage; None where there is nothing to say. ``rows`` counts what the stage makes."""

    rows: str
    disk_bytes: int | None
    memory_bytes: int | None
    seconds: float | None


@dataclass(frozen=True)
class Rates:
    """Measured on the device: operations per second of a matrix product, bytes per second of a matrix-vector product."""

    product: float
    vector: float


def measure_rates(device: str, dtype: torch.dtype) -> Rates:
    """Time one matrix product of 1024 and one of a single row; takes a fraction of a second."""
    size = 1024 if device == "cpu" else 4096
    a = torch.randn(size, size, device=device).to(dtype)
    row = torch.randn(1, size, device=device).to(dtype)
    product = 2 * size**3 / _seconds_of(lambda: a @ a, device)
    vector = a.nbytes / _seconds_of(lambda: row @ a, device)
    return Rates(product, vector)


def _seconds_of(work: Callable[[], object], device: str) -> float:
    best = math.inf
    for _ in range(5):
        start = time.perf_counter()
        work()
        if device != "cpu":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


def estimate(plan: Plan) -> dict[str, Estimate]:
    """Estimate every stage of a plan.

    Raises:
        TargetError: the target is not on this machine yet.
        ConfigError: the samples are there and do not last for the steps that are asked for.
    """
    config, info = plan.config, plan.info
    data, training = config.data, config.training
    rates = measure_rates(devices_of(config.target.device)[0], getattr(torch, config.target.dtype))
    amounts = _amounts(plan)
    samples, tokens, response_tokens = amounts.samples, amounts.tokens, amounts.response_tokens
    about = "" if amounts.exact else "about "
    drafter = DFlashConfig.from_target(info, config.drafter)
    body = drafter.num_parameters()
    layer = info.hidden_size * (2 * info.num_heads + 2 * info.num_kv_heads) * info.head_dim + 3 * info.hidden_size * info.intermediate_size
    head = info.hidden_size * info.vocab_size
    target_bytes = (info.num_layers * layer + head) * _BYTES[config.target.dtype]
    deepest = max(plan.tap_layers) + 1 if config.extraction.teacher == "none" else info.num_layers

    feature_bytes = tokens * sum(column.token_bytes for column in feature_columns(config.extraction, len(plan.tap_layers), info.hidden_size))
    guess = training.max_steps or max(1, training.epochs * math.ceil(tokens / training.row_length) // config.rows_per_step)
    steps = planned_steps(plan) if amounts.exact else guess
    slots = training.num_anchors * config.drafter.block_size
    vocabulary_products = 3 if config.objective.distillation.weight > 0 and config.extraction.teacher == "last_hidden" else 2
    row_operations = 6 * body * (slots + training.row_length // 2) + 2 * vocabulary_products * head * slots
    replica_bytes = body * (4 * 4 + _BYTES[training.precision]) + 2 * head * _BYTES[training.precision] + 8 * slots * 12 * info.hidden_size
    sizes = [min(config.evaluation.num_prompts, amounts.heldout), *(_rows_of(item) for item in config.evaluation.sets)]
    prompts, before = sum(sizes), config.evaluation.untrained_prompts
    compared = sum(size if before is None else min(before, size) for size in sizes)
    ways = further_ways(config.evaluation, config.evaluation.block_size or config.drafter.block_size)
    passes = 2 * prompts * (1 + sum(1 / way.batch_size for way in ways)) + compared  # with the drafter and without; a batch takes what one takes
    decoded = passes * min(config.evaluation.max_new_tokens, data.max_length)
    evaluation_bytes = (info.num_layers * layer + head) * _BYTES[config.evaluation.dtype]
    during, beside = _evaluations(plan, steps), 0
    if during:  # the target, a copy of the weights, and a drafter where the copy is of another precision or elsewhere
        beside = evaluation_bytes + body * (_BYTES[training.precision] + _BYTES[config.evaluation.dtype])
    parallel = len(training.devices) if training.devices[0] != "cpu" else 1

    target_seconds = 2 * deepest * layer * tokens / (rates.product * _EFFICIENCY["shards"])
    online = len(config.target_devices)
    train_seconds = steps * config.rows_per_step * row_operations / (rates.product * _EFFICIENCY["train"] * parallel)
    if online:  # whichever side is slower, where each has devices of its own; on one CPU they share it
        feed_seconds = target_seconds * steps * config.rows_per_step * training.row_length / tokens / (online if training.devices[0] != "cpu" else 1)
        beside_them = {part for device in config.target_devices for part in devices_of(device)}
        apart = training.devices[0] != "cpu" and not beside_them & set(training.devices)
        train_seconds = max(train_seconds, feed_seconds) if apart else train_seconds + feed_seconds
    training_bytes = replica_bytes * len(training.devices) + target_bytes * len(set(config.target_devices)) + beside

    has_responses = data.regenerate == "never" or (data.regenerate == "auto" and data.response_cache is not None)
    elsewhere = bool(data.generation.endpoints) and not has_responses  # how fast servers are is not known here
    generated = 0 if has_responses else response_tokens * amounts.conversations // samples
    return {
        "target": Estimate(f"{info.num_layers} layers", None, None, None),
        "responses": Estimate(
            f"{about}{amounts.conversations} conversations", amounts.conversations * 600, None if elsewhere else target_bytes,
            None if elsewhere else 2 * (info.num_layers * layer + head) * generated / (rates.product * _EFFICIENCY["responses"]),
        ),
        "samples": Estimate(f"{about}{tokens} tokens", tokens * 5, None, tokens / 200_000),
        "shards": Estimate("nothing", None, None, None) if online else Estimate(
            f"{math.ceil(samples / config.extraction.samples_per_shard)} shards", feature_bytes, target_bytes, target_seconds,
        ),
        "warm_up": Estimate(
            f"{len(training.devices)} replicas" + (f", {online} target{'s' * (online > 1)}" if online else ""), None, training_bytes,
            5.0 * (len(training.devices) + online),
        ),
        "train": Estimate(
            f"{steps} steps of {config.rows_per_step} rows" + (f", {during} evaluations" if during else ""),
            body * (4 * (1 + 3 * training.keep_checkpoints) + (_BYTES[training.precision] if during else 0)), training_bytes, train_seconds,
        ),
        "evaluate": Estimate(
            f"{prompts} prompts" + (f", {1 + len(ways)} ways of decoding" if ways else ""), 10**6, evaluation_bytes,
            1.3 * decoded * evaluation_bytes / rates.vector,
        ),
        "export": Estimate(f"{body:,} weights", body * 2, None, 2.0),
    }  # fmt: skip


def _evaluations(plan: Plan, steps: int) -> int:
    """Of the last step, too; as many as there are if none is skipped."""
    every = plan.config.training.evaluation.every_steps
    return -(-steps // every) if every else 0


@dataclass(frozen=True)
class _Amounts:
    """Of the training data; ``heldout`` are the conversations for evaluation, ``exact`` is False for a guess from the settings."""

    conversations: int
    samples: int
    tokens: int
    response_tokens: int
    heldout: int
    exact: bool


def _amounts(plan: Plan) -> _Amounts:
    found = plan.stage("samples").manifest
    if found is not None:
        counts = found.counts
        train, tokens, supervised = counts["train"], counts["train_tokens"], counts["train_supervised"]
        return _Amounts(counts["conversations"], train, tokens, supervised, counts["heldout"], exact=True)
    data = plan.config.data
    conversations = sum(_rows_of(item) for item in data.sources)
    heldout = max(1, round(conversations * data.heldout_fraction))
    samples = max(1, conversations - heldout)
    response = min(data.generation.max_new_tokens, data.max_length)
    return _Amounts(conversations, samples, samples * min(data.max_length, 100 + response), samples * response, heldout, exact=False)


def _rows_of(item: PromptSource) -> int:
    rows = _count_rows(item.source)
    if rows is None:
        return item.limit or _ROWS_OF_UNKNOWN
    return min(rows, item.limit or rows)


def _count_rows(source: str) -> int | None:
    """Rows of a file, turns of a benchmark. None for a dataset that is not here yet, and for a file that cannot be read, which is an error later."""
    name = source.lower()
    if name in REQUESTS:
        return REQUESTS[name]
    try:
        if name.endswith(".parquet"):
            return int(pyarrow.parquet.read_metadata(source).num_rows)
        if name.endswith((".jsonl", ".jsonl.gz")):
            with gzip.open(source, "rb") if name.endswith(".gz") else Path(source).open("rb") as file:
                return sum(1 for _ in file)
    except (OSError, EOFError, zlib.error, pyarrow.ArrowException):
        pass
    return None
