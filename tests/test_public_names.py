"""The names that users may rely on are there, and the core is whole without Prefect and MLflow."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

NAMES = {
    "dflash_core.config": ["PipelineConfig", "load_config", "annotated_yaml"],
    "dflash_core.data": ["render_sample"],
    "dflash_core.feed": ["Row", "Feed", "pack_rows"],
    "dflash_core.shards": ["ShardWriter", "ShardDataset", "verify_shards"],
    "dflash_core.target": ["TargetModel"],
    "dflash_core.drafter": [
        "DFlashConfig",
        "DFlashDrafter",
        "dflash_block_mask",
        "dflash_dense_mask",
        "sample_anchors",
        "save_checkpoint",
        "load_checkpoint",
        "export_drafter",
        "verify_export",
    ],
    "dflash_core.objective": ["linear_cross_entropy", "decay_weights", "dpace_weights"],
    "dflash_core.training": ["warm_up", "TrainingSession", "DrafterTrainer", "GradientSync"],
    "dflash_core.decoding": ["speculative_generate", "autoregressive_generate"],
}


@pytest.mark.parametrize("module", NAMES)
def test_public_names_are_where_they_are_said_to_be(module: str) -> None:
    for name in NAMES[module]:
        assert callable(getattr(importlib.import_module(module), name))


def test_a_target_is_loaded_tapped_and_asked_by_methods_of_the_known_names() -> None:
    target = importlib.import_module("dflash_core.target").TargetModel
    assert all(callable(getattr(target, name)) for name in ("from_pretrained", "hidden_states", "generate"))


def test_every_module_of_the_core_is_imported_without_prefect_mlflow_tasks_and_flows_and_its_commands_begin_without_transformers() -> None:
    code = """
import importlib, pkgutil, sys
for blocked in ("prefect", "mlflow", "tasks", "flows"):
    sys.modules[blocked] = None
import dflash_core.__main__
assert "transformers" not in sys.modules, "which takes seconds to import, and commands may need no model"
for module in pkgutil.walk_packages(dflash_core.__path__, "dflash_core."):
    if not module.name.endswith("_kernel"):  # Triton is not there on every platform
        importlib.import_module(module.name)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
