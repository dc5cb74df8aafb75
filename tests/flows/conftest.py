"""A tiny random target with prompts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_core.config import load_config
from tests.tiny_run import write_tiny_run

os.environ["DFLASH_SERVICES"] = os.devnull  # services of the checkout that somebody uses are not for tests


@pytest.fixture(scope="session")
def mlflow_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database without runs, to be copied: making its tables takes seconds."""
    from tasks.store import open_client

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    config = load_config(Path(__file__).parents[2] / "configs" / "valid" / "minimal.yaml", [f"tracking.uri=sqlite:///{path}"])
    open_client(config)[0].search_experiments()
    return path


@pytest.fixture(scope="session")
def write_run(mlflow_database: Path) -> Callable[[Path], Path]:
    """``write_tiny_run``, whose workspace has a tracking store already."""

    def write(folder: Path) -> Path:
        (folder / "workspace").mkdir()
        shutil.copy(mlflow_database, folder / "workspace" / "mlflow.db")
        return write_tiny_run(folder)

    return write


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory: pytest.TempPathFactory, write_run: Callable[[Path], Path]) -> Path:
    return write_run(tmp_path_factory.mktemp("tiny"))
