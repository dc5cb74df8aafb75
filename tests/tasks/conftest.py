"""A configuration that needs nothing on this machine, and a tracking store in a temporary folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_core.config import PipelineConfig, parse_config


@pytest.fixture(scope="session")
def store_uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One SQLite store for all tests, which differ in experiment: making its tables takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.fixture
def make_config(tmp_path: Path, store_uri: str) -> Callable[..., PipelineConfig]:

    def make(**sections: dict[str, Any]) -> PipelineConfig:
        tree: dict[str, Any] = {
            "run": {"name": "small", "workspace": str(tmp_path / "workspace")},
            "target": {"model": "some/target"},
            "data": {"sources": [{"source": "prompts.jsonl"}], "max_length": 64},
            "drafter": {"mask_token_id": 7, "block_size": 4},
            "training": {"row_length": 64, "num_anchors": 8},
            "tracking": {"uri": store_uri, "experiment": tmp_path.name},
        }
        for name, values in sections.items():
            tree[name] = {**tree.get(name, {}), **values}
        return parse_config(tree)

    return make
