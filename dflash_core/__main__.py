"""The core alone, for a machine without Prefect and MLflow.

    python -m dflash_core run      configs/demo.yaml [--set training.max_steps=50]
    python -m dflash_core extract  configs/demo.yaml      # up to the shards; processes that are at them at once share the work
    python -m dflash_core train    configs/demo.yaml      # up to the trained drafter
    python -m dflash_core evaluate configs/demo.yaml      # up to its evaluation

Every command runs the stages before it, or finds them done. With ``training.launcher: torchrun`` as many processes as there are replicas train:

    torchrun --nproc-per-node 2 -m dflash_core train CONFIG

The first one does everything else, and the others wait for it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import NoReturn

from dflash_core.checks import advice
from dflash_core.config import PipelineConfig, load_config
from dflash_core.errors import DFlashError, InputError
from dflash_core.evaluation import served_table, sets_table, ways_table
from dflash_core.pipeline import StageResult, evaluation_of, run_stage, train_beside
from dflash_core.plan import STAGES, Plan
from dflash_core.summary import write_summary
from dflash_core.training import Ranks, check_launcher, this_rank, under_torchrun

_LAST_STAGE = {"extract": "shards", "train": "train", "evaluate": "evaluate", "run": "export"}


def main(arguments: list[str] | None = None) -> int:
    """Run the stages up to the command's own. Returns the exit status: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m dflash_core", description="Run the stages up to the named one, without Prefect and MLflow.")
    parser.add_argument("command", choices=_LAST_STAGE)
    parser.add_argument("config", help="a YAML file, such as configs/demo.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=value", dest="overrides", help="change a setting; repeatable")
    options = parser.parse_args(arguments)
    ranks: Ranks | None = None
    failure: str | None = None
    status = 0
    try:
        config = load_config(options.config, options.overrides)
        if under_torchrun():
            ranks = _join(config, options.config)
        if ranks is not None and ranks.rank > 0:
            _help_to_train(config, options, ranks)
        else:
            _run_all(config, options, ranks)
    except InputError as error:
        failure, status = str(error), 2
    except (DFlashError, OSError) as error:  # OSError: a disk that is full, a folder that may not be written
        failure, status = f"{type(error).__name__}: {error}", 1
    except KeyboardInterrupt:
        print(f"{_who(ranks)}Interrupted. The same command goes on from here.", file=sys.stderr)
        status = 130
    except BaseException as error:  # a fault of this program's own: the others must know, and the traceback is wanted
        if ranks is not None:
            ranks.leave(f"{type(error).__name__}: {error}")
        raise
    if failure is not None:  # by every process: torchrun ends the others as soon as the first one has failed
        print(_who(ranks) + failure, file=sys.stderr)
    if ranks is not None:
        ranks.leave(failure)
    return status


def _join(config: PipelineConfig, source: str) -> Ranks | None:
    """Meet the other processes. torchrun ends all of them by SIGTERM once one has failed, or when it is told to end."""
    check_launcher(config, source)

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    return this_rank()


def _who(ranks: Ranks | None) -> str:
    return "" if ranks is None else f"Rank {ranks.rank}: "


def _help_to_train(config: PipelineConfig, options: argparse.Namespace, ranks: Ranks) -> None:
    """All that is done by ranks other than the first."""
    if options.command != "extract" and ranks.wait_for("training") == "begins":
        train_beside(Plan(config, options.config))


def _run_all(config: PipelineConfig, options: argparse.Namespace, ranks: Ranks | None) -> None:
    plan = Plan(config, options.config)
    if options.command != "extract" and not plan.stage("train").cached:
        check_launcher(config, options.config)
    for sentence in advice(config):
        print(f"Note: {sentence}", file=sys.stderr)
    results = _run(plan, STAGES[: STAGES.index(_LAST_STAGE[options.command]) + 1], ranks)
    if options.command == "run":
        print(write_summary(plan, results))


def _run(plan: Plan, names: tuple[str, ...], ranks: Ranks | None) -> dict[str, StageResult]:
    results = {}
    for name in names:
        if name == "warm_up":  # training warms up by itself where nobody has
            continue
        if name == "shards" and not plan.extracts and names[-1] != "shards":
            continue
        if name == "train" and ranks is not None:
            ranks.announce("training", "done" if plan.stage("train").cached else "begins")
        results[name] = run_stage(plan, name, progress=_Lines(name), on_metrics=_print_metrics, share=names[-1] == "shards")
        state = "cached" if results[name].cached else f"{results[name].seconds:.1f} s"
        counts = results[name].manifest.counts
        print(f"{name}: {state}  {counts if name != 'evaluate' else ''}".rstrip(), flush=True)
        if name == "evaluate":
            found = evaluation_of(results[name].folder)
            for rows in filter(None, (sets_table(found), served_table(found), ways_table(found))):
                _print_rows(rows)
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


def _exit(status: int) -> NoReturn:
    """End at once under torchrun, where a thread that is left behind in a collective would keep the process."""
    if under_torchrun():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    try:
        _exit(main())
    except Exception:
        traceback.print_exc()
        _exit(1)
