"""How fast the machine is does not depend on what else it does."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from dflash_core.estimate import rates
from dflash_core.estimate.rates import measure_rates


def test_the_rate_is_that_of_the_repetition_that_nobody_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    took = itertools.cycle([0.009, 0.03, 0.001, 0.02])
    now = 0.0

    def work() -> None:
        nonlocal now
        now += next(took)

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    assert rates._seconds_of(work, "cpu") == pytest.approx(0.001)


def test_measuring_leaves_the_number_of_threads_as_it_was() -> None:
    before = torch.get_num_threads()
    found = measure_rates("cpu", torch.float32)
    assert torch.get_num_threads() == before
    assert found.product > 0
    assert found.vector > 0
    assert 0 < found.share <= 1
