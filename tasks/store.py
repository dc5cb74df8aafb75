"""Where MLflow keeps its records, and the checks that make a wrong address fail in seconds instead of minutes."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash_core.config import PipelineConfig
from dflash_core.errors import DFlashError

START_PATIENCE_S = 20.0  # for a server that is being started at the same time


class TrackingError(DFlashError):
    """The tracking store cannot be used. Names the store and what to do."""


def tracking_uri(config: PipelineConfig) -> str:
    """The store of a run: ``tracking.uri``, else MLFLOW_TRACKING_URI, else SQLite in the workspace."""
    return config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{config.run.workspace.resolve()}/mlflow.db"


def open_client(config: PipelineConfig) -> tuple[Any, str]:
    """(an ``MlflowClient``, its URI). The workspace is made if it does not exist.

    Raises:
        TrackingError: a server is named that does not answer, or the address is none that MLflow knows.
    """
    uri = tracking_uri(config)
    config.run.workspace.mkdir(parents=True, exist_ok=True)
    with usable(uri):
        if uri.startswith(("http://", "https://")):
            _wait_for_server(uri)
        from mlflow import MlflowClient

        logging.getLogger("alembic").setLevel(logging.WARNING)  # it tells every step of creating the database
        if (path := database_to_make(uri)) is not None:
            _make_database(path)
        return MlflowClient(uri, registry_uri=uri), uri


def database_to_make(uri: str) -> Path | None:
    """The file of a store in SQLite that nobody has made yet; None of any other store."""
    path = Path(uri.removeprefix("sqlite:///"))
    return path if uri.startswith("sqlite:///") and not path.exists() else None


def _make_database(path: Path) -> None:
    """A new database appears whole: MLflow refuses for ever one that it was making when it was killed, or when the disk was full."""
    from mlflow import MlflowClient

    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        MlflowClient(f"sqlite:///{folder}/{path.name}").search_experiments()
        with contextlib.suppress(OSError):  # another process was faster, or the disk knows no links and MLflow makes it in place
            os.link(Path(folder) / path.name, path)


@contextlib.contextmanager
def usable(uri: str, remedy: str = "Correct tracking.uri") -> Iterator[None]:
    """What goes wrong with the store inside becomes a ``TrackingError``: MLflow raises its own errors, the HTTP library's and the database's."""
    try:
        yield
    except DFlashError:
        raise
    except Exception as error:
        raise TrackingError(f"The MLflow store {uri} cannot be used: {error}. {remedy}") from error


def pinned_experiment(client: Any, uri: str, config: PipelineConfig) -> str:
    """Id of the configured experiment. A new one keeps its artifacts in the workspace, unless a server looks after them."""
    from mlflow.exceptions import MlflowException

    name = config.tracking.experiment
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        place = None if uri.startswith("http") else (config.run.workspace.resolve() / "mlflow-artifacts").as_uri()
        try:
            return str(client.create_experiment(name, artifact_location=place))
        except MlflowException:  # another run has just made it
            experiment = client.get_experiment_by_name(name)
            if experiment is None:
                raise
    if experiment.lifecycle_stage == "deleted":
        raise TrackingError(f"the experiment '{name}' has been deleted; restore it or set tracking.experiment to another name")
    return str(experiment.experiment_id)


def _wait_for_server(uri: str) -> None:
    """MLflow itself tries for four minutes before it says that nobody is there."""
    deadline = time.monotonic() + START_PATIENCE_S
    while True:
        try:
            with urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=5):
                return
        except urllib.error.HTTPError:
            return  # somebody answers; MLflow's own calls will tell what is wrong
        except OSError as error:
            if time.monotonic() > deadline:
                raise TrackingError(f"The MLflow server {uri} does not answer: {error}. Start it or correct tracking.uri") from error
            time.sleep(1.0)
