"""Facts about what a run leaves in a real MLflow store (SQLite in a temporary workspace)."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_core.config import PipelineConfig
from tasks.store import TrackingError, open_client
from tasks.tracker import Tracker, flat_params

MakeConfig = Callable[..., PipelineConfig]


@pytest.fixture
def config(make_config: MakeConfig) -> PipelineConfig:
    return make_config()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "workspace" / "runs" / "small"


class WorkerDiedError(Exception):
    """Stands for whatever ends a run early."""


def fails() -> contextlib.AbstractContextManager[None]:
    return contextlib.suppress(WorkerDiedError)


def runs(config: PipelineConfig) -> list[Any]:
    client, _ = open_client(config)
    experiment = client.get_experiment_by_name(config.tracking.experiment)
    return list(client.search_runs([experiment.experiment_id]))


def history(config: PipelineConfig, run_id: str, key: str) -> list[tuple[int, float]]:
    client, _ = open_client(config)
    return [(item.step, item.value) for item in client.get_metric_history(run_id, key)]


def test_a_run_has_its_settings_a_finished_stage_inside_and_the_code_that_made_it(config: PipelineConfig, folder: Path) -> None:
    with Tracker.open(config, folder) as tracker, tracker.stage("train") as record:
        record.log_metrics(1, {"loss": 2.0})
        record.log_metrics(2, {"loss": 1.0})
    child, parent = sorted(runs(config), key=lambda run: run.info.run_id == tracker.run_id)
    assert (child.info.status, parent.info.status) == ("FINISHED", "FINISHED")
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert child.data.tags["dflash.stage"] == "train"
    assert history(config, child.info.run_id, "loss") == [(1, 2.0), (2, 1.0)]
    assert parent.data.params["training.row_length"] == "64"
    assert parent.data.params["target.model"] == "some/target"
    assert parent.data.tags["dflash.config_digest"] == config.digest
    assert len(parent.data.tags["mlflow.source.git.commit"]) == 40
    client, _ = open_client(config)
    stored = Path(client.download_artifacts(parent.info.run_id, "config.json"))
    assert json.loads(stored.read_text()) == config.model_dump(mode="json")


def test_database_and_artifacts_stay_in_the_workspace(make_config: MakeConfig, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = make_config(tracking={"uri": None})
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    with Tracker.open(config, folder) as tracker:
        tracker.log_text("hello", "note.txt")
    assert list(elsewhere.iterdir()) == []
    assert (config.run.workspace / "mlflow.db").is_file()
    assert [path.read_text() for path in (config.run.workspace / "mlflow-artifacts").rglob("note.txt")] == ["hello"]


def test_an_error_ends_the_run_as_failed_and_an_interrupt_as_killed(make_config: MakeConfig, tmp_path: Path) -> None:
    for error, status in ((ValueError("broken"), "FAILED"), (KeyboardInterrupt(), "KILLED")):
        config = make_config(run={"name": status.lower()})
        tracker = Tracker.open(config, tmp_path / status)
        with pytest.raises(type(error)), tracker, tracker.stage("train") as record:
            raise error
        client, _ = open_client(config)
        assert client.get_run(tracker.run_id).info.status == status
        assert client.get_run(record.run_id).info.status == status


def test_a_failed_run_is_continued_without_repeating_steps(config: PipelineConfig, folder: Path) -> None:
    first = Tracker.open(config, folder)
    with fails(), first, first.stage("train") as record:
        for step in (1, 2, 3):
            record.log_metrics(step, {"loss": float(step)})
        raise WorkerDiedError
    with Tracker.open(config, folder) as second, second.stage("train") as resumed:
        for step in (2, 3, 4):  # as from a checkpoint after step 1
            resumed.log_metrics(step, {"loss": float(step)})
    assert (second.run_id, resumed.run_id) == (first.run_id, record.run_id)
    assert [step for step, _ in history(config, record.run_id or "", "loss")] == [1, 2, 3, 4]
    assert {run.info.status for run in runs(config)} == {"FINISHED"}


def test_a_finished_stage_is_not_recorded_twice_when_the_run_goes_on(config: PipelineConfig, folder: Path) -> None:
    first = Tracker.open(config, folder)
    with fails(), first:
        with first.stage("shards"):
            pass
        raise WorkerDiedError
    with Tracker.open(config, folder) as second, second.stage("shards") as again:
        again.set_tags({"dflash.cached": True})
    shards = [run for run in runs(config) if run.data.tags.get("dflash.stage") == "shards"]
    assert len(shards) == 1
    assert "dflash.cached" not in shards[0].data.tags


def test_a_finished_run_is_left_alone_by_the_next_start_which_records_its_own_curve(config: PipelineConfig, folder: Path) -> None:
    records = []
    for _ in range(2):
        with Tracker.open(config, folder) as tracker, tracker.stage("train") as record:
            record.log_metrics(1, {"loss": 2.0})
        records.append((tracker.run_id, record.run_id))
    assert records[0] != records[1]
    assert [history(config, run_id, "loss") for _, run_id in records if run_id] == [[(1, 2.0)], [(1, 2.0)]]
    assert list((folder / "metrics").iterdir()) == []


def test_runs_of_a_killed_process_become_killed_and_those_of_a_living_one_stay(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config()
    code = """
import os, signal, sys
from pathlib import Path
from dflash_core.config import parse_config
from tasks.tracker import Tracker
tracker = Tracker.open(parse_config(__import__("json").loads(sys.argv[1])), Path(sys.argv[2]))
with tracker.stage("train"):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    arguments = [sys.executable, "-c", code, config.model_dump_json(), str(tmp_path / "killed")]
    assert subprocess.run(arguments, check=False).returncode == -9
    assert [run.info.status for run in runs(config)] == ["RUNNING", "RUNNING"]
    alive = Tracker.open(config, tmp_path / "alive")
    other = Tracker.open(config, tmp_path / "other")
    status = {run.info.run_id: run.info.status for run in runs(config)}
    assert status.pop(alive.run_id or "") == "RUNNING"
    assert status.pop(other.run_id or "") == "RUNNING"
    assert list(status.values()) == ["KILLED", "KILLED"]


def test_threads_record_into_their_stage_and_leave_no_stray_run(config: PipelineConfig, folder: Path) -> None:
    with Tracker.open(config, folder) as tracker, tracker.stage("train") as record:
        threads = [threading.Thread(target=record.log_metrics, args=(1, {f"replica_{index}": 1.0})) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(runs(config)) == 2
    assert all(history(config, record.run_id or "", f"replica_{index}") == [(1, 1.0)] for index in range(4))


def test_a_long_setting_is_replaced_by_its_length(config: PipelineConfig, folder: Path) -> None:
    with Tracker.open(config, folder) as tracker:
        tracker.log_params({"template": "x" * 7000})
    assert tracker.complete
    (run,) = runs(config)
    assert run.data.params["template"] == "(7000 characters, see config.json)"


def test_lineage_names_place_digest_and_counts(config: PipelineConfig, folder: Path, tmp_path: Path) -> None:
    with Tracker.open(config, folder) as tracker, tracker.stage("shards") as record:
        record.log_dataset("shards", tmp_path / "shards", "ab" * 32, "training", {"tokens": 1234})
    client, _ = open_client(config)
    (entry,) = client.get_run(record.run_id).inputs.dataset_inputs
    assert (entry.dataset.name, entry.dataset.digest) == ("shards", "ab" * 16)
    assert json.loads(entry.dataset.profile) == {"tokens": 1234}
    assert str(tmp_path) in entry.dataset.source
    assert entry.tags[0].value == "training"


def test_a_failing_store_costs_the_record_and_not_the_work(config: PipelineConfig, folder: Path, tmp_path: Path) -> None:
    with Tracker.open(config, folder) as tracker:
        tracker.log_artifact(tmp_path / "there is no such file")
        assert not tracker.complete


def test_what_a_store_did_not_take_until_the_end_is_recorded_by_the_next_start(
    config: PipelineConfig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.tracker.PATIENCE_S", 0.2)
    with Tracker.open(config, folder) as first, first.stage("train") as record:
        for name in ("log_batch", "set_terminated"):
            monkeypatch.setattr(first.client, name, lambda *_, **__: (_ for _ in ()).throw(ConnectionError("away")))
        record.log_metrics(1, {"loss": 3.0})
    assert not first.complete
    with Tracker.open(config, folder) as second, second.stage("train") as resumed:
        resumed.log_metrics(1, {"loss": 3.0})  # a cached training tells its curve again
    assert (second.run_id, resumed.run_id) == (first.run_id, record.run_id)
    assert history(config, record.run_id or "", "loss") == [(1, 3.0)]
    assert {run.info.status for run in runs(config)} == {"FINISHED"}


def test_tracking_switched_off_touches_nothing(make_config: MakeConfig, folder: Path) -> None:
    config = make_config(tracking={"enabled": False})
    with Tracker.open(config, folder) as tracker, tracker.stage("train") as record:
        record.log_metrics(1, {"loss": 1.0})
        record.set_tags({"a": 1})
        tracker.log_metrics({"speedup": 2.0})
        record.log_sample({"system/cpu": 1.0})
        assert tracker.registry is None
    assert not config.run.workspace.exists()


def test_a_server_that_is_not_there_is_an_error_that_names_it(make_config: MakeConfig, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.store.START_PATIENCE_S", 0.0)
    config = make_config(tracking={"uri": "http://127.0.0.1:9"})
    with pytest.raises(TrackingError, match=r"http://127\.0\.0\.1:9 does not answer.*correct tracking\.uri"):
        Tracker.open(config, folder)


def test_params_are_flat_and_lists_stay_whole() -> None:
    assert flat_params({"a": {"b": 1, "c": {"d": [1, 2]}}, "e": {}}) == {"a.b": 1, "a.c.d": [1, 2], "e": {}}
