"""Run the target over every sample and keep the hidden states of its tapped layers.

A shard's batches are made of its own samples alone, longest first, so a shard that is made again is the same shard, byte
for byte, whatever was done before it and however many devices share the work. Work that was finished is found and skipped.

Shapes: T tokens of all samples of a batch, t tokens of one sample, F = taps · hidden size.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc
import torch

from dflash_core.config import ExtractionConfig
from dflash_core.shards.columns import EXTREMES, Likeliest, card_of, check_finite, stored_columns, trimmed_bytes
from dflash_core.shards.format import INDEX, TOKENS, ShardCard, read_index, shard_name
from dflash_core.shards.leases import LEASE_S, SharedShards
from dflash_core.shards.overlap import WRITERS, BusyClock, PassClock, Slot, Slots
from dflash_core.shards.trim import kept, used_rows
from dflash_core.shards.writer import ShardWriter
from dflash_core.stages import Progress, file_sha256, no_progress

if TYPE_CHECKING:
    from dflash_core.data import SampleTable
    from dflash_core.target import TargetInfo, TargetModel

HiddenStates = Callable[[Sequence[torch.Tensor]], torch.Tensor]
"""Token ids of each sample, int32 [t] on the CPU → features [T, F] of all of them, one after the other, on any device. Where something of the
target's distribution is stored, with its last hidden states beside them: [T, F + H]."""

_LOOK_AGAIN_S = 0.2  # whether another process has finished or given up its shard


def extract(
    config: ExtractionConfig,
    info: TargetInfo,
    targets: Sequence[HiddenStates],
    samples: SampleTable,
    folder: Path,
    *,
    tap_layers: Sequence[int],
    target_dtype: str,
    code_version: int,
    window: int = 0,
    heads: Sequence[Likeliest] = (),
    shared: str | None = None,
    lease_s: float = LEASE_S,
    finish: bool = True,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Write the hidden states of all samples into ``folder``, or finish what was begun there. Processes that do so at once share the work.

    Args:
        targets: the target, once for each device; each is called by a thread of its own. None are needed where all shards are there.
        tap_layers: the layers whose outputs they return, in that order.
        target_dtype: precision in which the target runs, for the record.
        window: of the drafter, where all its layers have a sliding window: what ``config.trim`` leaves out is beyond it.
        heads: of the same targets, where their likeliest tokens are stored.
        shared: address of a store in which extractors on other machines share the work too; every shard is put there as soon as it is whole.
        lease_s: seconds without a sign of life after which the work of one of those is taken over.
        finish: False makes shards and leaves the rest to others; what is ``shared`` is not kept in ``folder``. Counts are of this call alone then.
        progress: its unit tells the speed too, and how much of the time targets wait for the disk.
    Returns:
        counts: samples, tokens, supervised_tokens, shards, bytes, bytes_per_token (of a token of which all is stored), trimmed_bytes (what
        ``config.trim`` has saved, where it is set), digest (sha256 of the index, which holds the checksum of every sample), and of this call
        extracted_tokens, tokens_per_second, waited_for_disk_s (targets, added up) and waited_for_target_s (while no writer had work).
    Raises:
        ShardError: the folder holds shards of another target or other settings; a feature is not finite (its sample is named);
            the disk is full; the store cannot be used. Finished shards are kept, and the same call goes on with the others.
    """
    card = card_of(config, info, samples, tuple(tap_layers), target_dtype, code_version, window)
    with _open(folder, card, shared, lease_s, keep=finish or shared is None) as writer:
        run = _Extraction(config, card, writer, samples, progress)
        run.work(targets, heads or [None] * len(targets))
        if finish:
            writer.finalize()
    return {**(counts_of(folder) if finish else {}), **run.speed()}


def is_to_do(folder: Path, card: ShardCard, shared: str | None = None) -> bool:
    """Whether ``extract`` would need a target: shards are missing."""
    with _open(folder, card, shared, LEASE_S) as writer:
        return bool(writer.unfinished())


def target_threads(models: Sequence[TargetModel], config: ExtractionConfig, tap_layers: Sequence[int]) -> tuple[list[HiddenStates], list[Likeliest]]:
    """What each thread of an extraction calls. A target that is spread over devices is a pipeline of batches: one thread for each."""
    last_hidden = config.teacher != "none"
    threads = [model for model in models for _ in model.devices]
    return (
        [functools.partial(model.packed_hidden_states, tap_layers=tap_layers, last_hidden=last_hidden) for model in threads],
        [model.likeliest for model in threads],
    )


@contextlib.contextmanager
def _open(folder: Path, card: ShardCard, shared: str | None, lease_s: float, *, keep: bool = True) -> Iterator[ShardWriter]:
    with contextlib.ExitStack() as stack:
        store = None if shared is None else stack.enter_context(SharedShards(shared, card, lease_s=lease_s))
        yield stack.enter_context(ShardWriter(folder, card, store, keep=keep))


def counts_of(folder: Path) -> dict[str, Any]:
    """What ``extract`` returns of a finished dataset, but for its speed."""
    card = ShardCard.read(folder)
    index = read_index(folder / INDEX, card)
    trimmed = (
        {"trimmed_bytes": trimmed_bytes(card.columns, {name: pc.sum(index[name]).as_py() for name in (TOKENS, *card.partial)})}
        if card.partial
        else {}
    )
    return {
        "samples": card.num_samples,
        "tokens": pc.sum(index[TOKENS]).as_py(),
        "supervised_tokens": pc.sum(index["supervised"]).as_py(),
        "shards": card.num_shards,
        "bytes": sum((folder / shard_name(shard)).stat().st_size for shard in range(card.num_shards)),
        "bytes_per_token": sum(column.token_bytes for column in card.columns),
        **trimmed,
        "digest": file_sha256(folder / INDEX),
    }


def batches(lengths: Sequence[int], members: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Split the samples ``members`` into batches of at most ``batch_tokens`` tokens, padding included; a longer sample goes alone.

    Longest first: neighbours are of similar length, so little is padded, and a batch that is too large for memory fails at once.
    """
    ordered = sorted(members, key=lambda i: (-lengths[i], i))
    batch: list[int] = []
    for i in ordered:
        if batch and (len(batch) + 1) * lengths[batch[0]] > batch_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


class _Extraction:
    """One call of ``extract``: targets that take shards from one list, writers behind them, and what they count together."""

    def __init__(self, config: ExtractionConfig, card: ShardCard, writer: ShardWriter, samples: SampleTable, progress: Progress):
        self._card, self._writer, self._samples, self._progress = card, writer, samples, progress
        self._batch_tokens = config.batch_tokens
        self._lengths = [int(length) for length in samples.lengths]
        self._todo = writer.unfinished()
        self.total = sum(self._lengths)
        self._found = self._done = self.total - sum(map(self._tokens_of, self._todo))
        self._open: list[_Shard] = []
        self._error: BaseException | None = None
        self._clocks: list[PassClock] = []
        self._writing = BusyClock()
        self._began = time.monotonic()
        self._lock = threading.Lock()

    def work(self, targets: Sequence[HiddenStates], heads: Sequence[Likeliest | None]) -> None:
        """Make all unfinished shards. Raises what went wrong first; what other threads had begun by then is finished or taken away."""
        self._tell(0)
        if not self._todo:
            return
        with ThreadPoolExecutor(WRITERS * len(targets), "shard-writer") as writers, ThreadPoolExecutor(len(targets), "target") as threads:
            running = [threads.submit(self._run_target, target, head, writers) for target, head in zip(targets, heads, strict=True)]
            try:
                wait(running)
            except BaseException as error:  # an interrupt
                self._fail(error)
        for shard in self._open:
            self._error = shard.abandon(self._error) or self._error
        if self._error is not None:
            raise self._error

    def speed(self) -> dict[str, Any]:
        """What this call extracted, how fast, and who waited for whom."""
        tokens, seconds = self._done - self._found, time.monotonic() - self._began
        return {
            "extracted_tokens": tokens,
            "tokens_per_second": round(tokens / seconds, 1),
            "waited_for_disk_s": round(sum(clock.waited_s for clock in self._clocks), 3),
            "waited_for_target_s": round(self._writing.idle_s, 3),
        }

    def _run_target(self, target: HiddenStates, head: Likeliest | None, writers: ThreadPoolExecutor) -> None:
        """Take one shard after the other, until there are none or something failed."""
        slots, clock = Slots(max(self._batch_tokens, *self._lengths)), PassClock()
        self._clocks.append(clock)
        try:
            while (shard := self._next_shard()) is not None:
                for batch in shard.batches:
                    slot, waited_s = slots.take()
                    if self._error is not None:
                        return
                    clock.begin(waited_s)
                    tokens = [torch.tensor(self._samples.tokens(i), dtype=torch.int32) for i in batch]
                    features_TF = target(tokens)
                    slot.fill(stored_columns(self._card, features_TF, sum(map(len, tokens)), head))
                    clock.end(features_TF.device)
                    writers.submit(self._write, shard, batch, slot, slots)
            clock.finish(slots.wait_until_free)
        except BaseException as error:
            self._fail(error)

    def _next_shard(self) -> _Shard | None:
        if (number := self._claim()) is None:
            return None
        members = self._card.samples_of(number)
        opened = _Shard(self._writer, number, self._samples, list(batches(self._lengths, members, self._batch_tokens)))
        with self._lock:
            self._open.append(opened)
        return opened

    def _claim(self) -> int | None:
        """A shard that nobody makes. Waits while other processes are at the last ones, for the case that one of them dies."""
        while self._error is None:
            with self._lock:
                claimed = next(filter(self._writer.claim, self._todo), None)
                if claimed is not None:
                    self._todo.remove(claimed)
            if claimed is None:
                if not self._todo:
                    return None
                time.sleep(_LOOK_AGAIN_S)
            elif not self._writer.is_finished(claimed):
                return claimed
            else:  # by another process
                self._writer.give_back(claimed)
                with self._lock:
                    self._found += self._tokens_of(claimed)
                self._tell(self._tokens_of(claimed))
        return None

    def _tokens_of(self, shard: int) -> int:
        return sum(self._lengths[i] for i in self._card.samples_of(shard))

    def _write(self, shard: _Shard, batch: list[int], slot: Slot, slots: Slots) -> None:
        try:
            values = slot.values()
            with self._writing:
                if shard.write(batch, values):
                    self._writer.give_back(shard.number)
                    with self._lock:
                        self._open.remove(shard)
            self._tell(sum(self._lengths[i] for i in batch))
        except BaseException as error:
            shard.error = error
            self._fail(error)
        finally:
            slots.give_back(slot)

    def _tell(self, tokens: int) -> None:
        with self._lock:
            self._done += tokens
            speed = self.speed()
            unit = "tokens"
            if speed["extracted_tokens"]:
                unit += f", {speed['tokens_per_second']:,.0f}/s"
            if speed["waited_for_disk_s"] > 0.01 * (time.monotonic() - self._began):
                unit += f", {speed['waited_for_disk_s']:,.0f} s waiting for the disk"
            self._progress(self._done, self.total, unit)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error


class _Shard:
    """A shard that is being filled by several writers: whoever writes its last batch finishes it."""

    def __init__(self, writer: ShardWriter, number: int, samples: SampleTable, made: list[list[int]]):
        members = writer.card.samples_of(number)
        self.number, self.batches = number, made
        self.error: BaseException | None = None
        self._card, self._samples, self._first = writer.card, samples, members.start
        window = self._card.trimmed_for_window
        used = {} if window is None else used_rows(samples, members, window)
        self._used = {name: used[name] for name in self._card.partial}
        rows = {name: [int(mask.sum()) for mask in masks] for name, masks in self._used.items()}
        self._stack = contextlib.ExitStack()
        self._out = self._stack.enter_context(
            writer.shard(number, [samples.id(i) for i in members], [int(samples.lengths[i]) for i in members], rows)
        )
        self._left = len(made)
        self._lock = threading.Lock()

    def write(self, batch: list[int], stored: dict[str, torch.Tensor]) -> bool:
        """Write the samples of one batch. Returns whether that was the last one, and the shard is whole."""
        check_finite(self._card, stored, self._samples, batch)
        end = 0
        for i in batch:
            begin, end = end, end + int(self._samples.lengths[i])
            tokens = torch.tensor(self._samples.tokens(i), dtype=torch.int32)
            loss_mask = torch.tensor(self._samples.loss_mask(i), dtype=torch.bool)
            used = {name: masks[i - self._first] for name, masks in self._used.items()}
            features = {name: stored[name][begin:end] for name in stored if name != EXTREMES}
            features |= {column.name: kept(features[column.name], used[column.where]) for column in self._card.columns if column.where is not None}
            self._out.write(i - self._first, {**features, "tokens": tokens, "loss_mask": loss_mask, **used})
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._stack.close()
        return last

    def abandon(self, error: BaseException | None) -> BaseException | None:
        """Take away what there is of the shard. Returns its own error, in the words that users understand, if it was the first."""
        try:
            with self._stack:
                raise self.error or _AbandonedError
        except _AbandonedError:
            return None
        except BaseException as clearer:
            return clearer if self.error is error else None


class _AbandonedError(Exception):
    """Another shard failed."""
