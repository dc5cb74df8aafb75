"""``dflashctl evaluate`` and ``dflashctl export``: one stage by itself, from what earlier runs have left."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from dflash_core.config import load_config
from dflash_core.data import SampleTable
from dflash_core.drafter import load_checkpoint, target_problems, verify_export
from dflash_core.errors import CheckpointError, DFlashError, InputError, Problem
from dflash_core.evaluation import EvaluationResult, weights_digest
from dflash_core.evaluation import evaluate_drafter as decode_heldout_prompts
from dflash_core.pipeline import drafter_folder, evaluation_of, run_stage
from dflash_core.plan import Plan
from flows.console import console_watcher
from tasks.evaluate import acceptance_table
from tasks.progress import ProgressTeller


class StageMissingError(DFlashError):
    """A stage that has to be done first. Names it and the command."""


def evaluate(path: Path, overrides: Sequence[str], drafter: Path | None) -> Path:
    """Decode held-out prompts with the trained drafter, or with that of a folder, and print what was measured.

    Returns:
        The folder with ``evaluation.json`` and a line for each prompt in ``prompts.jsonl``.

    Raises:
        StageMissingError: the samples, or the trained drafter, are not there yet.
        CheckpointError: the folder holds no drafter, or one for another target.
    """
    plan = Plan(load_config(path, overrides), str(path))
    _require(plan, path, "samples" if drafter else "train")
    watcher = console_watcher()
    watcher.begin("evaluate")
    teller = ProgressTeller("evaluate", watcher)
    try:
        with teller.running():
            folder = run_stage(plan, "evaluate", progress=teller).folder if drafter is None else _evaluate_folder(plan, drafter, teller)
        teller.outcome = f"see {folder / 'evaluation.json'}"
    finally:
        watcher.end("evaluate", teller.outcome)
    print_evaluation(evaluation_of(folder))
    return folder


def export(path: Path, overrides: Sequence[str], to: Path | None) -> Path:
    """Export the trained drafter, and copy the folder to ``to`` if that is given. Returns the folder to serve.

    Raises:
        StageMissingError: the drafter is not trained or not evaluated yet.
        InputError: ``to`` is there already.
        CheckpointError: the copy is not what was exported.
    """
    plan = Plan(load_config(path, overrides), str(path))
    _require(plan, path, "evaluate")
    folder = drafter_folder(run_stage(plan, "export").folder)
    if to is None:
        return folder
    if to.exists():
        raise InputError("--to", [Problem("--to", str(to), "is there already", "Name a folder that does not exist")])
    shutil.copytree(folder, to)
    verify_export(to, plan.info)
    return to


def print_evaluation(result: EvaluationResult) -> None:
    """Print losslessness, acceptance and speed."""
    console = Console(highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("", "trained", "untrained"):
        table.add_column(heading, justify="right" if heading else "left")
    for row in acceptance_table(result):
        table.add_row(*row.values())
    console.print(table)
    trained = result.trained
    beyond = f", {result.diverged_beyond_noise} beyond the noise of rounding" if result.diverged else ""
    console.print(f"lossless on {result.lossless:.1%} of {result.prompts} prompts ({result.diverged} diverged{beyond})")
    console.print(f"{trained.tokens_per_second:,.1f} tokens/s, {trained.baseline_tokens_per_second:,.1f} without the drafter: {trained.speedup:.2f}×")


def _evaluate_folder(plan: Plan, folder: Path, progress: ProgressTeller) -> Path:
    drafter = load_checkpoint(folder)
    if problems := list(target_problems(drafter.config, plan.info)):
        raise CheckpointError("\n  ".join([f"{folder} is not a drafter for {plan.info.name}:", *problems]))
    evaluation = plan.config.evaluation
    destination = plan.run_folder / "evaluations" / weights_digest(drafter)[:12]
    heldout = SampleTable.open(plan.folder("samples") / "heldout.parquet")
    target = plan.target_model(evaluation.dtype, evaluation.device)
    decode_heldout_prompts(plan.config, target, drafter, heldout, destination, progress=progress)
    return destination


def _require(plan: Plan, path: Path, name: str) -> None:
    stage = plan.stage(name)
    if not stage.cached:
        raise StageMissingError(f"The stage '{name}' is not done for these settings ({stage.why_not}). Run: dflashctl run {path}")
