"""Registered models: a target's own has a version for every exported drafter, and the alias ``champion`` names the one to serve.

    registry = Registry(client, uri)
    version = registry.register(experiment_id, run_id, Exported(...))     # finds it if it is there already
    registry.promote(version)

What is registered is the serving folder as it is: safetensors, JSON, a model card. Every address is given to MLflow, which
otherwise takes that of the process: its SQL store looks for the logged model behind a source ``models:/<id>`` in the process's
own tracking store, and does not find it. So a version's source is the logged model's place.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from dflash_core.target.fetch import is_path
from tasks.store import TrackingError, usable

Found = TypeVar("Found")
CHAMPION = "champion"
EXPORT_KEY = "dflash.export_key"
LONGEST_DESCRIPTION = 5000  # characters that MLflow's databases hold


@dataclass(frozen=True)
class Exported:
    """An exported drafter for a target, as the settings name it.

    ``key`` is that of its export: the same export is registered once. ``card`` is its model card.
    """

    target: str
    key: str
    folder: Path
    params: Mapping[str, str]
    tags: Mapping[str, str]
    card: str


@dataclass(frozen=True)
class Version:
    """A registered version. ``source`` is the place of its files, as the store knows it."""

    name: str
    number: str
    source: str
    run_id: str | None
    model_id: str
    tags: Mapping[str, str]

    def __str__(self) -> str:
        return f"{self.name} version {self.number}"


def registered_name(target: str) -> str:
    """Name of a target's registered model: ``dflash-model``, or ``dflash-owner--model`` of a repository, for others have models of that name too."""
    if _is_repository(target):
        return "dflash-" + "--".join(_plain(part) for part in target.split("/"))
    return _short_name(target)


def _is_repository(target: str) -> bool:
    return target.count("/") == 1 and not is_path(target) and not Path(target).is_dir()


def _short_name(target: str) -> str:
    last = Path(target).expanduser().resolve().name if target.startswith((".", "~", "/")) else target.rstrip("/").rsplit("/", 1)[-1]
    return f"dflash-{_plain(last)}"


def _plain(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name.lower())


class Registry:
    """The model registry of one store, through its client alone."""

    def __init__(self, client: Any, uri: str):
        """``client`` is None for a store that nobody has made yet, which would take seconds: nothing is found there, and nothing can be put."""
        self._client = client
        self._uri = uri

    def name_of(self, target: str) -> str:
        """Name of the registered model of a target: ``registered_name``, unless it has one already that was named without its owner."""
        name, short = registered_name(target), _short_name(target)
        if name == short:
            return name
        return short if self._found(lambda: self._client.get_registered_model(short).tags.get("dflash.target", "")) in ("", target) else name

    def register(self, experiment_id: str, run_id: str, exported: Exported) -> Version:
        """The version of an exported drafter; registered as a logged model of the run if it is not there yet.

        A process that is killed on the way leaves a logged model without version, which the next call takes up.
        """
        name = self.name_of(exported.target)
        known = self.find(name, exported.key)
        if known is not None:
            return known
        model = self._logged_model(experiment_id, run_id, name, exported)
        self._ensure_registered_model(name, exported.tags.get("target", exported.target))
        version = self._client.create_model_version(
            name, source=model.artifact_location, run_id=model.source_run_id, model_id=model.model_id, await_creation_for=0,
            tags={**exported.tags, EXPORT_KEY: exported.key, "dflash.logged_model": model.model_id},
            description=_without_front_matter(exported.card)[:LONGEST_DESCRIPTION],
        )  # fmt: skip
        return _version(version)

    def find(self, name: str, key: str) -> Version | None:
        """The version that was registered for an export, or None."""
        found = self._client.search_model_versions(f"name = '{name}' and tags.`{EXPORT_KEY}` = '{key}'")
        return _version(found[0]) if found else None

    def champion(self, name: str) -> Version | None:
        """The version that the alias names, or None."""
        return self._found(lambda: _version(self._client.get_model_version_by_alias(name, CHAMPION)))

    def version(self, name: str, number: str) -> Version | None:
        """A version by its number, or None."""
        return self._found(lambda: _version(self._client.get_model_version(name, number)))

    def promote(self, version: Version) -> None:
        """Let the alias name this version."""
        with usable(self._uri):
            self._client.set_registered_model_alias(version.name, CHAMPION, version.number)

    def set_tags(self, version: Version, tags: Mapping[str, str]) -> None:
        """Set tags of a version."""
        with usable(self._uri):
            for key, value in tags.items():
                self._client.set_model_version_tag(version.name, version.number, key, value)

    def fetch(self, version: Version, folder: Path) -> Path:
        """Copy a version's files to ``folder``, unless they are there; returns it. A folder that is there is whole.

        Raises:
            TrackingError: the files are not where the store says.
        """
        from mlflow.artifacts import download_artifacts

        if not folder.is_dir():
            temporary = folder.with_name(f".{folder.name}.tmp")
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            try:
                found = download_artifacts(artifact_uri=version.source, dst_path=str(temporary), tracking_uri=self._uri, registry_uri=self._uri)
            except Exception as error:  # MLflow raises its own errors, the HTTP library's and the disk's
                remedy = f"Restore them, or give the alias '{CHAMPION}' to another version"
                raise TrackingError(f"The files of {version} cannot be fetched from {version.source}: {error}. {remedy}") from error
            Path(found).replace(folder)
            shutil.rmtree(temporary, ignore_errors=True)
        return folder

    def page(self, version: Version) -> str | None:
        """Address of a version's page, where MLflow is a server."""
        return f"{self._uri.rstrip('/')}/#/models/{quote(version.name)}/versions/{version.number}" if self._uri.startswith("http") else None

    def _found(self, ask: Callable[[], Found]) -> Found | None:
        if self._client is None:
            return None
        from mlflow.exceptions import MlflowException

        with usable(self._uri):
            try:
                return ask()
            except MlflowException as error:
                if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):  # no such model, version or alias
                    return None
                raise

    def _logged_model(self, experiment_id: str, run_id: str, registered: str, exported: Exported) -> Any:
        begun = self._client.search_logged_models([experiment_id], f"tags.`{EXPORT_KEY}` = '{exported.key}'")
        whole = [model for model in begun if str(model.status) == "READY"]
        if whole:
            return whole[0]
        name = registered.replace(".", "-")  # MLflow takes dots in names of registered models, not of logged ones
        model = self._client.create_logged_model(
            experiment_id, name, run_id, {**exported.tags, EXPORT_KEY: exported.key}, dict(exported.params), "drafter"
        )
        try:
            self._client.log_model_artifacts(model.model_id, str(exported.folder))
        except BaseException:
            self._client.finalize_logged_model(model.model_id, "FAILED")
            raise
        return self._client.finalize_logged_model(model.model_id, "READY")

    def _ensure_registered_model(self, name: str, target: str) -> None:
        from mlflow.exceptions import MlflowException

        about = f"Drafters for {target}. Serve the version with the alias '{CHAMPION}'."
        try:
            self._client.create_registered_model(name, tags={"dflash.target": target}, description=about)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise


def fetched(registry: Registry, version: Version, workspace: Path) -> Path:
    """A version's folder on this machine, kept in the workspace.

    Another store counts its versions from 1 too: the place of the files tells them apart.
    """
    place = hashlib.sha256(version.source.encode()).hexdigest()[:8]
    return registry.fetch(version, workspace / "registered" / version.name / f"{version.number}-{place}")


def _version(found: Any) -> Version:
    tags = dict(found.tags)
    return Version(found.name, str(found.version), found.source, found.run_id or None, tags.get("dflash.logged_model", ""), tags)


def _without_front_matter(card: str) -> str:
    """MLflow shows markdown, not the front matter that model hubs read."""
    return re.sub(r"\A---\n.*?\n---\n", "", card, flags=re.DOTALL)
