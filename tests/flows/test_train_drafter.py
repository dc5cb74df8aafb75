"""The whole flow on a tiny target, with a real Prefect server and a real MLflow store."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dflash_core import runners
from dflash_core.config import PipelineConfig, load_config
from dflash_core.errors import DFlashError
from flows.cli import app
from flows.train_drafter import train_drafter
from tasks.progress import watcher
from tasks.store import open_client
from tasks.system import system_metrics
from tasks.tracker import StageRecord
from tests.flows.newest import newest_run
from tests.tiny_run import STEPS
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

STAGES = ["target", "responses", "samples", "shards", "warm-up", "train", "evaluate", "export"]


class Outcomes:
    """Watches a run and keeps how its stages ended."""

    def __init__(self) -> None:
        self.ended: dict[str, str | None] = {}
        self.steps: list[int] = []

    def begin(self, stage: str) -> None:
        pass

    def progress(self, stage: str, done: int, total: int, unit: str, remaining_s: float | None) -> None:
        pass

    def metrics(self, stage: str, step: int, metrics: Any) -> None:
        self.steps.append(step)

    def end(self, stage: str, outcome: str | None) -> None:
        self.ended[stage] = outcome


@pytest.fixture
def outcomes() -> Iterator[Outcomes]:
    seen = Outcomes()
    token = watcher.set(seen)
    yield seen
    watcher.reset(token)


@pytest.fixture(scope="module")
def first_run(tiny_config: Path, prefect_url: str) -> dict[str, Any]:
    """Summary of a complete run, whose training lasts until system metrics have been sampled."""
    sampled, log_sample = threading.Event(), StageRecord.log_sample

    def log(record: StageRecord, sample: dict[str, float]) -> None:
        log_sample(record, sample)
        if record.name == "train":
            sampled.set()

    @contextlib.contextmanager
    def until_sampled(record: StageRecord) -> Iterator[None]:
        with system_metrics(record):
            yield
            assert record.name != "train" or sampled.wait(PATIENCE_S)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.05")
        patch.setattr(StageRecord, "log_sample", log)
        patch.setattr("tasks.run.system_metrics", until_sampled)
        return json.loads(train_drafter(load_config(tiny_config)).read_text())


def mlflow_run(config: PipelineConfig, run_id: str) -> tuple[Any, dict[str, Any]]:
    """(parent run, nested run of each stage)."""
    client, _ = open_client(config)
    parent = client.get_run(run_id)
    nested = client.search_runs([parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{run_id}'")
    return parent, {run.data.tags["dflash.stage"]: run for run in nested}


def test_a_run_leaves_a_summary_with_what_was_measured(first_run: dict[str, Any], tiny_config: Path) -> None:
    assert first_run["lossless"] == 1.0
    assert first_run["acceptance_length"]["pooled"] >= 1.0
    assert first_run["config_digest"] == load_config(tiny_config).digest
    assert (Path(first_run["export_path"]) / "model.safetensors").is_file()
    assert {name for name, stage in first_run["stages"].items() if stage["cached"]} == set()


def test_a_run_is_recorded_in_mlflow_with_a_nested_run_per_stage(first_run: dict[str, Any], tiny_config: Path) -> None:
    config = load_config(tiny_config)
    parent, stages = mlflow_run(config, first_run["mlflow_run_id"])
    client, _ = open_client(config)
    assert parent.info.status == "FINISHED"
    assert sorted(stages) == sorted(name.replace("-", "_") for name in STAGES)
    assert {run.info.status for run in stages.values()} == {"FINISHED"}
    assert parent.data.params["drafter.block_size"] == "4"
    assert parent.data.metrics["lossless"] == 1.0
    assert [item.step for item in client.get_metric_history(stages["train"].info.run_id, "loss")] == list(range(1, STEPS + 1))
    assert [entry.dataset.name for entry in stages["shards"].inputs.dataset_inputs] == ["shards"]
    assert {item.path for item in client.list_artifacts(parent.info.run_id)} == {
        "config.json", "summary.json", "summary.md", "plots", "report.html"
    }  # fmt: skip
    assert "plots/report.png" in {item.path for item in client.list_artifacts(parent.info.run_id, "plots")}
    page = Path(client.download_artifacts(parent.info.run_id, "report.html")).read_text()
    assert page.count("<svg") == 8
    assert "Lossless." in page


def test_everything_that_a_run_is_judged_by_is_a_metric(first_run: dict[str, Any], tiny_config: Path) -> None:
    parent, stages = mlflow_run(load_config(tiny_config), first_run["mlflow_run_id"])
    measured = {"lossless", "acceptance_length", "acceptance_length_untrained", "accepted_slot_1", "accepted_slot_3", "tokens_per_second", "speedup"}
    trained = {"training_tokens_per_second", "training_data_wait_share", "training_peak_memory_rss", "final_loss", "final_token_accuracy"}
    assert measured | trained <= set(parent.data.metrics)
    curves = {"loss", "tokens_per_second", "data_wait_share", "memory_rss", "learning_rate", "grad_norm", "queue_depth", "accuracy_slot_1"}
    assert curves <= set(stages["train"].data.metrics)
    assert {name for name in stages["train"].data.metrics if name.startswith("system/")} >= {
        "system/cpu_utilization_percentage", "system/system_memory_usage_megabytes", "system/disk_usage_percentage"
    }  # fmt: skip


def test_the_drafter_is_a_registered_version_with_what_speaks_for_it(first_run: dict[str, Any], tiny_config: Path) -> None:
    config = load_config(tiny_config)
    client, _ = open_client(config)
    _, stages = mlflow_run(config, first_run["mlflow_run_id"])
    version = next(item for item in client.search_model_versions("name = 'dflash-target'") if item.run_id == first_run["mlflow_run_id"])
    assert stages["export"].data.tags["dflash.model_version"] == f"dflash-target version {version.version}"
    assert {"target", "target.digest", "data.digest", "git.commit", "config.digest", "lossless", "acceptance_length", "speedup"} <= set(version.tags)
    assert (version.tags["lossless"], version.tags["config.digest"]) == ("1.0", config.digest)
    assert version.description.startswith("# DFlash drafter for target")
    files = {path.name: path.read_bytes() for path in Path(version.source.removeprefix("file://")).iterdir()}
    assert files == {path.name: path.read_bytes() for path in Path(first_run["export_path"]).iterdir()}
    assert not [name for name in files if name.endswith((".pkl", ".pickle", ".pt", ".bin"))]


def test_the_command_line_shows_every_stage_which_the_second_run_finds_and_says_so_in_prefect(first_run: dict[str, Any], tiny_config: Path) -> None:
    finished = CliRunner().invoke(app, ["run", str(tiny_config)])
    assert finished.exit_code == 0, finished.output
    lines = finished.stdout.splitlines()
    assert [line.split(":")[0] for line in lines if line.endswith(": begins")] == [name.replace("-", "_") for name in STAGES]
    assert Path(lines[-1]).name == "summary.json"
    told = dict(line.split(": ", 1) for line in lines[-7:-1])
    assert list(told) == ["lossless", "acceptance length", "speed", "to serve", "report", "MLflow"]
    assert told["to serve"].split(" (")[0] == first_run["export_path"]
    assert Path(told["report"]).is_file()
    assert "mlflow server --backend-store-uri sqlite:///" in told["MLflow"]
    summary = json.loads(Path(lines[-1]).read_text())
    keys = "lossless acceptance_length acceptance_length_untrained speedup tokens_per_second stages mlflow_run_id export_path config_digest"
    assert set(summary) >= set(keys.split())
    assert all(stage["cached"] for stage in summary["stages"].values())
    cached = dict.fromkeys(STAGES, "Cached")
    run, tasks, artifacts = newest_run(cached.__eq__)
    assert (run.name, tasks) == ("tiny", cached)
    assert {"summary", "acceptance"} <= set(artifacts)
    assert "| acceptance length |" in artifacts["summary"].data
    assert "| registered as | dflash-target version 1 |" in artifacts["summary"].data, "the same export is registered once"
    # The curve of the cached training is there to be compared with others.
    config = load_config(tiny_config)
    _, stages = mlflow_run(config, summary["mlflow_run_id"])
    client, _ = open_client(config)
    assert [item.step for item in client.get_metric_history(stages["train"].info.run_id, "loss")] == list(range(1, STEPS + 1))
    assert stages["train"].data.tags["dflash.cached"] == "true"


def test_a_failing_stage_fails_the_run_everywhere_and_the_error_is_its_own(
    first_run: dict[str, Any], tiny_config: Path, outcomes: Outcomes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise DFlashError("the disk is full")

    config = load_config(tiny_config, ["evaluation.max_new_tokens=5"])
    monkeypatch.setitem(runners.RUNNERS, "evaluate", fail)
    with pytest.raises(DFlashError, match="the disk is full"):
        train_drafter(config)
    run, tasks, _ = newest_run(lambda tasks: tasks.get("evaluate") == "Failed" and tasks.get("train") == "Cached")
    assert (run.state.name, tasks["train"], tasks["evaluate"]) == ("Failed", "Cached", "Failed")
    assert "export" not in tasks
    client, _ = open_client(config)
    newest = max(client.search_runs([client.get_experiment_by_name("dflash").experiment_id]), key=lambda item: item.info.start_time)
    assert (newest.data.tags["dflash.stage"], newest.info.status) == ("evaluate", "FAILED")
    assert client.get_run(newest.data.tags["mlflow.parentRunId"]).info.status == "FAILED"
    assert outcomes.ended["evaluate"] is None
