"""What a run will cost before it runs: rows, bytes on disk, memory and time of each stage.

Counts are exact where an earlier stage has been run and guessed from the settings otherwise. Time is operations over the
rate of a matrix product, and bytes over the rate of a matrix-vector product, both measured here in a fraction of a second;
expect a factor of two either way.
"""

from __future__ import annotations

import gzip
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from dflash_core.drafter import DFlashConfig
from dflash_core.pipeline import Plan
from dflash_core.stages import Manifest

# Share of the measured matrix-product rate that a stage reaches, from runs of the demo on two cores.
_EFFICIENCY = {"responses": 0.25, "shards": 0.6, "train": 0.5}
_BYTES = {"float32": 4, "bfloat16": 2}


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


def _seconds_of(work, device: str) -> float:  # type: ignore[no-untyped-def]
    best = math.inf
    for _ in range(5):
        start = time.perf_counter()
        work()
        if device != "cpu":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


def estimate(plan: Plan) -> dict[str, Estimate]:
    """Estimate every stage of a plan whose target is known. Raises ``DFlashError`` if the target is not here."""
    config, info = plan.config, plan.info
    data, training = config.data, config.training
    rates = measure_rates(config.target.device, getattr(torch, config.target.dtype))
    samples, tokens, response_tokens, exact = _amounts(plan)
    about = "" if exact else "about "
    drafter = DFlashConfig.from_target(info, config.drafter)
    body = sum(math.prod(shape) for shape in drafter.tensor_shapes().values())
    layer = info.hidden_size * (2 * info.num_heads + 2 * info.num_kv_heads) * info.head_dim + 3 * info.hidden_size * info.intermediate_size
    head = info.hidden_size * info.vocab_size
    target_bytes = (info.num_layers * layer + head) * _BYTES[config.target.dtype]
    deepest = max(plan.tap_layers) + 1

    feature_bytes = tokens * len(plan.tap_layers) * info.hidden_size * _BYTES[config.extraction.feature_dtype]
    rows = math.ceil(tokens / training.row_length)
    steps = training.max_steps or max(1, training.epochs * rows // config.rows_per_step)
    slots = training.num_anchors * config.drafter.block_size
    row_operations = 6 * body * (slots + training.row_length // 2) + 4 * head * slots
    replica_bytes = body * (4 * 4 + _BYTES[training.precision]) + 2 * head * _BYTES[training.precision] + 8 * slots * 12 * info.hidden_size
    decoded = (2 * config.evaluation.num_prompts + config.evaluation.untrained_prompts) * min(config.evaluation.max_new_tokens, data.max_length)
    evaluation_bytes = (info.num_layers * layer + head) * _BYTES[config.evaluation.dtype]
    parallel = len(training.devices) if training.devices[0] != "cpu" else 1

    generated = 0 if data.regenerate == "never" or (data.regenerate == "auto" and data.response_cache) else response_tokens
    return {
        "target": Estimate(f"{info.num_layers} layers", None, None, None),
        "responses": Estimate(
            f"{about}{samples} conversations", samples * 600, target_bytes,
            2 * (info.num_layers * layer + head) * generated / (rates.product * _EFFICIENCY["responses"]),
        ),
        "samples": Estimate(f"{about}{tokens} tokens", tokens * 5, None, tokens / 200_000),
        "shards": Estimate(
            f"{math.ceil(samples / config.extraction.samples_per_shard)} shards", feature_bytes, target_bytes,
            2 * deepest * layer * tokens / (rates.product * _EFFICIENCY["shards"]),
        ),
        "warm_up": Estimate(f"{len(training.devices)} replicas", None, replica_bytes * len(training.devices), 5.0 * len(training.devices)),
        "train": Estimate(
            f"{steps} steps of {config.rows_per_step} rows", body * 4 * (1 + 3 * training.keep_checkpoints), replica_bytes * len(training.devices),
            steps * config.rows_per_step * row_operations / (rates.product * _EFFICIENCY["train"] * parallel),
        ),
        "evaluate": Estimate(f"{config.evaluation.num_prompts} prompts", 10**6, evaluation_bytes, 1.3 * decoded * evaluation_bytes / rates.vector),
        "export": Estimate(f"{body:,} weights", body * 2, None, 2.0),
    }  # fmt: skip


def _amounts(plan: Plan) -> tuple[int, int, int, bool]:
    """(samples, tokens, response tokens, exact?) of the training data."""
    found = plan.stage("samples")
    if found.manifest is not None:
        counts = found.manifest.counts
        return int(counts["train"]), int(counts["train_tokens"]), int(counts["train_supervised"]), True
    data = plan.config.data
    samples = sum(item.limit or _count_rows(item.source) for item in data.sources)
    response = min(data.generation.max_new_tokens, data.max_length)
    return samples, samples * min(data.max_length, 100 + response), samples * response, False


def _count_rows(source: str) -> int:
    if source.endswith(".parquet"):
        import pyarrow.parquet

        return pyarrow.parquet.read_metadata(source).num_rows
    if not source.endswith((".jsonl", ".jsonl.gz")):
        return 10_000  # a dataset that is not here yet: its size is not known before it is fetched
    with gzip.open(source, "rb") if source.endswith(".gz") else Path(source).open("rb") as file:
        return sum(1 for _ in file)


def seconds_before(manifest: Manifest | None) -> float | None:
    """How long a stage took when it was run, if it was."""
    return manifest.seconds if manifest else None
