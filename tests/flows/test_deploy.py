"""Deployments on real services: what a user does with ``dflashctl up``, ``deploy``, ``submit`` and ``down``, and with Prefect's own commands."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.settings import PREFECT_API_URL, temporary_settings
from typer.testing import CliRunner

from dflash_core.config import PipelineConfig, load_config
from dflash_core.retrain import RetrainConfig, load_any_config
from flows.cli import app
from flows.deploy import PREFECT_YAML, create_pool, parameters_of, summary_of, with_current_parameters
from flows.services import ROOT, environment, marked, services
from tasks.registry import Registry
from tests.flows.newest import newest_run
from tests.tiny_run import write_tiny_run
from tests.waiting import PATIENCE_S, eventually

DEPLOYED = {
    "train-drafter/demo": "demo.yaml",
    "train-drafter/gpu": "gpu-demo.yaml",
    "retrain-drafter/demo": "retrain-demo.yaml",
    "evaluate-drafter/demo": "demo.yaml",
}
ORDER = ("target", "responses", "samples", "shards", "warm-up", "train", "evaluate", "export")
STAGES = set(ORDER)


def command(arguments: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a Python module as a program in the checkout."""
    inherited = {key: value for key, value in os.environ.items() if key not in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "PREFECT_HOME")}
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env={**inherited, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@dataclass
class Site:
    """Running services and a configuration for them."""

    folder: Path
    config: Path
    variables: dict[str, str]

    def dflashctl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return command(["flows.cli", *arguments], {"DFLASH_SERVICES": str(self.folder)})


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, mlflow_database: Path) -> Iterator[Site]:
    """Everything that 'up' starts, with prefect.yaml deployed."""
    folder = tmp_path_factory.mktemp("site")
    config = write_tiny_run(folder)
    site = Site(folder / "services", config, {})
    site.folder.mkdir()
    shutil.copy(mlflow_database, site.folder)
    started = site.dflashctl("up")
    assert started.returncode == 0, started.stderr
    try:
        site.variables = environment(services(site.folder))
        assert all(f"export {name}={value}" in started.stdout for name, value in site.variables.items())
        deployed = site.dflashctl("deploy")
        assert deployed.returncode == 0, deployed.stdout + deployed.stderr
        yield site
    finally:
        stopped = site.dflashctl("down")
        assert stopped.returncode == 0, stopped.stderr
    assert marked(site.folder) == []


@pytest.fixture(scope="module")
def client(site: Site) -> Iterator[Any]:
    from prefect.client.orchestration import get_client

    with temporary_settings({PREFECT_API_URL: site.variables["PREFECT_API_URL"]}), get_client(sync_client=True) as client:
        yield client


def deployed_name(item: dict[str, Any]) -> str:
    return f"{item['entrypoint'].rsplit(':', 1)[1].replace('_', '-')}/{item['name']}"


def test_prefect_yaml_holds_the_configurations_that_it_names() -> None:
    text = PREFECT_YAML.read_text(encoding="utf-8")
    assert with_current_parameters(text) == text, "run: dflashctl deploy"
    parameters = {deployed_name(item): item["parameters"]["config"] for item in yaml.safe_load(text)["deployments"]}
    assert parameters == {name: load_any_config(ROOT / "configs" / file).model_dump(mode="json") for name, file in DEPLOYED.items()}


def test_what_is_submitted_is_told_in_a_few_lines() -> None:
    changes = ["training.max_steps=50"]
    told = summary_of(load_config(ROOT / "configs" / "demo.yaml", changes), changes, "train-drafter/demo", "1234", "http://here/runs/flow-run/1234")
    assert told.splitlines() == [
        "demo is submitted to train-drafter/demo (flow run 1234)",
        "  target    smollm2-135m-instruct",
        "  data      builtin:python-tasks",
        "  drafter   3 layers, blocks of 8",
        "  training  50 steps on cpu, cpu",
        "  changed   training.max_steps=50",
        "  page      http://here/runs/flow-run/1234",
    ]


@pytest.mark.parametrize(("file", "flow"), [("demo", "retrain-drafter"), ("retrain-demo", "train-drafter")])
def test_a_configuration_of_another_flow_is_refused_with_the_right_one_before_anything_is_asked_for(
    file: str, flow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")  # nobody is there
    refused = CliRunner().invoke(app, ["submit", str(ROOT / "configs" / f"{file}.yaml"), "--deployment", f"{flow}/demo"])
    assert refused.exit_code == 2
    right = "train-drafter" if flow == "retrain-drafter" else "retrain-drafter"
    assert re.search(rf"  retrain = .*: {flow}/demo .* --deployment {right}/demo", refused.stderr), refused.stderr


def test_a_changed_configuration_changes_only_the_parameters_that_name_it() -> None:
    text = PREFECT_YAML.read_text(encoding="utf-8")
    stale = text.replace("learning_rate: 0.001", "learning_rate: 0.5")
    assert stale != text
    assert with_current_parameters(stale) == text


def test_a_small_number_is_a_number_to_prefect_too() -> None:
    parameters = parameters_of(load_config(ROOT / "configs" / "demo.yaml", ["training.learning_rate=1e-7", "training.compile=off"]))
    assert yaml.safe_load(yaml.safe_dump(parameters)) == parameters


def test_a_form_made_of_the_schema_has_the_order_of_the_file() -> None:
    schema = RetrainConfig.model_json_schema()
    for section in [schema, *schema["$defs"].values()]:
        assert [field["position"] for field in section["properties"].values()] == list(range(len(section["properties"])))
        assert all("description" in field for field in section["properties"].values())
    assert list(schema["properties"]) == [*PipelineConfig.model_fields, "retrain"]


@pytest.mark.slow
def test_what_is_deployed_is_what_prefect_yaml_says_and_a_pool_that_is_there_stays(site: Site, client: Any) -> None:
    with temporary_settings({PREFECT_API_URL: site.variables["PREFECT_API_URL"]}):
        create_pool()
    flows = {item.id: item.name for item in client.read_flows()}
    deployed = {f"{flows[item.flow_id]}/{item.name}": item for item in client.read_deployments()}
    assert set(deployed) == set(DEPLOYED)
    for name, item in deployed.items():
        assert "dflash" in item.tags
        assert (item.work_pool_name, item.global_concurrency_limit.limit, item.concurrency_options.collision_strategy) == ("dflash", 1, "ENQUEUE")
        assert [schedule.active for schedule in item.schedules] == ([] if name.startswith("evaluate") else [False])
        assert item.pull_steps == [{"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}]
        assert item.parameters == parameters_of(load_any_config(ROOT / "configs" / DEPLOYED[name]))


@pytest.mark.slow
def test_a_submitted_run_completes_and_is_recorded_with_links(site: Site, client: Any) -> None:
    submitted = CliRunner().invoke(app, ["submit", str(site.config), "--watch"])
    assert submitted.exit_code == 0, submitted.stderr
    completed = dict.fromkeys(STAGES, "Completed")
    run, tasks, artifacts = newest_run(completed.__eq__)
    assert (run.name, run.state.name, tasks) == ("tiny", "Completed", completed)
    assert {"summary", "acceptance", "train-progress"} <= set(artifacts)
    assert submitted.stdout.startswith(f"tiny is submitted to train-drafter/demo (flow run {run.id})\n")
    assert f"/runs/flow-run/{run.id}\n" in submitted.stdout
    told = [line.split(" ", 1)[1] for line in submitted.stdout.splitlines()[6:]]
    assert told[-5].startswith("lossless: 3 of 3 answers are the target's own")
    assert told[-1] == "Completed"
    assert [line.split(":")[0] for line in told if ": done in " in line] == [name.replace("-", "_") for name in ORDER]

    from mlflow import MlflowClient

    store = MlflowClient(site.variables["MLFLOW_TRACKING_URI"])
    experiment = store.get_experiment_by_name("dflash")
    recorded = store.search_runs([experiment.experiment_id])
    assert {item.data.tags.get("dflash.stage", "parent") for item in recorded} == {"parent", *(name.replace("-", "_") for name in STAGES)}
    assert {item.info.status for item in recorded} == {"FINISHED"}
    (parent,) = [item for item in recorded if "dflash.stage" not in item.data.tags]
    assert parent.data.metrics["lossless"] == 1.0
    assert {"summary.json", "report.html"} <= {item.path for item in store.list_artifacts(parent.info.run_id)}
    registry = Registry(store, site.variables["MLFLOW_TRACKING_URI"])
    version = registry.version("dflash-target", "1")
    assert version.run_id == parent.info.run_id
    assert {path.name for path in registry.fetch(version, site.folder / "fetched").iterdir()} >= {"config.json", "model.safetensors", "README.md"}
    summary = next(item for item in client.read_artifacts() if item.key == "summary" and item.flow_run_id == run.id)
    assert f"[report]({site.variables['MLFLOW_TRACKING_URI']}/#/experiments/{experiment.experiment_id}/runs/{parent.info.run_id}" in summary.data
    assert f"/#/models/dflash-target/versions/{version.number})" in summary.data


@pytest.mark.slow
def test_a_bad_parameter_is_refused_with_its_path_and_nothing_starts(site: Site, client: Any) -> None:
    from prefect.exceptions import PrefectHTTPStatusError

    before = len(client.read_flow_runs())
    parameters: Any = parameters_of(load_config(site.config))
    parameters["config"]["training"]["max_steps"] = 0
    deployment = client.read_deployment_by_name("train-drafter/demo").id
    with pytest.raises(PrefectHTTPStatusError) as refused:
        client.create_flow_run_from_deployment(deployment, parameters=parameters)
    assert "config.training.max_steps" in refused.value.response.text
    checked = CliRunner().invoke(app, ["submit", str(site.config), "--set", "drafter.num_taps=40"])
    assert checked.exit_code == 2
    assert "drafter.num_taps = 40" in checked.stderr
    nowhere = CliRunner().invoke(app, ["submit", str(site.config), "--deployment", "train-drafter/none"])
    assert nowhere.exit_code == 1
    assert "'train-drafter/none' is not deployed; what is: " in nowhere.stderr
    assert "train-drafter/demo" in nowhere.stderr
    assert len(client.read_flow_runs()) == before


@pytest.mark.slow
def test_status_names_the_services_and_up_finds_them_running(site: Site) -> None:
    status = site.dflashctl("status")
    assert status.returncode == 0
    assert [line.split()[0] for line in status.stdout.splitlines()[:3]] == ["prefect", "mlflow", "worker"]
    assert site.dflashctl("up").stdout == status.stdout


@pytest.mark.slow
def test_the_next_run_finds_the_stages_that_are_done_and_down_ends_it_when_it_has_saved_its_work(site: Site, client: Any) -> None:
    stages = site.config.parent / "workspace" / "stages"
    long = ["run.name=again", "run.seed=5", "training.max_steps=1000000", "training.epochs=1000000", "training.checkpoint_every=1000000"]
    known = set(stages.glob("train-*"))
    submitted = CliRunner().invoke(app, ["submit", str(site.config), *[word for item in long for word in ("--set", item)]])
    assert submitted.exit_code == 0, submitted.stderr
    assert eventually(lambda: any((folder / "metrics.jsonl").is_file() for folder in set(stages.glob("train-*")) - known), 0.1)
    cached = dict.fromkeys(("target", "responses", "samples", "shards"), "Cached")
    run, tasks, _ = newest_run(lambda tasks: cached.items() <= tasks.items())
    assert run.name == "again"
    assert cached.items() <= tasks.items()
    stopped = site.dflashctl("down")
    assert stopped.returncode == 0, stopped.stderr
    assert marked(site.folder) == []
    (folder,) = set(stages.glob("train-*")) - known
    assert list((folder / "checkpoints").iterdir())
    with contextlib.closing(sqlite3.connect(site.folder / "mlflow.db")) as database:
        ended = database.execute("select status from runs order by start_time desc limit 2").fetchall()
    assert ended == [("KILLED",), ("FINISHED",)]  # the training, and the warm-up before it
    with contextlib.closing(sqlite3.connect(site.folder / "prefect" / "prefect.db")) as database:
        assert database.execute("select state_type from flow_run order by created desc limit 1").fetchall() == [("CRASHED",)]


@contextlib.contextmanager
def up_half_way(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """'up' that has started the servers, and to which they do not answer, however soon they would."""
    code = "from flows import cli, services; services.healthy = lambda service: False; cli.app(['up'])"
    variables = {**os.environ, "DFLASH_SERVICES": str(folder)}
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=variables, stderr=subprocess.PIPE, text=True) as process:
        assert eventually(lambda: len(services(folder)) == 2 or process.poll() is not None, 0.05)
        assert process.poll() is None
        yield process


@pytest.mark.slow
def test_up_that_is_interrupted_half_way_stops_what_it_has_started(tmp_path: Path) -> None:
    with up_half_way(tmp_path) as process:
        process.send_signal(signal.SIGTERM)  # which 'up' takes as Ctrl-C
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert marked(tmp_path) == []


@pytest.mark.slow
def test_what_a_killed_up_leaves_is_found_by_the_next_up_and_stopped_by_down(tmp_path: Path) -> None:
    with up_half_way(tmp_path) as process:
        process.kill()
    assert len(marked(tmp_path)) >= 2
    again = command(["flows.cli", "up"], {"DFLASH_SERVICES": str(tmp_path)})
    assert again.returncode == 1
    assert "not: worker. Stop the rest (dflashctl down)" in again.stderr
    assert command(["flows.cli", "down"], {"DFLASH_SERVICES": str(tmp_path)}).returncode == 0
    assert marked(tmp_path) == []


@pytest.mark.slow
def test_up_stops_everything_and_names_the_log_when_a_service_dies(tmp_path: Path) -> None:
    with up_half_way(tmp_path) as process:
        os.kill(services(tmp_path)["mlflow"].pid, signal.SIGKILL)
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "mlflow has ended with status -9" in errors
    assert str(tmp_path / "logs" / "mlflow.log") in errors
    assert marked(tmp_path) == []
