"""The core alone, for a machine without Prefect and MLflow.

    python -m dflash_core run      configs/demo.yaml [--set training.max_steps=50]
    python -m dflash_core extract  configs/demo.yaml      # up to the shards; processes that are at them at once share the work
    python -m dflash_core train    configs/demo.yaml      # up to the trained drafter
    python -m dflash_core evaluate configs/demo.yaml      # up to its evaluation

Every command runs the stages before it, or finds them done.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence

from dflash_core.checks import advice
from dflash_core.config import load_config
from dflash_core.errors import DFlashError, InputError
from dflash_core.evaluation import sets_table
from dflash_core.pipeline import StageResult, evaluation_of, run_stage, write_summary
from dflash_core.plan import STAGES, Plan

_LAST_STAGE = {"extract": "shards", "train": "train", "evaluate": "evaluate", "run": "export"}


def main(arguments: list[str] | None = None) -> int:
    """Run the stages up to the command's own. Returns the exit status: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m dflash_core", description="Run the stages up to the named one, without Prefect and MLflow.")
    parser.add_argument("command", choices=_LAST_STAGE)
    parser.add_argument("config", help="a YAML file, such as configs/demo.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=value", dest="overrides", help="change a setting; repeatable")
    options = parser.parse_args(arguments)
    try:
        plan = Plan(load_config(options.config, options.overrides), options.config)
        for sentence in advice(plan.config):
            print(f"Note: {sentence}", file=sys.stderr)
        results = _run(plan, STAGES[: STAGES.index(_LAST_STAGE[options.command]) + 1])
        if options.command == "run":
            print(write_summary(plan, results))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    except (DFlashError, OSError) as error:  # OSError: a disk that is full, a folder that may not be written
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted. The same command goes on from here.", file=sys.stderr)
        return 130
    return 0


def _run(plan: Plan, names: tuple[str, ...]) -> dict[str, StageResult]:
    results = {}
    for name in names:
        if name == "warm_up":  # training warms up by itself where nobody has
            continue
        if name == "shards" and not plan.extracts and names[-1] != "shards":
            continue
        results[name] = run_stage(plan, name, progress=_Lines(name), on_metrics=_print_metrics, share=names[-1] == "shards")
        state = "cached" if results[name].cached else f"{results[name].seconds:.1f} s"
        counts = results[name].manifest.counts
        print(f"{name}: {state}  {counts if name != 'evaluate' else ''}".rstrip(), flush=True)
        if name == "evaluate":
            _print_rows(sets_table(evaluation_of(results[name].folder)))
    return results


def _print_rows(rows: Sequence[Mapping[str, str]]) -> None:
    lines = [tuple(rows[0]), *(tuple(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip(), flush=True)


def _print_metrics(step: int, metrics: Mapping[str, float]) -> None:
    if step % 20 == 0 or step == 1 or "eval/acceptance_length" in metrics:
        print(f"  step {step}  " + "  ".join(f"{name} {value:.4g}" for name, value in metrics.items() if "slot" not in name), flush=True)


class _Lines:
    """Progress as one line every ten seconds."""

    def __init__(self, stage: str):
        self._stage = stage
        self._last = time.monotonic()

    def __call__(self, done: int, total: int, unit: str) -> None:
        if time.monotonic() - self._last > 10:
            self._last = time.monotonic()
            print(f"  {self._stage}: {done}/{total or '?'} {unit}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
