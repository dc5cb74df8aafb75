"""How fast rows come from the page cache into pinned memory, by the product's own reader and feed.

python -m benchmarks.reader                         about 30 s; writes 4 GB of shards first, and removes them
python -m benchmarks.reader --gigabytes 0.02 --device cpu

``reader.gb_s`` counts the bytes of features that arrive in rows, with as many loaders as the product has here; ``reader.gb_s.first_epoch`` those
of the first reading, in which each sample is held against its checksum; ``reader.gb_s.loadersN`` tells how it grows with N of them.
``reader.copy_gb_s`` and ``reader.checksum_gb_s`` are what one core does of either, from memory: what there is to reach.

``reader.rows_s.small``: rows of 2048 tokens a second for a small target (5 taps of 576 in fp8, samples of 300 tokens), where what a row takes besides
the copy decides; the drafter of configs/smollm2-135m.yaml wants 204 on an H200. ``.first_epoch`` and ``.loadersN`` as above; ``cpu_ms`` beside them
is the processor's time for a row, of all threads together. ``reader.row_ms.small`` is that of one thread that makes rows by itself, and ``uncopied``
beside it the same where features are one number a layer: what is left is not the copy, and most of it is under Python's lock, one loader at a time.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import time
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
from dflash_core.shards import ShardDataset, ShardWriter
from dflash_core.shards.columns import EXTREMES, card_of, stored_columns
from dflash_core.shards.format import checksum

ROW_LENGTH, TAPS = 2048, 5
QUEUE_ROWS = 64  # as configs/smollm2-135m.yaml has
EPOCHS = 1000  # as many as anybody could want: a feed ends where it is closed


def write_shards(folder: Path, gigabytes: float, *, small: bool = False, hidden_size: int | None = None) -> ShardDataset:
    """A dataset of random features of the size of Qwen3-8B's, in samples of the lengths of a chat mix; or of a small target's, in short samples.

    By the product's writer, from a pool of features that are encoded once.

    Args:
        gigabytes: of features, had they the target's hidden size
        hidden_size: another one than the target's
    """
    info = target_info(SHAPES["1x2048"])
    info = replace(info, hidden_size=576, vocab_size=49_152) if small else info
    token_bytes = TAPS * info.hidden_size * (1 if small else 2)
    samples: Any = RandomSamples(max(ROW_LENGTH, int(gigabytes * 1e9 / token_bytes)) * (2 if small else 1), info.vocab_size)
    samples.lengths = np.clip(samples.lengths // 2, 32, 768) if small else np.minimum(samples.lengths, ROW_LENGTH)
    info = replace(info, hidden_size=hidden_size or info.hidden_size)
    config = ExtractionConfig(samples_per_shard=512 if small else 32, feature_dtype="fp8" if small else "bfloat16")
    card = card_of(config, info, samples, tuple(range(TAPS)), "bfloat16", 1)
    pool = stored_columns(card, torch.randn(ROW_LENGTH + 4096, TAPS * info.hidden_size).to(torch.bfloat16), ROW_LENGTH + 4096)
    pool.pop(EXTREMES)
    began = time.perf_counter()
    with ShardWriter(folder, card) as writer:
        for shard in filter(writer.claim, writer.unfinished()):
            members = card.samples_of(shard)
            with writer.shard(shard, [samples.id(i) for i in members], samples.lengths[members.start : members.stop].tolist()) as out:
                for position, i in enumerate(members):
                    here = slice(start := i * 61 % 4096, start + int(samples.lengths[i]))
                    text = {"tokens": torch.from_numpy(samples.tokens(i)), "loss_mask": torch.from_numpy(samples.loss_mask(i))}
                    out.write(position, text | {name: values[here] for name, values in pool.items()})
            writer.give_back(shard)
        writer.finalize()
    dataset = ShardDataset(folder)
    size = sum(path.stat().st_size for path in folder.glob("shard-*"))
    print(f"wrote {size / 1e9:.2f} GB, {size / (time.perf_counter() - began) / 1e9:.2f} GB/s", flush=True)
    return dataset


def gigabytes_per_second(rows: ShardRows, loaders: int | None, first: int, count: int) -> float:
    """Rate at which one replica takes ``count`` rows, from row ``first`` on, and drops them."""
    seconds, _, size = _take(rows, loaders, first, count, queue_rows=16)
    return size / seconds / 1e9


def _take(rows: ShardRows, loaders: int | None, first: int, count: int, queue_rows: int) -> tuple[float, float, int]:
    """Seconds by the clock, seconds of the processor, and bytes of features of ``count`` rows."""
    total, size = EPOCHS * rows.rows_per_epoch(0), 0
    with Feed(loaders_of(rows, loaders), replicas=1, rows_per_microstep=1, queue_rows=queue_rows, start_ordinal=first, stop_ordinal=total) as feed:
        began, spent = time.perf_counter(), time.process_time()
        for number in range(first, first + count):
            [row] = feed.take(0, number)
            size += row.features.nbytes
        return time.perf_counter() - began, time.process_time() - spent, size


def measure(recorder: Recorder, dataset: ShardDataset) -> None:
    """All figures of a large target."""
    device = "cuda:0" if recorder.device.type == "cuda" else "cpu"
    training = TrainingConfig(devices=(device,), row_length=ROW_LENGTH)
    cores = os.cpu_count() or 1
    rows = ShardRows(dataset, training, 0)
    epoch = rows.rows_per_epoch(0)
    gigabytes_per_second(
        ShardRows(ShardDataset(dataset.folder, verify=False), training, 0), None, 0, min(epoch, 24)
    )  # pinned memory is there after this
    own = len(loaders_of(rows))
    detail = {"loaders": own, "cores": cores, "row_mb": round(2e-6 * ROW_LENGTH * dataset.card.columns[0].shape[0], 1)}
    recorder.add("reader.gb_s.first_epoch", gigabytes_per_second(rows, None, 0, epoch), "GB/s", 1, detail)
    recorder.add("reader.gb_s", gigabytes_per_second(rows, None, epoch, 4 * epoch), "GB/s", 1, detail)
    for loaders in (1, 2, 4, 8, 16):
        if loaders <= cores:
            recorder.add(f"reader.gb_s.loaders{loaders}", gigabytes_per_second(rows, loaders, epoch, max(epoch, min(4, loaders) * epoch)), "GB/s", 1)
    sample = dataset.sample(int(np.argmax(dataset.lengths))).bits("features")
    place = np.empty_like(sample)
    recorder.add("reader.copy_gb_s", _rate(lambda: np.copyto(place, sample), sample.nbytes), "GB/s", 1)
    recorder.add("reader.checksum_gb_s", _rate(lambda: checksum([sample]), sample.nbytes), "GB/s", 1)


def measure_small(recorder: Recorder, folder: Path, gigabytes: float) -> None:
    """All figures of a small target."""
    dataset = write_shards(folder / "rows", gigabytes, small=True)
    training = TrainingConfig(devices=("cuda:0" if recorder.device.type == "cuda" else "cpu",), row_length=ROW_LENGTH, num_anchors=512)
    rows = ShardRows(dataset, training, 0)
    epoch = rows.rows_per_epoch(0)
    unchecked = ShardRows(ShardDataset(dataset.folder, verify=False), training, 0)
    held = [unchecked.row(number) for number in range(QUEUE_ROWS + 16)]  # pinned memory for as many rows as the feed holds is there after this
    del held

    def add(name: str, loaders: int | None, first: int, count: int) -> None:
        seconds, spent, _ = _take(rows, loaders, first, count, QUEUE_ROWS)
        detail = {"loaders": len(loaders_of(rows, loaders)), "rows": count, "cpu_ms": round(spent * 1e3 / count, 3)}
        recorder.add(f"reader.rows_s.small{name}", count / seconds, "rows/s", 1, detail)

    add(".first_epoch", None, 0, epoch)
    count = epoch * -(-min(600, 10 * epoch) // epoch)
    add("", None, epoch, count)
    for loaders in (1, 2, 4, 8):
        add(f".loaders{loaders}", loaders, epoch, count)
    uncopied = ShardRows(write_shards(folder / "narrow", gigabytes, small=True, hidden_size=1), training, 0)
    detail = {"uncopied": round(_row_ms(uncopied), 3), "rows": epoch, "samples": round(len(dataset) / epoch, 1)}
    recorder.add("reader.row_ms.small", _row_ms(rows), "ms", 3, detail)


def _row_ms(rows: ShardRows) -> float:
    """Processor's milliseconds of a row, of the fastest of three epochs after the first, in this thread."""
    epoch = rows.rows_per_epoch(0)
    spent = []
    for number in range(4):
        began = time.thread_time()
        for ordinal in range(number * epoch, (number + 1) * epoch):
            rows.row(ordinal)
        spent.append((time.thread_time() - began) * 1e3 / epoch)
    return min(spent[1:])


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
            recorder.attempt("reader.gb_s", lambda: measure(recorder, write_shards(Path(folder) / "large", options.gigabytes)))
    return int(bool(recorder.failures))


if __name__ == "__main__":
    sys.exit(main())
