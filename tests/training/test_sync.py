import threading
import time
from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch

from dflash_core.errors import TrainingError
from dflash_core.training.meeting import InterruptedByOthers
from dflash_core.training.sync import GradientSync, Tail, compare, connect
from tests.waiting import PATIENCE_S, eventually


def in_threads(syncs: list[GradientSync], work: Callable[[GradientSync], object], stagger: float = 0.0) -> list[object]:
    results: list[object] = [None] * len(syncs)

    def one(sync: GradientSync) -> None:
        time.sleep(stagger * ((sync.rank * 2 + 1) % len(syncs)))
        try:
            results[sync.rank] = work(sync)
        except Exception as error:
            results[sync.rank] = error

    threads = [threading.Thread(target=one, args=(sync,), daemon=True) for sync in syncs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)
    return results


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_all_reduce_gives_every_replica_the_same_bits_whatever_the_timing(replicas: int) -> None:
    syncs = connect([torch.device("cpu")] * replicas, 20.0)

    def reduce(sync: GradientSync) -> torch.Tensor:
        buffer = torch.randn(100_003, generator=torch.Generator().manual_seed(sync.rank))
        sync.all_reduce(buffer)
        return buffer

    runs = [in_threads(syncs, reduce, stagger) for stagger in (0.0, 0.02, 0.01)]
    first = runs[0][0]
    assert all(torch.equal(first, result) for results in runs for result in results)
    expected = sum(torch.randn(100_003, generator=torch.Generator().manual_seed(rank)) for rank in range(replicas))
    torch.testing.assert_close(first, expected)


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replicas_of_one_device_sum_to_the_same_bits_by_reading_each_other(
    monkeypatch: pytest.MonkeyPatch, replicas: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Mock)  # the CPU needs no streams: what is tested is who adds and copies what, and when
    monkeypatch.setattr(torch.cuda, "current_stream", Mock())
    syncs = connect([torch.device("cuda:0")] * replicas, 20.0)

    def buffer(rank: int) -> torch.Tensor:
        return torch.randn(1003, generator=torch.Generator().manual_seed(rank)).to(dtype)

    def reduce(sync: GradientSync) -> torch.Tensor:
        mine = buffer(sync.rank)
        for _ in range(20):
            mine.copy_(buffer(sync.rank))
            sync.all_reduce(mine)
        return mine

    results = in_threads(syncs, reduce)
    assert all(torch.equal(results[0], result) for result in results)
    torch.testing.assert_close(results[0], sum(buffer(rank) for rank in range(replicas)), rtol=0, atol=1e-5 if dtype == torch.float32 else 0.07)


def test_shards_are_summed_and_sent_back_as_an_all_reduce_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Mock)
    monkeypatch.setattr(torch.cuda, "current_stream", Mock())
    for device in ("cpu", "cuda:0"):  # Gloo, and replicas that share a device, whose buffers are on the CPU here
        syncs = connect([torch.device(device)] * 3, 20.0, "sharded")

        def exchange(sync: GradientSync) -> torch.Tensor:
            gradients = torch.randn(99, generator=torch.Generator().manual_seed(sync.rank))
            replica = Mock(gradients=gradients, totals=torch.zeros(4), weights=torch.zeros(99))
            sync.sum_gradients(replica)
            mine = slice(33 * sync.rank, 33 * sync.rank + 33)
            replica.weights[mine] = gradients[mine]
            sync.share_weights(replica)
            return replica.weights

        results = in_threads(syncs, exchange)
        assert all(torch.equal(results[0], result) for result in results)
        torch.testing.assert_close(results[0], sum(torch.randn(99, generator=torch.Generator().manual_seed(rank)) for rank in range(3)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_are_gathered_bit_for_bit_through_gradients_of_any_precision(dtype: torch.dtype) -> None:
    syncs = connect([torch.device("cpu")] * 3, 20.0, "sharded")
    wholes = [torch.randn(99, generator=torch.Generator().manual_seed(kind)) for kind in range(2)]
    wholes += [torch.arange(99, dtype=torch.int16), torch.randn(99, generator=torch.Generator().manual_seed(3)).bfloat16()]
    buffers = [torch.ones(99, dtype=dtype) for _ in syncs]

    def gather(sync: GradientSync) -> list[torch.Tensor] | None:
        mine = slice(33 * sync.rank, 33 * sync.rank + 33)
        return sync.gather_shards(Mock(gradients=buffers[sync.rank], shards=[whole[mine] for whole in wholes]))

    first, *others = in_threads(syncs, gather)
    assert isinstance(first, list)
    assert all(torch.equal(found, whole) for found, whole in zip(first, wholes, strict=True))
    assert others == [None, None]
    assert not any(buffer.any() for buffer in buffers)  # what is left in them would be summed with the next gradients


def test_all_gather_shows_every_replicas_values_to_all() -> None:
    syncs = connect([torch.device("cpu")] * 3, 20.0)
    tables = in_threads(syncs, lambda sync: sync.all_gather(torch.tensor([sync.rank, 2**60 + sync.rank])))
    assert all(table.tolist() == [[0, 2**60], [1, 2**60 + 1], [2, 2**60 + 2]] for table in tables)


def test_an_aborted_meeting_sends_home_who_waits_and_who_comes_later() -> None:
    syncs = connect([torch.device("cpu")] * 3, 20.0)
    results: list[object] = []

    def wait_in_vain() -> None:
        try:
            syncs[0].all_reduce(torch.zeros(4))
        except InterruptedByOthers as error:
            results.append(error)

    thread = threading.Thread(target=wait_in_vain, daemon=True)
    thread.start()
    assert eventually(lambda: syncs[0].meeting._barrier.n_waiting == 1)
    syncs[2].meeting.abort()
    thread.join(PATIENCE_S)
    assert len(results) == 1
    with pytest.raises(InterruptedByOthers):
        syncs[1].all_reduce(torch.zeros(4))


def test_compare_names_the_replica_and_the_tensor_that_differ() -> None:
    syncs = connect([torch.device("cpu")] * 3, 20.0)
    names = ["weights of a", "weights of b"]

    def check(sync: GradientSync) -> None:
        compare(sync, torch.tensor([7, 8 if sync.rank != 2 else 9]), names.__getitem__, 40)

    for error in in_threads(syncs, check):
        assert isinstance(error, TrainingError)
        assert "after step 40: replica 2 differs from replica 0 in weights of b" in str(error)


def test_the_tail_is_read_as_it_was_written() -> None:
    tail = Tail(block_size=3, num_replicas=2)
    values = torch.zeros(tail.size)
    values[Tail.LOSS], values[Tail.DENOMINATOR], values[Tail.STOP], values[Tail.GRAD_NORM] = 6.0, 4.0, 1.0, 0.5
    values[tail.labelled], values[tail.hits] = torch.tensor([0.0, 5.0, 4.0]), torch.tensor([0.0, 2.0, 1.0])
    values[tail.nonfinite][1] = 1.0
    totals = tail.read(values)
    assert (totals.loss, totals.labelled, totals.hits, totals.stop, totals.nonfinite, totals.skipped) == (
        1.5,
        (0, 5, 4),
        (0, 2, 1),
        True,
        (1,),
        False,
    )
    values[Tail.GRAD_NORM] = float("inf")
    assert tail.read(values).skipped
