"""Registered models in a real store, wherever the process's own MLflow address points."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest

from dflash_core.config import PipelineConfig
from dflash_core.errors import InputError
from tasks.evaluate import find_drafter
from tasks.registry import Exported, Registry, fetched, registered_name
from tasks.store import TrackingError, open_client
from tasks.tracker import Tracker


@pytest.fixture
def tracker(make_config: Callable[..., PipelineConfig], tmp_path: Path) -> Tracker:
    return Tracker.open(make_config(), tmp_path / "run")


@pytest.fixture
def exported(tmp_path: Path) -> Exported:
    folder = tmp_path / "drafter"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    card = "---\nlicense: apache-2.0\n---\n# A drafter\nmeasured: 2.5\n"
    return Exported(f"some/{tmp_path.name}", "key1", folder, {"drafter.num_layers": "2"}, {"target": "some/target", "lossless": "1.0"}, card)


def registry_of(tracker: Tracker) -> Registry:
    assert tracker.registry is not None
    return tracker.registry


def test_a_version_has_the_files_the_tags_and_the_card_and_belongs_to_its_run(
    tracker: Tracker, exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/another.db")
    version = tracker.register_model(exported)
    assert version is not None, "MLflow looked into the process's own store"
    assert not (tmp_path / "another.db").exists()
    stored = tracker.client.get_model_version(version.name, version.number)
    assert (stored.run_id, stored.description) == (tracker.run_id, "# A drafter\nmeasured: 2.5\n")
    assert (version.tags["lossless"], version.tags["target"]) == ("1.0", "some/target")
    model = tracker.client.get_logged_model(version.model_id)
    assert (str(model.status), model.source_run_id, model.params) == ("READY", tracker.run_id, {"drafter.num_layers": "2"})
    fetched = registry_of(tracker).fetch(version, tmp_path / "fetched")
    assert {path.name: path.read_bytes() for path in fetched.iterdir()} == {"config.json": b"{}", "model.safetensors": b"weights"}


@pytest.mark.parametrize("target", ["meta-llama/Llama-3.1-8B", "组织/模型 ß", "it's/100%"])
def test_a_target_may_have_any_name(tracker: Tracker, exported: Exported, tmp_path: Path, target: str) -> None:
    version = tracker.register_model(replace(exported, target=target, key=registered_name(target)))
    assert version is not None
    registry_of(tracker).promote(version)
    assert registry_of(tracker).champion(registered_name(target)) == version
    assert (fetched(registry_of(tracker), version, tmp_path / "workspace") / "config.json").is_file()


def test_the_same_export_is_registered_once_also_when_a_kill_came_between_its_two_halves(tracker: Tracker, exported: Exported) -> None:
    assert tracker.run_id is not None
    # killed before the version was created
    model = registry_of(tracker)._logged_model(tracker.experiment_id, tracker.run_id, registered_name(exported.target), exported)
    first, second = tracker.register_model(exported), tracker.register_model(exported)
    assert first is not None
    assert first == second
    assert (first.number, first.model_id) == ("1", model.model_id)
    assert len(tracker.client.search_logged_models([tracker.experiment_id])) == 1


def test_the_champion_is_nobody_until_one_is_promoted_and_then_the_last_that_was(tracker: Tracker, exported: Exported) -> None:
    registry, name = registry_of(tracker), registered_name(exported.target)
    assert registry.champion(name) is None
    first = tracker.register_model(exported)
    assert first is not None
    assert registry.champion(name) is None
    registry.promote(first)
    other = tracker.register_model(Exported(**{**vars(exported), "key": "key2"}))
    assert other is not None
    assert registry.champion(name) == first
    registry.promote(other)
    assert registry.champion(name) == other
    assert registry.version(name, "1") == first


def test_a_drafter_is_found_by_its_folder_by_its_version_and_as_the_champion(
    make_config: Callable[..., PipelineConfig], tracker: Tracker, exported: Exported, tmp_path: Path
) -> None:
    config = make_config(target={"model": exported.target})
    with pytest.raises(InputError, match=r"drafter = 'champion': no version of .* is the champion\. Train one"):
        find_drafter(config, "champion")
    version = tracker.register_model(exported)
    assert version is not None
    registry_of(tracker).promote(version)
    found = find_drafter(config, "champion")
    assert found == find_drafter(config, "1")
    assert found.parent == config.run.workspace / "registered" / registered_name(exported.target)
    assert (found / "model.safetensors").read_bytes() == b"weights"
    assert find_drafter(config, str(tmp_path)) == tmp_path
    with pytest.raises(InputError, match=r"drafter = '7': .* has no such version in sqlite"):
        find_drafter(config, "7")


def test_a_folder_does_not_hide_the_champion_whose_name_it_has(
    make_config: Callable[..., PipelineConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "champion").mkdir()
    (tmp_path / "1").mkdir()
    monkeypatch.chdir(tmp_path)
    config = make_config(target={"model": "some/other"})
    for name in ("champion", "1"):
        with pytest.raises(InputError, match=f"drafter = '{name}'"):
            find_drafter(config, name)
        assert find_drafter(config, f"./{name}") == Path(name)


def test_the_same_number_in_another_store_is_another_drafter(tracker: Tracker, exported: Exported, tmp_path: Path) -> None:
    registry, version = registry_of(tracker), tracker.register_model(exported)
    assert version is not None
    (exported.folder / "model.safetensors").write_bytes(b"other weights")
    other = tracker.register_model(Exported(**{**vars(exported), "key": "key2"}))
    assert other is not None
    elsewhere = replace(version, source=other.source)  # what version 1 of a store is that was made anew
    found = [(fetched(registry, item, tmp_path / "workspace") / "model.safetensors").read_bytes() for item in (version, elsewhere)]
    assert found == [b"weights", b"other weights"]


def test_a_version_whose_files_are_gone_is_named(tracker: Tracker, exported: Exported, tmp_path: Path) -> None:
    version = tracker.register_model(exported)
    assert version is not None
    shutil.rmtree(url2pathname(urlsplit(version.source).path))
    with pytest.raises(TrackingError, match=f"(?s)The files of {version} cannot be fetched from .* give the alias 'champion' to another version"):
        fetched(registry_of(tracker), version, tmp_path / "workspace")


def test_a_database_appears_whole_or_not_at_all(make_config: Callable[..., PipelineConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tracking={"uri": f"sqlite:///{tmp_path}/new/mlflow.db"})

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("mlflow.store.db.utils._upgrade_db", killed)
        with pytest.raises(KeyboardInterrupt):
            find_drafter(config, "champion")
    with pytest.raises(InputError, match="is the champion"):
        find_drafter(config, "champion")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["mlflow.db"]


def test_a_store_that_cannot_be_used_is_an_error_that_names_it(make_config: Callable[..., PipelineConfig], store_uri: str, tmp_path: Path) -> None:
    Registry(*open_client(make_config())).champion("dflash-none")  # makes the tables
    old = tmp_path / "old.db"
    shutil.copy(store_uri.removeprefix("sqlite:///"), old)
    with contextlib.closing(sqlite3.connect(old)) as database, database:
        database.execute("update alembic_version set version_num = 'cc1f77228345'")
    (tmp_path / "junk.db").write_bytes(b"no database" * 1000)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file/workspace"):  # of the disk, not of the store
        open_client(make_config(run={"workspace": str(tmp_path / "file" / "workspace")}))
    uris = {f"sqlite:///{old}": "out-of-date", f"sqlite:///{tmp_path}/junk.db": "not a database", "what:ever": "", "http://host:port": "port"}
    for uri, reason in uris.items():
        config = make_config(tracking={"uri": uri})
        told = f"(?s)The MLflow store {uri} cannot be used: .*{reason}.* Correct tracking.uri"
        with pytest.raises(TrackingError, match=told):
            find_drafter(config, "champion")
        with pytest.raises(TrackingError, match=told):
            Tracker.open(config, tmp_path / "run")


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("Qwen/Qwen3-8B", "dflash-qwen--qwen3-8b"),
        ("smollm2-135m-instruct", "dflash-smollm2-135m-instruct"),
        ("/models/My Model/", "dflash-my-model"),
        ("组织/模型", "dflash-组织--模型"),
    ],
)
def test_the_name_of_a_registered_model_comes_from_its_target(target: str, name: str) -> None:
    assert registered_name(target) == name


def test_targets_of_one_name_and_different_owners_have_models_of_their_own(tracker: Tracker, exported: Exported) -> None:
    names = [f"{owner}/{exported.target.replace('/', '-')}" for owner in ("a", "b")]
    found = [tracker.register_model(replace(exported, target=name, key=name, tags={"target": name})) for name in names]
    assert [version and version.number for version in found] == ["1", "1"]


def test_a_model_that_was_named_without_its_owner_stays_that_targets_own(tracker: Tracker, exported: Exported) -> None:
    registry, model = registry_of(tracker), exported.target.replace("/", "-")
    tracker.client.create_registered_model(f"dflash-{model}", tags={"dflash.target": f"a/{model}"})
    assert [registry.name_of(f"{owner}/{model}") for owner in ("a", "b")] == [f"dflash-{model}", f"dflash-b--{model}"]
