"""``dflashctl compare``: two drafters prompt by prompt, from evaluations that are there, or measured now on one configuration's prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from dflash_core.config import load_config
from dflash_core.errors import InputError, Problem
from dflash_core.evaluation import Comparison, EvaluationResult, compare, comparison_table
from dflash_core.evaluation.plots import write_comparison
from dflash_core.pipeline import run_stage
from dflash_core.plan import Plan
from dflash_core.stages import write_json_atomic
from flows.one_stage import evaluation_here, require, require_folder
from flows.show import print_rows, standard_output
from tasks.evaluate import find_drafter, require_drafter

RESULT = "evaluation.json"


def compare_drafters(first: str, second: str, config: Path | None, overrides: Sequence[str], to: Path | None) -> Comparison:
    """Print a table of both on each set, and write ``comparison.json`` and ``comparison.png`` into ``to`` if that is given.

    Raises:
        InputError: one of them is no evaluation (or, with a configuration, no drafter); ``to`` is no folder; or they were measured on other
            prompts or settings.
        CheckpointError: a folder holds no drafter, or one for another target.
        StageMissingError: the responses of the configuration are not there yet.
    """
    if to is not None:
        require_folder("--to", to)
    if config is None:
        one, other = _read("first", first), _read("second", second)
    else:
        plan = Plan(load_config(config, overrides), str(config))
        require(plan, config, "responses")
        run_stage(plan, "samples")
        found = [find_drafter(plan.config, drafter) for drafter in (first, second)]
        for folder in found:
            require_drafter(plan, folder)  # before the first is measured
        one, other = (evaluation_here(plan, folder) for folder in found)
    comparison = compare(one, other, *_names(first, second))
    print_rows(standard_output(), comparison_table(comparison))
    for name, lossless, speedup in (
        (comparison.first_name, comparison.first_lossless, comparison.first_speedup),
        (comparison.second_name, comparison.second_lossless, comparison.second_speedup),
    ):
        print(f"{name}: lossless on {lossless:.1%} of the prompts, {speedup:.2f}× the target alone in {comparison.speed_dtype}")
    if comparison.overall.needed is not None:
        print(f"A difference like this would show from about {comparison.overall.needed} conversations of this kind on.")
    if to is not None:
        to.mkdir(parents=True, exist_ok=True)
        write_json_atomic(to / "comparison.json", comparison.model_dump(mode="json"))
        print(write_comparison(to / "comparison.png", comparison))
    return comparison


def _read(which: str, place: str) -> EvaluationResult:
    path = Path(place) / RESULT if Path(place).is_dir() else Path(place)
    try:
        return EvaluationResult.model_validate_json(path.read_bytes())
    except OSError as error:
        remedy = "Name the folder that 'dflashctl evaluate' printed, or give the configuration to measure drafters with (--config)"
        raise InputError("compare", [Problem(which, str(path), f"holds no evaluation: {error.strerror}", remedy)]) from error
    except ValidationError as error:
        message = f"is not an evaluation of this version: {error.errors()[0]['msg']}"
        raise InputError("compare", [Problem(which, str(path), message, "Evaluate again")]) from error


def _names(first: str, second: str) -> tuple[str, str]:
    """The last parts of two paths in which they differ."""
    one, other = Path(first.removesuffix(f"/{RESULT}")), Path(second.removesuffix(f"/{RESULT}"))
    if one.name != other.name:
        return one.name, other.name
    return (str(one), str(other)) if str(one) != str(other) else ("first", "second")
