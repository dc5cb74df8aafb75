"""What the user reads when a GPU's memory grows."""

import logging
from collections.abc import Iterator

import pytest
import torch

from dflash_core.errors import TrainingError
from dflash_core.training.memory import MemoryWatch, Reading, watches

MIB = 2**20
STEADY = Reading(peak=100 * MIB, reserved=200 * MIB, inactive_split=10 * MIB, retries=0)


def watch(*readings: Reading, strict: bool = False) -> MemoryWatch:
    rest: Iterator[Reading] = iter(readings)
    return MemoryWatch(torch.device("cuda:1"), strict, lambda device: next(rest))


def warnings_of(caplog: pytest.LogCaptureFixture, *readings: Reading) -> str:
    watched = watch(*readings)
    with caplog.at_level(logging.WARNING):
        for step in range(1, len(readings) + 1):
            watched.after_step(step)
    return caplog.text


def test_steady_memory_is_silent_and_its_peak_is_that_since_the_last_record(caplog: pytest.LogCaptureFixture) -> None:
    watched = watch(STEADY, Reading(120 * MIB, 200 * MIB, 0, 0), STEADY)
    assert watched.metrics() == {}
    for step in (1, 2):
        watched.after_step(step)
    assert watched.metrics()["memory_peak_1"] == 120 * MIB
    watched.after_step(3)
    assert watched.metrics() == {
        "memory_peak_1": 100.0 * MIB, "memory_reserved_1": 200.0 * MIB, "memory_retries_1": 0.0, "memory_inactive_split_1": 10.0 * MIB,
    }  # fmt: skip
    assert not caplog.text


@pytest.mark.parametrize(
    ("grown", "cause"),
    [
        (Reading(150 * MIB, 264 * MIB, 10 * MIB, 0), "a step took 150 MiB, and none before more than 100 MiB"),
        (Reading(100 * MIB, 264 * MIB, 70 * MIB, 0), r"free memory lies in pieces (70 MiB in all, 10 MiB a step before)"),
        (Reading(150 * MIB, 264 * MIB, 10 * MIB, 2), "the device was full"),
    ],
)
def test_growth_is_told_with_step_size_and_cause(caplog: pytest.LogCaptureFixture, grown: Reading, cause: str) -> None:
    text = warnings_of(caplog, STEADY, STEADY, grown, grown)
    assert text.count("grew by") == 1
    assert "Reserved memory of cuda:1 grew by 64 MiB in step 3, to 264 MiB" in text
    assert cause in text


def test_strict_growth_is_an_error() -> None:
    watched = watch(STEADY, Reading(100 * MIB, 264 * MIB, 0, 0), strict=True)
    watched.after_step(1)
    with pytest.raises(TrainingError, match=r"cuda:1 grew by 64 MiB in step 2.*training.strict_memory = false"):
        watched.after_step(2)


def test_each_gpu_is_watched_by_its_first_replica_or_by_the_first_of_all_and_the_cpu_by_none() -> None:
    devices = [torch.device(name) for name in ("cuda:0", "cuda:0", "cuda:1")]
    found = watches(devices, [torch.device("cuda:1"), torch.device("cuda:3")], False)
    assert [[watch.device.index for watch in of_replica] for of_replica in found] == [[0, 3], [], [1]]
    assert watches([torch.device("cpu")] * 2, [torch.device("cpu")], True) == [[], []]
