"""A tiny random target with prompts, and a Prefect server of the test session's own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.target.tiny import save_tiny_target

os.environ["DFLASH_SERVICES"] = os.devnull  # services of the checkout that somebody uses are not for tests

CONFIG = """\
run: {{name: tiny, workspace: {folder}/workspace, seed: 1}}
target: {{model: {folder}/target, dtype: float32}}
data:
  sources: [{{source: {folder}/prompts.jsonl}}]
  generation: {{max_new_tokens: 12, batch_size: 24}}
  max_length: 64
  heldout_fraction: 0.2
  max_rejected_fraction: 1.0
extraction: {{samples_per_shard: 16, feature_dtype: float32}}
drafter: {{num_layers: 1, num_taps: 2, block_size: 4, mask_token_id: 259}}
training: {{devices: [cpu, cpu], row_length: 64, num_anchors: 8, epochs: 50, max_steps: 8, precision: float32, checkpoint_every: 4}}
evaluation: {{num_prompts: 2, max_new_tokens: 8, untrained_prompts: 1}}
"""


def write_tiny_pipeline(folder: Path) -> Path:
    """A target, prompts and the configuration of a run of some seconds. Returns the path of the configuration."""
    save_tiny_target("llama", folder / "target", num_hidden_layers=6)
    lines = [json.dumps({"prompt": f"Say {index} and then {index * index}."}) for index in range(24)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    path = folder / "tiny.yaml"
    path.write_text(CONFIG.format(folder=folder), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_pipeline(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def prefect_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for Prefect's database, for this process and its children: filling a new one takes seconds, so once."""
    from prefect.settings import PREFECT_HOME, temporary_settings

    home = tmp_path_factory.mktemp("prefect")
    before = os.environ.get("PREFECT_HOME")
    os.environ["PREFECT_HOME"] = str(home)
    with temporary_settings({PREFECT_HOME: home}):
        yield home
    os.environ.pop("PREFECT_HOME") if before is None else os.environ.update(PREFECT_HOME=before)


@pytest.fixture(scope="session")
def prefect_url(prefect_home: Path) -> Iterator[str]:
    """A temporary server with an empty database."""
    from flows.server import prefect_api

    with prefect_api() as url:
        yield url
