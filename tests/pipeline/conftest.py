"""One run whose stages are done, for all tests of the stages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipeline.stages import plan_of
from tests.tiny_run import ON_DISK, run_all, write_tiny_run


@pytest.fixture(scope="package", autouse=True)
def _cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="package")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration whose stages are all done. Tests put back what they change."""
    path = write_tiny_run(tmp_path_factory.mktemp("pipeline"))
    run_all(plan_of(path))
    return path


@pytest.fixture
def copy(config: Path, tmp_path: Path) -> Path:
    """A workspace of the same results, to be damaged."""
    for name in ON_DISK:
        folder = plan_of(config).folder(name)
        shutil.copytree(folder, tmp_path / "workspace" / "stages" / folder.name)
    return tmp_path / "workspace"
