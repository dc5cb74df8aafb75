"""Replicas agree: gradients are summed over all of them once per optimiser step, and everything they must agree on travels along.

    P parameters (flat)   R replicas   S slots of a block

A ``GradientSync`` is one rank. Its process group is made directly from a store, so that every thread of one process can be a rank: Gloo on
CPU, NCCL on CUDA, the same classes that ranks under torchrun use. Replicas that share one CUDA device, where NCCL refuses, read each
other's buffers (``device_sum``). Gloo's ring adds the replicas' numbers in an order that depends on the size and the number of replicas
alone, never on timing, and every replica gets the very same bits (tested); so a CPU run repeats bit for bit without a reduction of our own.

Sums are not overlapped with the backward pass: compiled, that is one function, which hands over all gradients at its end (cut into pieces, or
with hooks, it would compile anew), and on NVLink the sum takes about a twentieth of a step. Nor with the update, which is clipped by the norm of all
sums. ``sync_share`` in the metrics says what it costs.

Before each collective the threads meet (``Meeting``). A collective whose peer has died would wait for minutes and cannot be interrupted;
a meeting is broken at once for everybody.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dflash_core.errors import TrainingError
from dflash_core.training.device_sum import DeviceSum, Shown
from dflash_core.training.meeting import Meeting

Result = TypeVar("Result")


class Exchanged(Protocol):
    """What a replica gives to the exchange of a step. ``summed`` is what all replicas sum: gradients and tail."""

    @property
    def summed(self) -> Sequence[Tensor]: ...

    @property
    def gradients(self) -> Tensor: ...

    @property
    def totals(self) -> Tensor: ...

    @property
    def weights(self) -> Tensor: ...

    @property
    def shards(self) -> Sequence[Tensor]: ...

    def measure_shard(self) -> None: ...


class GradientSync:
    """One replica's end of the collectives. All R ranks call the same methods in the same order, each from its own thread.

    In this implementation every replica gets all sums and updates all weights; ``ShardedSync`` is the other one.

    Between processes, which may end in the middle of a collective, each raises ``TrainingError`` where the transport notices that.
    """

    def __init__(self, rank: int, size: int, meeting: Meeting, group: Any | DeviceSum | None, *, between_processes: bool = False):
        self.rank = rank
        self.size = size
        self.meeting = meeting
        self._group = group
        self._between_processes = between_processes

    def sum_gradients(self, replica: Exchanged) -> None:
        """Before the update."""
        for tensor in replica.summed:
            self.all_reduce(tensor)

    def share_weights(self, replica: Exchanged) -> None:
        """After the update: all have the same weights already."""

    def gather_shards(self, replica: Exchanged) -> list[Tensor] | None:
        """Between two steps: the whole of what ``replica.shards`` are shards of, on the CPU; for rank 0 alone. Here they are whole already."""
        return [shard.cpu() for shard in replica.shards] if self.rank == 0 else None

    def all_reduce(self, buffer: Tensor) -> None:
        """Sum ``buffer`` over the replicas, in place; afterwards it has the same bits on all. Contiguous; a float dtype or int64."""
        self.meeting.wait()
        if isinstance(self._group, DeviceSum):
            self._group.all_reduce(buffer)
        elif self._group is not None:
            self._finish(lambda group: group.allreduce([buffer]))

    def all_gather(self, values_n: Tensor) -> Tensor:
        """[R, n] int64: every replica's [n] int64 ``values_n``, on all replicas."""
        table_Rn = torch.zeros(self.size, len(values_n), dtype=torch.int64, device=values_n.device)
        table_Rn[self.rank] = values_n
        self.all_reduce(table_Rn)
        return table_Rn

    def _finish(self, start: Callable[[Any], Any]) -> None:
        """Have the process group do what ``start`` tells it to."""
        try:
            start(self._group).wait()
        except RuntimeError as error:
            if not self._between_processes:
                raise
            raise TrainingError(
                "Another process of this training has ended in the middle of a step: it was killed, or it has failed and says why by itself. "
                f"Start again to go on from the last checkpoint. ({str(error).partition(chr(10))[0]})"
            ) from error


class ShardedSync(GradientSync):
    """Each replica gets the sums of its shard alone, updates the weights of it, and receives the others' weights.

    As much is sent as for an all-reduce, but masters and moments take an R-th of the memory, and the update an R-th of the time.
    """

    def sum_gradients(self, replica: Exchanged) -> None:
        """Sum this replica's shard, and the tail with the squares of all shards. What else the buffer holds afterwards is undefined."""
        self._reduce_scatter(replica.gradients)
        replica.measure_shard()
        self.all_reduce(replica.totals)

    def share_weights(self, replica: Exchanged) -> None:
        """Send the shard's weights to all."""
        self._all_gather_in_place(replica.weights)

    def gather_shards(self, replica: Exchanged) -> list[Tensor] | None:
        """They travel through the buffer of the gradients, byte by byte, so that no device needs room for them. It is zeroed then."""
        wholes = [self._gather_through(replica.gradients, shard) for shard in replica.shards]
        replica.gradients.zero_()  # padding that is not zero would count in the norm
        return wholes if self.rank == 0 else None

    def _gather_through(self, buffer_P: Tensor, shard: Tensor) -> Tensor:
        given, through = shard.view(torch.uint8), buffer_P.view(torch.uint8).view(self.size, -1)
        whole = torch.empty(self.size if self.rank == 0 else 0, len(given), dtype=torch.uint8)
        for start in range(0, len(given), through.shape[1]):
            piece = given[start : start + through.shape[1]]
            through[self.rank, : len(piece)] = piece
            self._all_gather_in_place(buffer_P)
            if self.rank == 0:
                whole[:, start : start + len(piece)] = through[:, : len(piece)]
        return whole.view(-1).view(shard.dtype)

    def _reduce_scatter(self, buffer_P: Tensor) -> None:
        self.meeting.wait()
        if isinstance(self._group, DeviceSum):
            self._group.reduce_scatter(buffer_P)
        elif self._group is not None and buffer_P.is_cuda:
            self._finish(lambda group: group._reduce_scatter_base(self._mine(buffer_P), buffer_P))
        elif self._group is not None:  # Gloo's own leaves the order of the additions open
            self._finish(lambda group: group.allreduce([buffer_P]))

    def _all_gather_in_place(self, buffer_P: Tensor) -> None:
        self.meeting.wait()
        if isinstance(self._group, DeviceSum):
            self._group.all_gather(buffer_P)
        elif self._group is not None and buffer_P.is_cuda:
            self._finish(lambda group: group._allgather_base(buffer_P, self._mine(buffer_P)))
        elif self._group is not None:
            self._finish(lambda group: group._allgather_base(buffer_P, self._mine(buffer_P).clone()))

    def _mine(self, buffer_P: Tensor) -> Tensor:
        return buffer_P.view(self.size, -1)[self.rank]


def connect(devices: Sequence[torch.device], timeout_s: float, kind: str = "all_reduce") -> list[GradientSync]:
    """A ``GradientSync`` for each device, all ranks in this process.

    Making a group waits for all ranks, so each is made in a thread of its own; these threads have ended when this returns.

    Args:
        devices:   one per replica: all cpu or all CUDA. Of several CUDA devices each is named once, as NCCL wants it, or all replicas are on one
        timeout_s: seconds after which a collective gives up
        kind:      ``training.sync``: all_reduce or sharded
    """
    size = len(devices)
    meeting = Meeting(size)
    end = end_of(kind)
    if size == 1:
        return [GradientSync(0, 1, meeting, None)]
    if devices[0].type == "cuda" and len(set(devices)) == 1:
        board: list[Shown | None] = [None] * size
        return [end(rank, size, meeting, DeviceSum(rank, meeting, board)) for rank in range(size)]
    store = dist.HashStore()  # type: ignore[attr-defined]

    def join(rank: int) -> GradientSync:
        try:
            return join_group(store, rank, size, devices[rank], meeting, timedelta(seconds=timeout_s), "127.0.0.1", end)
        except BaseException:
            meeting.abort()
            raise

    return in_threads(size, join, "connect")


def end_of(kind: str) -> type[GradientSync]:
    """The implementation that ``training.sync`` names."""
    return ShardedSync if kind == "sharded" else GradientSync


def join_group(
    store: Any, rank: int, size: int, device: torch.device, meeting: Meeting, timeout: timedelta, host: str | None, end: Callable[..., GradientSync],
) -> GradientSync:  # fmt: skip
    """One rank's end of a group that is made through a store, for ranks in threads or processes. Waits for all ranks.

    Args:
        meeting: of the ranks of this process
        host:    where Gloo listens; None: wherever the name of this machine leads to
        end:     makes it, as the class does
    """
    if size == 1:
        return GradientSync(rank, size, meeting, None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        group = _nccl(store, rank, size, timeout)
    else:
        group = _gloo(store, rank, size, timeout, host)
    sync = end(rank, size, meeting, group)
    sync.all_reduce(torch.zeros(1, device=device))  # NCCL opens its channels with the first call
    return sync


def in_threads(size: int, work: Callable[[int], Result], name: str) -> list[Result]:
    """``work(rank)`` of every rank, each in a thread of its own that has ended when this returns. Raises what the lowest rank raised."""
    futures: list[Future[Result]] = [Future() for _ in range(size)]

    def run(rank: int) -> None:
        try:
            futures[rank].set_result(work(rank))
        except BaseException as error:
            futures[rank].set_exception(error)

    for rank in range(size):
        threading.Thread(target=run, args=(rank,), name=f"{name}-{rank}", daemon=True).start()
    return [future.result() for future in futures]


def _nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A process group's backend. Typed Any, as below: torch.distributed exports these classes without types."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(dist.PrefixStore("dflash", store), rank, size, options)  # type: ignore[attr-defined]


def _gloo(store: Any, rank: int, size: int, timeout: timedelta, host: str | None) -> Any:
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host) if host else dist.ProcessGroupGloo.create_default_device()]
    options._timeout = timeout
    return dist.ProcessGroupGloo(dist.PrefixStore("dflash", store), rank, size, options)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class StepTotals:
    """What all replicas know of a finished step, after summing. Slots are those of a block, 0..S-1.

    loss:        weighted negative log-likelihood, summed over the step and divided by its denominator
    denominator: sum of the weights (or what the objective divides by) over the whole step
    labelled:    number of labels of each slot
    hits:        number of labels of each slot that were the most likely token
    stop:        somebody has asked to stop
    nonfinite:   replicas whose own gradient had a NaN or infinity
    grad_norm:   global norm of the averaged gradient, before clipping
    skipped:     the step was not applied, on any replica
    """

    loss: float
    denominator: float
    labelled: tuple[int, ...]
    hits: tuple[int, ...]
    stop: bool
    nonfinite: tuple[int, ...]
    grad_norm: float
    skipped: bool


class Tail:
    """The fp32 numbers that are summed with the gradients: loss, denominator, stop votes, S labels, S hits, R non-finite flags.

    Counts stay exact up to 2^24 a step, more slots than a step has. One number more, the gradient norm, is written after the sum.
    """

    LOSS, DENOMINATOR, STOP, GRAD_NORM = 0, 1, 2, 3

    def __init__(self, block_size: int, num_replicas: int):
        self.labelled = slice(4, 4 + block_size)
        self.hits = slice(4 + block_size, 4 + 2 * block_size)
        self.nonfinite = slice(4 + 2 * block_size, 4 + 2 * block_size + num_replicas)
        self.size = self.nonfinite.stop

    def read(self, tail: Tensor) -> StepTotals:
        """Decode a summed tail on the host."""
        values: list[float] = tail.tolist()
        denominator, grad_norm = values[self.DENOMINATOR], values[self.GRAD_NORM]
        return StepTotals(
            loss=values[self.LOSS] / denominator if denominator > 0 else 0.0,
            denominator=denominator,
            labelled=tuple(int(value) for value in values[self.labelled]),
            hits=tuple(int(value) for value in values[self.hits]),
            stop=values[self.STOP] > 0,
            nonfinite=tuple(i for i, value in enumerate(values[self.nonfinite]) if value > 0),
            grad_norm=grad_norm,
            skipped=not math.isfinite(grad_norm),
        )


def compare(sync: GradientSync, checksums_n: Tensor, describe: Callable[[int], str], step: int) -> None:
    """Check that all replicas have the same checksums.

    Args:
        checksums_n: [n] int64, this replica's
        describe:    what checksum i is of, for the message

    Raises:
        TrainingError: on every replica, naming which replicas differ from replica 0 in what.
    """
    table_Rn = sync.all_gather(checksums_n).cpu()
    differing = (table_Rn != table_Rn[0]).nonzero().tolist()
    if not differing:
        return
    replicas = sorted({replica for replica, _ in differing})
    first = [describe(i) for replica, i in differing if replica == replicas[0]]
    shown = ", ".join(first[:4]) + (f" and {len(first) - 4} more" if len(first) > 4 else "")
    raise TrainingError(
        f"The replicas are no longer equal after step {step}: replica {replicas[0]} differs from replica 0 in {shown}"
        f"{f' (differing replicas: {replicas})' if len(replicas) > 1 else ''}. Identical updates of identical weights cannot do this: suspect the "
        "memory of one device, or code that changes one replica's weights. Start again from the last checkpoint, without the suspect device."
    )
