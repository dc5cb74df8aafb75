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
from typing import Any, NoReturn

from dflash_core.checks import advice
from dflash_core.config import PipelineConfig, load_config
from dflash_core.errors import DFlashError, InputError, StoppedError, os_reason
from dflash_core.evaluation import served_table, sets_table, ways_table
from dflash_core.pace import Pace
from dflash_core.pipeline import StageResult, evaluation_of, run_stage, train_beside
from dflash_core.plan import STAGES, Plan
from dflash_core.summary import outcome_lines, write_summary
from dflash_core.training import Ranks, RecentMetrics, check_launcher, this_rank, under_torchrun
from dflash_core.words import duration, how_far

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
    except StoppedError as error:  # no failure, of which the others would end at once: the first may still be writing its checkpoint
        print(f"{_who(ranks)}{error} The same command goes on from here.", file=sys.stderr)
        status = 130
    except (DFlashError, OSError) as error:  # OSError: a disk that is full, a folder that may not be written
        failure, status = f"{type(error).__name__}: {os_reason(error) if isinstance(error, OSError) else error}", 1
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
        path = write_summary(plan, results)
        print("", *outcome_lines(path), path, sep="\n")


def _run(plan: Plan, names: tuple[str, ...], ranks: Ranks | None) -> dict[str, StageResult]:
    results = {}
    for name in names:
        if name == "warm_up":  # training warms up by itself where nobody has
            continue
        if name == "shards" and not plan.extracts and names[-1] != "shards":
            continue
        if name == "train" and ranks is not None:
            ranks.announce("training", "done" if plan.stage("train").cached else "begins")
        lines = _Lines(name)
        results[name] = run_stage(plan, name, progress=lines, on_metrics=lines.metrics, share=names[-1] == "shards")
        manifest, cached = results[name].manifest, results[name].cached
        state = f"cached (took {duration(manifest.seconds)})" if cached else f"done in {duration(results[name].seconds)}"
        counts = manifest.counts if name != "evaluate" else {}  # which has tables of its own
        print(f"{name}: {state}  {_in_words(counts)}".rstrip(), flush=True)
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


def _in_words(counts: Mapping[str, Any]) -> str:
    """``rows 380, tokens per second 177.3``; what is 0 or nothing is left out, and the most of a digest."""
    shown = {name.replace("_", " "): value for name, value in counts.items() if value}
    return ", ".join(f"{name} {value[:12] if name == 'digest' else _number(value)}" for name, value in shown.items())


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


class _Lines:
    """Progress as one line every ten seconds; of a training with its metrics, and a line for every evaluation in it."""

    def __init__(self, stage: str):
        self._stage = stage
        self._last = time.monotonic()
        self._pace = Pace()
        self._recent = RecentMetrics()

    def __call__(self, done: int, total: int, unit: str) -> None:
        now = time.monotonic()
        remaining = self._pace.remaining(done, total, now)
        if now - self._last > 10:
            self._last = now
            self._print(f"{how_far(done, total, unit, remaining)}  {self._recent.words()}")

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._recent.add(step, metrics)
        if (length := metrics.get("eval/acceptance_length")) is not None:
            self._print(f"evaluated at step {step:,}: acceptance length {length:.2f}")

    def _print(self, words: str) -> None:
        print(f"  {self._stage}: {words}".rstrip(), flush=True)


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
    except KeyboardInterrupt:  # a second one, while the first was seen to
        _exit(130)
    except Exception:
        traceback.print_exc()
        _exit(1)
