"""What MLflow is told about a run: one parent run, a nested run for every stage, and a registered model.

    with Tracker.open(config, run_folder) as tracker:               # FINISHED, FAILED or KILLED at the end
        with tracker.stage("train") as record:
            record.log_metrics(step, {"loss": 2.5})                  # microseconds: see tasks/journal.py
            record.log_artifact(path)

Everything goes through a client and run ids, never through MLflow's active run, which is local to a thread. The ids lie
in ``<run folder>/tracking.json``: the same command started again after a failure or a kill goes on in the same runs, and
runs that a killed process left RUNNING are set to KILLED at the next start. Once the run is open, a tracking store that
fails costs the record, not the work: calls are warned about, and metrics wait in their journal.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dflash_core.config import PipelineConfig
from dflash_core.stages import write_json_atomic
from tasks.journal import MetricJournal, Record
from tasks.origin import git_tags, process_tags, settle_dead_runs
from tasks.registry import Exported, Registry, Version
from tasks.store import open_client, pinned_experiment, usable

logger = logging.getLogger(__name__)

LONGEST_PARAM = 6000  # MLflow cuts longer values off
PATIENCE_S = 60.0  # how long the end of a stage waits for a store that is away
HURRIED_S = 5.0


class StageRecord:
    """The nested MLflow run of one stage. Where ``run_id`` is None (no tracking, or all is recorded) calls return at once."""

    def __init__(self, tracker: Tracker, name: str, run_id: str | None):
        self.name = name
        self.run_id = run_id
        self._tracker = tracker
        self._lock = threading.Lock()
        self._journal: MetricJournal | None = None
        self._closed = False
        if run_id is not None and self._journal_path.exists():
            self._journal = self._open_journal()  # an earlier process may have left metrics unsent

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics of a step; steps that were recorded before are dropped. Does not wait for the store. A ``MetricSink``."""
        self._append(step, metrics)

    def log_sample(self, metrics: Mapping[str, float]) -> None:
        """Record metrics that have no step of training: they are numbered. Does not wait for the store."""
        self._append(None, metrics)

    def _append(self, step: int | None, metrics: Mapping[str, float]) -> None:
        if self.run_id is None:
            return
        with self._lock:
            if self._closed:
                return
            self._journal = self._journal or self._open_journal()
        self._journal.append(step, metrics)

    def log_results(self, metrics: Mapping[str, float]) -> None:
        """Record results, which have no step."""
        if self.run_id is not None:
            self._tracker.log_metrics(metrics, self.run_id)

    def log_params(self, params: Mapping[str, object]) -> None:
        """Record params of the stage's run."""
        if self.run_id is not None:
            self._tracker.log_params(params, self.run_id)

    def set_tags(self, tags: Mapping[str, object]) -> None:
        """Set tags of the stage's run."""
        if self.run_id is not None:
            self._tracker.set_tags(tags, self.run_id)

    def log_artifact(self, path: Path, folder: str | None = None) -> None:
        """Copy a file or a folder to the run's artifacts."""
        if self.run_id is not None:
            self._tracker.log_artifact(path, folder, self.run_id)

    def log_dataset(self, name: str, source: Path | str, digest: str, context: str, profile: Mapping[str, object]) -> None:
        """Record that the stage read or wrote a dataset; nothing is loaded. ``profile`` holds its counts."""
        if self.run_id is not None:
            self._tracker.log_dataset(name, source, digest, context, profile, self.run_id)

    def flush(self, patience_s: float = PATIENCE_S) -> bool:
        """Wait until the metrics are in the store. False if it did not take them in time; they are kept."""
        return self._journal is None or self._journal.flush(patience_s)

    def close(self, status: str) -> None:
        """Deliver what is left and set the status of the run. An interrupted run does not wait long: its journal is kept."""
        with self._lock:
            self._closed = True
        if self._journal is not None:
            delivered = self._journal.close(HURRIED_S if status == "KILLED" else PATIENCE_S)
            if delivered and status == "FINISHED":
                self._journal.delete()  # nobody will go on in this run
        self._tracker.end_run(self.run_id, status)

    @property
    def uri(self) -> str | None:
        """The store."""
        return self._tracker.uri

    @property
    def _journal_path(self) -> Path:
        return self._tracker.folder / "metrics" / f"{self.name}-{self.run_id}.jsonl"

    def _open_journal(self) -> MetricJournal:
        return MetricJournal(self._journal_path, self._send)

    def _send(self, records: Sequence[Record]) -> None:
        from mlflow.entities import Metric

        assert self.run_id is not None
        self._tracker.client.log_batch(self.run_id, metrics=[Metric(item.key, item.value, item.milliseconds, item.step) for item in records])


class Tracker:
    """The parent run and the way to its stages."""

    def __init__(self, folder: Path, client: Any, experiment_id: str, run_id: str | None, uri: str | None):
        """Use ``Tracker.open`` or ``Tracker.off``."""
        self.folder = folder
        self.client = client
        self.experiment_id = experiment_id
        self.run_id = run_id
        self.uri = uri
        self.complete = True
        """False once a call failed: the record in MLflow lacks something."""

    @classmethod
    def open(cls, config: PipelineConfig, folder: Path) -> Tracker:
        """Open the run that belongs to ``folder``: the unfinished one of an earlier start, or a new one.

        Raises:
            TrackingError: the store does not answer or refuses.
        """
        if not config.tracking.enabled:
            return cls.off(folder)
        client, uri = open_client(config)
        with usable(uri, "Correct tracking.uri, or record nothing with --set tracking.enabled=false"):
            experiment_id = pinned_experiment(client, uri, config)
            settle_dead_runs(client, experiment_id)
            tracker = cls(folder, client, experiment_id, _unfinished_run(client, folder, uri), uri)
            tracker._begin(config)
        return tracker

    @classmethod
    def off(cls, folder: Path) -> Tracker:
        """A tracker that records nothing."""
        return cls(folder, None, "", None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end_run(self.run_id, _status_of(error))

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[StageRecord]:
        """The nested run of a stage: the one an earlier, interrupted start began, or a new one."""
        record = StageRecord(self, name, self._stage_run(name))
        try:
            yield record
        except BaseException as error:
            record.close(_status_of(error))
            raise
        record.close("FINISHED")

    def log_params(self, params: Mapping[str, object], run_id: str | None = None) -> None:
        """Record params; a value too long for MLflow is replaced by its length (the whole is in the config artifact)."""
        if self.run_id is None:
            return
        from mlflow.entities import Param

        items = [Param(key, _short(value)) for key, value in params.items()]
        for batch in (items[start : start + 100] for start in range(0, len(items), 100)):  # the most that MLflow takes in one call
            self._attempt(functools.partial(self.client.log_batch, params=batch), run_id)

    def log_metrics(self, metrics: Mapping[str, float], run_id: str | None = None) -> None:
        """Record results (no steps) at once; for metrics of training steps see ``StageRecord.log_metrics``."""
        if self.run_id is None:
            return
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        items = [Metric(key, float(value), now, 0) for key, value in metrics.items()]
        self._attempt(lambda run: self.client.log_batch(run, metrics=items), run_id)

    def set_tags(self, tags: Mapping[str, object], run_id: str | None = None) -> None:
        """Set tags."""
        if self.run_id is None:
            return
        from mlflow.entities import RunTag

        items = [RunTag(key, str(value)) for key, value in tags.items()]
        self._attempt(lambda run: self.client.log_batch(run, tags=items), run_id)

    def log_artifact(self, path: Path, folder: str | None = None, run_id: str | None = None) -> None:
        """Copy a file or a folder to the run's artifacts."""
        log = "log_artifacts" if path.is_dir() else "log_artifact"
        self._attempt(lambda run: getattr(self.client, log)(run, str(path), folder), run_id)

    def log_text(self, text: str, name: str) -> None:
        """Write a text artifact of the parent run."""
        self._attempt(lambda run: self.client.log_text(run, text, name), None)

    def log_dataset(self, name: str, source: Path | str, digest: str, context: str, profile: Mapping[str, object], run_id: str) -> None:
        """Record lineage: a dataset by name, place and digest, with its counts; nothing is loaded."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        place = json.dumps({"uri": source.resolve().as_uri() if isinstance(source, Path) else source})
        dataset = Dataset(name, digest[:32], "local", place, profile=json.dumps(dict(profile)))  # MLflow takes digests of up to 36 characters
        tags = [InputTag("mlflow.data.context", context)]
        self._attempt(lambda run: self.client.log_inputs(run, [DatasetInput(dataset, tags)]), run_id)

    def register_model(self, exported: Exported) -> Version | None:
        """Register an exported drafter, from the parent run, unless it is registered. None if there is no tracking or that failed."""
        found: list[Version] = []
        registry = self.registry
        if registry is not None:
            self._attempt(lambda run: found.append(registry.register(self.experiment_id, run, exported)), None)
        return found[0] if found else None

    @property
    def registry(self) -> Registry | None:
        """The registered models of the same store; None where nothing is recorded."""
        return Registry(self.client, self.uri) if self.uri is not None else None

    def page(self) -> str | None:
        """Address of the run's page, where MLflow is a server."""
        return self._address(f"runs/{self.run_id}")

    def artifact_page(self, name: str) -> str | None:
        """Address of an artifact of the run, as MLflow's pages show it."""
        return self._address(f"runs/{self.run_id}/artifacts/{name}")

    def _address(self, place: str) -> str | None:
        if self.uri is None or not self.uri.startswith("http"):
            return None
        # Without the query MLflow 3 shows its pages for conversations with language models, on which a training looks empty.
        return f"{self.uri.rstrip('/')}/#/experiments/{self.experiment_id}/{place}?workflowType=machine_learning"

    def end_run(self, run_id: str | None, status: str) -> None:
        """Set the status of a run and its end."""
        if run_id is not None:
            self._attempt(lambda run: self.client.set_terminated(run, status), run_id)

    def _begin(self, config: PipelineConfig) -> None:
        tags = {**process_tags(), **git_tags(), "dflash.config_digest": config.digest, "dflash.target": config.target.model}
        if self.run_id is None:
            self.run_id = self._create_run(config.run.name, tags)
        else:
            self.client.update_run(self.run_id, status="RUNNING")
            tags["dflash.resumed"] = "true"
        write_json_atomic(self.folder / "tracking.json", {"uri": self.uri, "run_id": self.run_id})
        self.set_tags(tags)
        self.log_params(flat_params(config.model_dump(mode="json")))
        self.log_text(json.dumps(config.model_dump(mode="json"), indent=2) + "\n", "config.json")

    def _create_run(self, name: str, tags: Mapping[str, str]) -> str:
        run = self.client.create_run(self.experiment_id, tags=dict(tags), run_name=name)
        return str(run.info.run_id)

    def _stage_run(self, name: str) -> str | None:
        if self.run_id is None:
            return None
        tags = {"mlflow.parentRunId": self.run_id, "dflash.stage": name, **process_tags()}
        try:
            where = f"tags.`mlflow.parentRunId` = '{self.run_id}' and tags.`dflash.stage` = '{name}'"
            begun = self.client.search_runs([self.experiment_id], where, max_results=1)
            if not begun:
                return self._create_run(name, tags)
            if begun[0].info.status == "FINISHED":
                return None  # all of it is recorded
            run_id = str(begun[0].info.run_id)
            self.client.update_run(run_id, status="RUNNING")
            self.set_tags(tags, run_id)
            return run_id
        except Exception as error:
            self._warn(error)
            return None

    def _attempt(self, call: Callable[[str], object], run_id: str | None) -> None:
        run_id = run_id or self.run_id
        if run_id is None:
            return
        try:
            call(run_id)
        except Exception as error:  # MLflow raises its own, the HTTP library's and the database's
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        self.complete = False
        logger.warning("Not recorded in MLflow (%s): %s", self.uri, error)


def flat_params(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one level of dotted names, for comparing runs; lists stay whole."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flat_params(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= LONGEST_PARAM else f"({len(text)} characters, see config.json)"


def _status_of(error: BaseException | None) -> str:
    """KILLED for what is not an ``Exception``: Ctrl-C, and the signal that a cancelled Prefect run raises."""
    if error is None:
        return "FINISHED"
    return "FAILED" if isinstance(error, Exception) else "KILLED"


def _unfinished_run(client: Any, folder: Path, uri: str) -> str | None:
    """The run that an earlier start of the same command began in this store and did not finish."""
    try:
        known = json.loads((folder / "tracking.json").read_text(encoding="utf-8"))
        if known["uri"] != uri:
            return None
        info = client.get_run(known["run_id"]).info
    except Exception:  # no such file, or no such run any more
        return None
    return str(info.run_id) if info.status != "FINISHED" and info.lifecycle_stage == "active" else None
