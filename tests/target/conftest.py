from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dflash_core.target import TargetModel
from tests.target.tiny import FAMILIES, save_tiny_target


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests and fetched files of these tests stay out of the user's cache."""
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = save_tiny_target(family, tmp_path_factory.mktemp(family))
        return made[family]

    return folder


@pytest.fixture
def target(request: pytest.FixtureRequest, tiny_folder: Callable[[str], Path]) -> TargetModel:
    """A float32 target; of every family unless the test parametrises it."""
    return TargetModel.from_pretrained(tiny_folder(request.param), dtype=torch.float32)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marked = any("target" in str(mark.args[0]) for mark in metafunc.definition.iter_markers("parametrize"))
    if "target" in metafunc.fixturenames and not marked:
        metafunc.parametrize("target", list(FAMILIES), indirect=True)
