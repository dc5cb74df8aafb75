"""Rows from live targets: the same samples in the same order as from shards, without a disk in between.

    loaders = target_loaders(LiveSamples(samples, load), config, tap_layers)       # one thread for each of config.target_devices
    with Feed(loaders, …) as feed: …

A target's thread runs the tapped layers over the samples of one row and lays their outputs where the row wants them. On a GPU that is one of a
fixed number of buffers on the target's own device: nothing passes the host, and whoever copies the features to where they are trained on gives
the buffer back. A row that is in the queue is finished, so a queue that is full means that targets wait, and an empty one that replicas do.

Shapes: T row length, F features of a token (taps · hidden size), t tokens of some of a row's samples.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from dflash_core.config import PipelineConfig
from dflash_core.data import SampleTable
from dflash_core.errors import TargetError
from dflash_core.feed.queue import Loader
from dflash_core.feed.row import Row
from dflash_core.feed.source import PackedOrder
from dflash_core.shards import ShardSample
from dflash_core.shards.columns import first_nonfinite
from dflash_core.shards.extract import batches
from dflash_core.shards.trim import SEEN, runs, used_rows
from dflash_core.target import TargetModel


@dataclass(frozen=True)
class LiveSamples:
    """What online training takes its rows from, in the place of shards: tokenised samples, and what loads the target onto devices."""

    samples: SampleTable
    load: Callable[[Sequence[str]], list[TargetModel]]


class FeatureBuffers:
    """Room for the features of so many rows on one CUDA device, allocated once."""

    def __init__(self, count: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device):
        self._free: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque(
            (torch.empty(shape, dtype=dtype, device=device), None) for _ in range(count)
        )

    def take(self) -> torch.Tensor:
        """[T, F], the one that has been free for longest. The current stream waits for whoever still reads it."""
        features_TF, unread = self._free.popleft()  # never empty: there are as many as the queue and those who copy from it can hold
        if unread is not None:
            torch.cuda.current_stream(features_TF.device).wait_event(unread)
        return features_TF

    def give_back(self, features_TF: torch.Tensor, unread: torch.cuda.Event | None) -> None:
        """From any thread; ``unread`` is the event after which nobody reads it."""
        self._free.append((features_TF, unread))


class TargetRows:
    """The rows that one target makes, in one thread.

    A pass is over the samples of one row alone. Where the target packs and ``extraction.batch_tokens`` allows it, that is all of them at once, and on
    CUDA all passes have one shape; otherwise the shapes vary, and the largest of all rows is run in warm-up, so that what it takes is there.
    """

    def __init__(self, target: TargetModel, samples: SampleTable, order: PackedOrder, config: PipelineConfig, tap_layers: Sequence[int]):
        training = config.training
        self._target, self._samples, self._order, self._tap_layers = target, samples, order, tuple(tap_layers)
        self._lengths = [int(length) for length in samples.lengths]
        self._batch_tokens = config.extraction.batch_tokens
        self._trimmed_for = config.drafter.farthest_seen if config.extraction.trim else None
        self._whole_rows = target.packs and training.row_length <= self._batch_tokens
        self._dtype: torch.dtype = getattr(torch, config.extraction.feature_dtype)
        self._shape = training.row_length, len(self._tap_layers) * target.info.hidden_size
        self.device = target.devices[-1]
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._buffers = None
        if self._stream is not None:
            copied_at_once = len(training.devices) * training.rows_per_microstep
            self._buffers = FeatureBuffers(training.queue_rows + copied_at_once, self._shape, self._dtype, self.device)

    def rows_per_epoch(self, epoch: int) -> int:
        """Rows of an epoch; the same for all."""
        return self._order.rows

    def row(self, ordinal: int) -> Row:
        """Row ``ordinal``, finished. Raises ``TargetError`` naming the sample if a feature is not finite."""
        members = self._order.samples(ordinal)
        with self._on_device():
            features_TF = torch.empty(self._shape, dtype=self._dtype) if self._buffers is None else self._buffers.take()
            self._run(members, features_TF)
            self._wait_and_check(members, features_TF)
        row = self._order.row(ordinal, [self._sample(i) for i in members], features_TF)
        if self._buffers is None:
            return row
        return dataclasses.replace(row, give_back=partial(self._buffers.give_back, features_TF))

    def warm_up(self) -> None:
        """Make the row that takes most memory of all, on the main thread."""
        for device in self._target.devices if self._stream is not None else ():
            torch.cuda.synchronize(device)  # weights were loaded on another stream
        row = self.row(0 if self._whole_rows else max(range(self._order.rows), key=self._padded_tokens))
        if row.give_back is not None:
            row.give_back(None)

    def _padded_tokens(self, ordinal: int) -> int:
        return max(len(batch) * self._lengths[batch[0]] for batch in self._batches(self._order.samples(ordinal)))

    def _batches(self, members: Sequence[int]) -> Iterable[Sequence[int]]:
        return [members] if self._whole_rows else batches(self._lengths, members, self._batch_tokens)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    @torch.no_grad()
    def _run(self, members: Sequence[int], features_TF: torch.Tensor) -> None:
        """Fill the features of a row: 0 after the last sample, and where shards of it would be trimmed."""
        places, end = {}, 0
        for i in members:
            places[i] = slice(end, end := end + self._lengths[i])
        for batch in self._batches(members):
            documents = [torch.tensor(self._samples.tokens(i)) for i in batch]
            if self._whole_rows and self._stream is not None and end < len(features_TF):
                documents.append(torch.zeros(len(features_TF) - end, dtype=torch.int32))  # every pass has the same shapes, and takes the same memory
            features_tF = self._target.packed_hidden_states(documents, self._tap_layers)
            for i, part_tF in zip(batch, features_tF.split([len(ids) for ids in documents]), strict=False):
                features_TF[places[i]] = part_tF
        features_TF[end:] = 0
        if self._trimmed_for is not None:
            for begin, end in runs(~torch.cat(used_rows(self._samples, members, self._trimmed_for)[SEEN]).numpy()):
                features_TF[begin:end] = 0

    def _wait_and_check(self, members: Sequence[int], features_TF: torch.Tensor) -> None:
        # Both extremes are NaN if any value is; they cost a fortieth of isfinite().all() on CPUs.
        finite = torch.stack(torch.aminmax(features_TF)).isfinite().all()
        if self._stream is not None:
            on_device, finite = finite, torch.empty((), dtype=torch.bool, pin_memory=True)
            finite.copy_(on_device, non_blocking=True)
            done = torch.cuda.Event(blocking=True)  # sleeps until it has come, instead of spinning on a core
            done.record()
            done.synchronize()
        if not finite:
            raise TargetError(first_nonfinite(features_TF, self._samples, members, self._tap_layers, self._shape[1]))

    def _sample(self, i: int) -> ShardSample:
        tokens, mask = torch.tensor(self._samples.tokens(i), dtype=torch.int32), torch.tensor(self._samples.loss_mask(i), dtype=torch.bool)
        return ShardSample.of(self._samples.id(i), {"tokens": tokens, "loss_mask": mask})


def target_loaders(live: LiveSamples, config: PipelineConfig, tap_layers: Sequence[int], devices: Sequence[str] | None = None) -> list[Loader]:
    """A loader for each of ``devices`` (default: ``config.target_devices``), its target loaded and warmed up. Those of one device share weights.

    Call it on the main thread, before there are workers.

    Raises:
        DataError: a sample is longer than ``training.row_length``.
        TargetError: the target cannot be loaded, or its hidden states are not finite.
    """
    order = PackedOrder(live.samples.lengths, config.training, config.run.seed)
    devices = config.target_devices if devices is None else devices
    different = sorted(set(devices))
    targets = dict(zip(different, live.load(different), strict=True))
    loaders = []
    for number, device in enumerate(devices):
        rows = TargetRows(targets[device], live.samples, order, config, tap_layers)
        rows.warm_up()
        loaders.append(Loader(f"target {number} ({device})", rows))
    return loaders
