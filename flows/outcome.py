"""What a finished run says last: its figures, and where everything is."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from dflash_core.config import PipelineConfig
from dflash_core.summary import outcome_lines
from tasks.store import tracking_uri
from tasks.summary import REPORT


def print_outcome(config: PipelineConfig, summary: Path) -> None:
    """Print what a run has come to, and the path of its ``summary.json`` last."""
    found = json.loads(summary.read_text(encoding="utf-8"))
    lines = [*outcome_lines(summary), f"report: {summary.parent / REPORT}"]
    if found["mlflow_run_id"] is not None:
        lines.append(f"MLflow: {found['mlflow_page'] or _how_to_look(config)}")
    print("", *lines, summary, sep="\n")


def _how_to_look(config: PipelineConfig) -> str:
    """The command that shows records which no server looks after."""
    uri = tracking_uri(config).replace(f"sqlite:///{Path.cwd()}/", "sqlite:///")
    program = Path(sys.executable).with_name("mlflow")
    command = "mlflow" if shutil.which("mlflow") or not program.exists() else str(program).removeprefix(f"{Path.cwd()}/")
    return (
        f"{command} server --backend-store-uri {uri} --workers 1, then http://127.0.0.1:5000, Model training, experiment {config.tracking.experiment}"
    )
