"""How fast rows come from the page cache into pinned memory, by the product's own reader and feed.

python -m benchmarks.reader                         about 30 s; writes 4 GB of shards first, and removes them
python -m benchmarks.reader --gigabytes 0.02 --device cpu

``reader.gb_s`` counts the bytes of features that arrive in rows, with as many loaders as the product has here; ``reader.gb_s.first_epoch`` those
of the first reading, in which each sample is held against its checksum; ``reader.gb_s.loadersN`` tells how it grows with N of them.
``reader.copy_gb_s`` and ``reader.checksum_gb_s`` are what one core does of either, from memory: what there is to reach.
``reader.rows_s.small``: rows of 2048 tokens a second for a small target (5 taps of 576 in fp8, samples of 300 tokens), where what a row takes besides
the copy decides; the drafter of configs/smollm2-135m.yaml wants 204 on an H200.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import SHAPES, Recorder, arguments, recorder_for
from benchmarks.engine import target_info
from benchmarks.extract import RandomSamples
from dflash_core.config import ExtractionConfig, TrainingConfig
from dflash_core.feed import Feed, ShardRows, loaders_of
from dflash_core.shards import ShardDataset, extract
from dflash_core.shards.format import checksum

ROW_LENGTH, TAPS = 2048, 5
EPOCHS = 1000  # as many as anybody could want: a feed ends where it is closed


def write_shards(folder: Path, gigabytes: float, *, small: bool = False) -> None:
    """A dataset of random features of the size of Qwen3-8B's, in samples of the lengths of a chat mix; or of a small target's, in short samples."""
    info = target_info(SHAPES["1x2048"])
    info = replace(info, hidden_size=576, vocab_size=49_152) if small else info
    width = TAPS * info.hidden_size
    samples: Any = RandomSamples(max(ROW_LENGTH, int(gigabytes * 1e9 / ((1 if small else 2) * width))), info.vocab_size)
    samples.lengths = np.minimum(samples.lengths, ROW_LENGTH)
    if small:
        samples.lengths = np.clip(samples.lengths // 2, 32, 768)
    pool_TF = torch.randn(ROW_LENGTH + 4096, width).to(torch.bfloat16)

    def target(documents: Sequence[torch.Tensor]) -> torch.Tensor:
        starts = [int(ids.sum()) % (len(pool_TF) - len(ids)) for ids in documents]
        return torch.cat([pool_TF[start : start + len(ids)] for start, ids in zip(starts, documents, strict=True)])

    config = ExtractionConfig(batch_tokens=4096, samples_per_shard=512 if small else 32, feature_dtype="fp8" if small else "bfloat16")
    counts = extract(config, info, [target] * 4, samples, folder, tap_layers=tuple(range(TAPS)), target_dtype="bfloat16", code_version=1)
    print(f"wrote {counts['bytes'] / 1e9:.2f} GB, {counts['tokens_per_second'] * counts['bytes_per_token'] / 1e9:.2f} GB/s", flush=True)


def gigabytes_per_second(rows: ShardRows, loaders: int | None, first: int, count: int) -> float:
    """Rate at which one replica takes ``count`` rows, from row ``first`` on, and drops them."""
    total = EPOCHS * rows.rows_per_epoch(0)
    with Feed(loaders_of(rows, loaders), replicas=1, rows_per_microstep=1, queue_rows=16, start_ordinal=first, stop_ordinal=total) as feed:
        began, taken = time.perf_counter(), 0
        for number in range(first, first + count):
            [row] = feed.take(0, number)
            taken += row.features.nbytes
        return taken / (time.perf_counter() - began) / 1e9


def measure(recorder: Recorder, folder: Path) -> None:
    """All figures, on the shards in ``folder``."""
    device = "cuda:0" if recorder.device.type == "cuda" else "cpu"
    training = TrainingConfig(devices=(device,), row_length=ROW_LENGTH)
    cores = os.cpu_count() or 1
    dataset = ShardDataset(folder)
    rows = ShardRows(dataset, training, 0)
    epoch = rows.rows_per_epoch(0)
    gigabytes_per_second(ShardRows(ShardDataset(folder, verify=False), training, 0), None, 0, min(epoch, 24))  # pinned memory is there after this
    own = len(loaders_of(rows))
    detail = {"loaders": own, "cores": cores, "row_mb": round(2e-6 * ROW_LENGTH * dataset.card.columns[0].shape[0], 1)}
    recorder.add("reader.gb_s.first_epoch", gigabytes_per_second(rows, None, 0, epoch), "GB/s", 1, detail)
    recorder.add("reader.gb_s", gigabytes_per_second(rows, None, epoch, 4 * epoch), "GB/s", 1, detail)
    for loaders in (1, 2, 4, 8, 16):
        if loaders <= cores:
            recorder.add(f"reader.gb_s.loaders{loaders}", gigabytes_per_second(rows, loaders, epoch, max(epoch, min(4, loaders) * epoch)), "GB/s", 1)
    sample = dataset.sample(int(np.argmax(dataset.lengths))).features.view(torch.uint8)
    place = torch.empty_like(sample).numpy()
    recorder.add("reader.copy_gb_s", _rate(lambda: np.copyto(place, sample.numpy()), sample.nbytes), "GB/s", 1)
    recorder.add("reader.checksum_gb_s", _rate(lambda: checksum([sample.reshape(-1)]), sample.nbytes), "GB/s", 1)


def measure_small(recorder: Recorder, folder: Path, gigabytes: float) -> None:
    """reader.rows_s.small, over the second epoch."""
    write_shards(folder, gigabytes, small=True)
    training = TrainingConfig(devices=("cuda:0" if recorder.device.type == "cuda" else "cpu",), row_length=ROW_LENGTH, num_anchors=512)
    rows = ShardRows(ShardDataset(folder), training, 0)
    epoch, total = rows.rows_per_epoch(0), EPOCHS * rows.rows_per_epoch(0)
    with Feed(loaders_of(rows), replicas=1, rows_per_microstep=1, queue_rows=64, start_ordinal=0, stop_ordinal=total) as feed:
        for number in range(2 * epoch):
            if number == epoch:
                began = time.perf_counter()
            feed.take(0, number)
        recorder.add("reader.rows_s.small", epoch / (time.perf_counter() - began), "rows/s", 1, {"loaders": len(loaders_of(rows)), "rows": epoch})


def _rate(work: Any, size: int) -> float:
    work()
    began = time.perf_counter()
    for calls in itertools.count(1):
        work()
        if (seconds := time.perf_counter() - began) > 0.5:
            return calls * size / seconds / 1e9
    raise AssertionError


def main(words: list[str] | None = None) -> int:
    """Measure; 1 if it failed."""
    parser = arguments(__doc__ or "", ["large", "small"])
    parser.add_argument("--gigabytes", type=float, default=4.0, help="size of the shards")
    parser.add_argument("--folder", type=Path, help="where they are written; default: the system's folder for temporary files")
    options = parser.parse_args(words)
    recorder = recorder_for(options)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if "small" in options.sections:
            recorder.attempt("reader.rows_s.small", lambda: measure_small(recorder, Path(folder) / "small", options.gigabytes / 8))
        if "large" in options.sections:
            write_shards(Path(folder) / "large", options.gigabytes)
            recorder.attempt("reader.gb_s", lambda: measure(recorder, Path(folder) / "large"))
    return int(bool(recorder.failures))


if __name__ == "__main__":
    sys.exit(main())
