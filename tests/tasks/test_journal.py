"""The journal keeps metrics through a store that is away and through a killed process."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from tasks.journal import BATCH, MetricJournal, Record
from tests.waiting import PATIENCE_S


class Store:
    """Takes records, or refuses them while ``away``."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.sizes: list[int] = []
        self.away = False
        self.refused = threading.Event()

    def __call__(self, records: Sequence[Record]) -> None:
        if self.away:
            self.refused.set()
            raise ConnectionError("nobody there")
        self.sizes.append(len(records))
        self.records += records

    @property
    def values(self) -> list[tuple[int, str, float]]:
        return [(record.step, record.key, record.value) for record in self.records]


def test_delivers_every_metric_in_order(tmp_path: Path) -> None:
    store = Store()
    journal = MetricJournal(tmp_path / "train.jsonl", store, interval_s=0.01)
    for step in range(300):
        journal.append(step, {"loss": step / 10, "rate": 1.0})
    assert journal.close(PATIENCE_S)
    assert store.values == [(step, key, value) for step in range(300) for key, value in (("loss", step / 10), ("rate", 1.0))]


def test_never_sends_more_at_once_than_mlflow_takes(tmp_path: Path) -> None:
    store = Store()
    journal = MetricJournal(tmp_path / "train.jsonl", store, interval_s=60)
    for step in range(40):
        journal.append(step, {f"accuracy_slot_{slot}": 0.5 for slot in range(64)})
    assert journal.close(PATIENCE_S)
    assert len(store.records) == 40 * 64
    assert max(store.sizes) <= BATCH


def test_appending_does_not_wait_for_a_store_that_hangs(tmp_path: Path) -> None:
    entered, release = threading.Event(), threading.Event()

    def hang(records: Sequence[Record]) -> None:
        entered.set()
        release.wait()

    journal = MetricJournal(tmp_path / "train.jsonl", hang, interval_s=0.01)
    journal.append(0, {"loss": 1.0})
    assert entered.wait(PATIENCE_S)
    for step in range(1, 100):
        journal.append(step, {"loss": 1.0})  # would never come back if it waited
    assert not journal.flush(0.05)
    release.set()
    assert journal.close(PATIENCE_S)


def test_a_store_that_comes_back_gets_everything(tmp_path: Path) -> None:
    store = Store()
    store.away = True
    journal = MetricJournal(tmp_path / "train.jsonl", store, interval_s=0.01)
    journal.append(1, {"loss": 2.0})
    assert store.refused.wait(PATIENCE_S)
    journal.append(2, {"loss": 1.0})
    store.away = False
    assert journal.close(PATIENCE_S)
    assert store.values == [(1, "loss", 2.0), (2, "loss", 1.0)]


def test_what_could_not_be_delivered_is_sent_by_the_next_process(tmp_path: Path) -> None:
    gone, store = Store(), Store()
    gone.away = True
    journal = MetricJournal(tmp_path / "train.jsonl", gone, interval_s=0.01)
    journal.append(1, {"loss": 2.0})
    assert not journal.close(0.1)
    again = MetricJournal(tmp_path / "train.jsonl", store, interval_s=0.01)
    again.append(2, {"loss": 1.0})
    assert again.close(PATIENCE_S)
    assert store.values == [(1, "loss", 2.0), (2, "loss", 1.0)]


def test_steps_that_a_resumed_training_repeats_are_dropped(tmp_path: Path) -> None:
    store = Store()
    journal = MetricJournal(tmp_path / "train.jsonl", store, interval_s=0.01)
    for step in (1, 2, 3):
        journal.append(step, {"loss": float(step)})
    journal.close(PATIENCE_S)
    resumed = MetricJournal(tmp_path / "train.jsonl", store, interval_s=0.01)
    for step in (2, 3, 4):
        resumed.append(step, {"loss": float(step)})
    resumed.close(PATIENCE_S)
    assert [record.step for record in store.records] == [1, 2, 3, 4]


def test_metrics_without_a_step_are_numbered_on_after_a_restart(tmp_path: Path) -> None:
    store = Store()
    for _ in range(2):
        journal = MetricJournal(tmp_path / "train.jsonl", store, interval_s=0.01)
        journal.append(None, {"system/cpu": 1.0, "system/disk": 2.0})
        journal.append(None, {"system/cpu": 1.0})
        assert journal.close(PATIENCE_S)
        journal.append(None, {"system/cpu": 9.0})  # a sampler that ends a little later
    assert [record.step for record in store.records if record.key == "system/cpu"] == [0, 1, 2, 3]


def test_metrics_of_a_process_killed_right_after_appending_are_not_lost(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from pathlib import Path
from tasks.journal import MetricJournal
journal = MetricJournal(Path(sys.argv[1]), lambda records: None, interval_s=60)
journal.append(5, {"loss": 0.25})
os.kill(os.getpid(), signal.SIGKILL)
"""
    path = tmp_path / "train.jsonl"
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == -9
    with path.open("a") as file:
        file.write('[6, 123, {"lo')  # a line that was cut off in the middle
    store = Store()
    journal = MetricJournal(path, store, interval_s=60)
    journal.append(6, {"loss": 0.125})
    assert journal.close(PATIENCE_S)
    assert store.values == [(5, "loss", 0.25), (6, "loss", 0.125)]


def test_not_a_number_survives_the_journal(tmp_path: Path) -> None:
    store = Store()
    journal = MetricJournal(tmp_path / "train.jsonl", store, interval_s=0.01)
    journal.append(1, {"loss": float("nan")})
    assert journal.close(PATIENCE_S)
    assert store.records[0].value != store.records[0].value
