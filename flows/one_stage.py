"""``dflashctl evaluate`` and ``dflashctl export``: one stage by itself, from what earlier runs have left."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from dflash_core.config import load_config
from dflash_core.drafter import verify_export
from dflash_core.errors import DFlashError, InputError, Problem
from dflash_core.evaluation import EvaluationResult, served_table, sets_table, ways_table
from dflash_core.pipeline import drafter_folder, evaluation_of, run_stage
from dflash_core.plan import Plan
from dflash_core.words import counted
from flows.console import console_watcher
from flows.show import print_rows, standard_output
from tasks.evaluate import acceptance_table, evaluate_folder, find_drafter
from tasks.progress import ProgressTeller


class StageMissingError(DFlashError):
    """A stage that has to be done first. Names it and the command."""


def evaluate(path: Path, overrides: Sequence[str], drafter: str | None) -> Path:
    """Decode held-out prompts with the trained drafter, or another (see ``find_drafter``), and print what was measured.

    Returns:
        The folder with ``evaluation.json`` and a line for each prompt in ``prompts.jsonl``.

    Raises:
        StageMissingError: the responses, or the trained drafter, are not there yet.
        CheckpointError: the folder holds no drafter, or one for another target.
    """
    config = load_config(path, overrides)
    plan = Plan(config, str(path))
    require(plan, path, "responses")
    run_stage(plan, "samples")  # seconds, where another evaluation set has just been named
    if not drafter:
        require(plan, path, "train")
    found = find_drafter(config, drafter) if drafter else None
    folder = _watched(lambda teller: run_stage(plan, "evaluate", progress=teller).folder if found is None else evaluate_folder(plan, found, teller))
    print_evaluation(evaluation_of(folder))
    return folder


def evaluation_here(plan: Plan, drafter: Path) -> EvaluationResult:
    """Measure the drafter of a folder on the prompts of a plan whose samples are there."""
    return evaluation_of(_watched(lambda teller: evaluate_folder(plan, drafter, teller)))


def _watched(measure: Callable[[ProgressTeller], Path]) -> Path:
    watcher = console_watcher()
    watcher.begin("evaluate")
    teller = ProgressTeller("evaluate", watcher)
    try:
        with teller.running():
            folder = measure(teller)
        teller.outcome = f"see {folder / 'evaluation.json'}"
    finally:
        watcher.end("evaluate", teller.outcome)
    return folder


def export(path: Path, overrides: Sequence[str], to: Path | None) -> Path:
    """Export the trained drafter, and copy the folder to ``to`` if that is given. Returns the folder to serve.

    Raises:
        StageMissingError: the drafter is not trained or not evaluated yet.
        InputError: ``to`` is there already.
        CheckpointError: the copy is not what was exported.
    """
    if to is not None:
        require_new("--to", to)
    plan = Plan(load_config(path, overrides), str(path))
    require(plan, path, "evaluate")
    folder = drafter_folder(run_stage(plan, "export").folder)
    if to is None:
        return folder
    shutil.copytree(folder, to)
    verify_export(to, plan.info)
    return to


def print_evaluation(result: EvaluationResult) -> None:
    """Print losslessness, acceptance and speed."""
    console = standard_output()
    for rows in filter(None, (acceptance_table(result), sets_table(result), served_table(result), ways_table(result))):
        print_rows(console, rows)
    served = result.as_served
    trained = served.trained
    beyond = f", {result.diverged_beyond_noise} beyond the noise of rounding" if result.diverged else ""
    console.print(f"lossless on {result.lossless:.1%} of {counted(result.prompts, 'prompt')} ({result.diverged} diverged{beyond})")
    speed = f"{trained.tokens_per_second:,.1f} tokens/s, {trained.baseline_tokens_per_second:,.1f} without the drafter: {trained.speedup:.2f}×"
    proof = f" ({result.trained.speedup:.2f}× in {result.dtype})" if result.served else ""
    console.print(f"{speed} in {served.dtype}{proof}")


def require_new(option: str, path: Path) -> None:
    """Raise ``InputError`` unless the path is free to be written: told before the work, not after it."""
    if path.exists():
        raise InputError("dflashctl", [Problem(option, str(path), "is there already", "Name one that does not exist")])
    require_folder(option, path.parent)


def require_folder(option: str, path: Path) -> None:
    """Raise ``InputError`` unless the path is a folder, or can become one."""
    found = next(place for place in (path, *path.parents) if place.exists())
    if not found.is_dir():
        raise InputError("dflashctl", [Problem(option, str(path), f"{found} is not a folder", "Name another one")])


def require(plan: Plan, path: Path, name: str) -> None:
    """Raise ``StageMissingError`` unless the stage is done for the settings of the plan."""
    stage = plan.stage(name)
    if not stage.cached:
        raise StageMissingError(f"The stage '{name}' is not done for these settings ({stage.why_not}). Run: dflashctl run {path}")
