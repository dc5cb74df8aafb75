"""What the recorded measurements say about each figure that is claimed or required, and what has still to be measured.

python -m benchmarks.figures               a table: name, newest value, required, whether it is reached
python -m benchmarks.figures --missing     the commands that measure what is missing or not reached, in an order that suits one and then two GPUs

The newest line of a name stands for it; where it is out of bounds and an earlier one was not, the table says so, as chips differ by a few per cent.
Only lines measured on a GPU count, except for what is to be measured on a CPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS

STEP = "python -m benchmarks.step --sections step --variants product fp8 ungraphed"
LARGE_STEP = "python -m benchmarks.step --sections step --variants product fp8 --shape 4x3072"
THREADS = "python -m benchmarks.threads"
FLAT = "python -m benchmarks.flatness --sections flat"
OVERHEAD = "python -m benchmarks.flatness --sections overhead"
EXTRACT = "python -m benchmarks.extract"
SCALING = "python -m benchmarks.flatness --sections scaling --devices cuda:0,cuda:1"
DRAFTER = "python -m dflash_core evaluate configs/smollm2-135m.yaml && python -m benchmarks.drafter --config configs/smollm2-135m.yaml"
FEATURES = (
    "python -m benchmarks.features --config configs/smollm2-135m.yaml --steps 800 --set 'data.sources=[{source: PROMPTS, limit: 6000}]' "
    "--set data.heldout_fraction=0.05"
)
ON_CPU = "python -m benchmarks.blocks --drafter FOLDER --device cpu --dtype bfloat16 --count 12 --new 128"


@dataclass(frozen=True)
class Figure:
    """A measured quantity, the bound it has to keep, and the command that measures it."""

    name: str
    bound: float
    command: str
    at_least: bool = False

    def reached(self, value: float) -> bool:
        """Whether a measured value keeps the bound."""
        return value >= self.bound if self.at_least else value <= self.bound


def _least(name: str, bound: float, command: str) -> Figure:
    return Figure(name, bound, command, at_least=True)


FIGURES = (
    Figure("step.bf16.1x2048", 119, STEP),
    _least("step.bf16.1x2048.ceiling_share", 0.73, STEP),
    Figure("step.fp8.1x2048", 85, STEP),
    Figure("step.bf16.1x2048.ungraphed.peak", 26, STEP),
    Figure("step.bf16.4x3072", 460, LARGE_STEP),
    Figure("step.fp8.4x3072", 320, LARGE_STEP),
    _least("peers.specforge.ratio", 1.8, "python -m benchmarks.peers --specforge WHEEL"),
    _least("peers.speculators.ratio", 1.22, "python -m benchmarks.peers --speculators WHEEL"),
    Figure("threads.failures", 0, THREADS),
    Figure("threads.late_compiles", 0, THREADS),
    _least("threads.control_failures", 1, THREADS),
    Figure("threads.host_ms", 5, THREADS),
    Figure("flatness.peak_spread", 0, FLAT),
    Figure("flatness.reserved_growth", 0, FLAT),
    Figure("flatness.retries", 0, FLAT),
    Figure("engine.overhead.1x2048.graphs", 0.03, OVERHEAD),  # as it is by default
    Figure("engine.overhead.1x2048", 0.03, OVERHEAD),
    _least("warmup.second_start_ratio", 3, "python -m benchmarks.starts"),
    _least("extract.ceiling_share", 0.75, EXTRACT),
    Figure("features.fp8.gap_of_spread", 1, FEATURES),
    _least("regenerate.tok_s", 60_000, "python -m benchmarks.regenerate --prompts PROMPTS"),
    _least("reader.gb_s", 10, "python -m benchmarks.reader"),
    _least("tau.gsm8k", 3.0, DRAFTER),
    _least("tau.humaneval", 2.5, DRAFTER),
    _least("tau.mtbench", 2.2, DRAFTER),
    _least("speedup.gpu", 1.5, DRAFTER),
    _least("speedup.cpu", 1.2, ON_CPU),
    _least("multi.scaling_2gpu", 1.9, SCALING),
)


def records(lines: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """The records of each name, the newest last; those of a CPU only where the name ends in ``.cpu``."""
    found: dict[str, list[dict[str, Any]]] = {}
    for record in map(json.loads, lines):
        if record["gpu"] != "cpu" or record["name"].endswith(".cpu"):
            found.setdefault(record["name"], []).append(record)
    return found


def table(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Every figure in a row of markdown: newest value, bound, whether it is kept, and by which commit."""
    rows = ["| name | measured | required | | commit, date |", "|---|---|---|---|---|"]
    for figure in FIGURES:
        bound = f"{'≥' if figure.at_least else '≤'} {figure.bound:,g}"
        if figure.name not in found:
            rows.append(f"| `{figure.name}` | – | {bound} | not measured | |")
            continue
        *earlier, record = found[figure.name]
        state = "reached" if figure.reached(record["value"]) else "**not reached**" + _kept_before(figure, earlier)
        rows.append(f"| `{figure.name}` | {_short(record['value'])} {record['unit']} | {bound} | {state} | {_origin(record)} |")
    return "\n".join(rows)


def _kept_before(figure: Figure, earlier: Sequence[Mapping[str, Any]]) -> str:
    kept = [record for record in earlier if figure.reached(record["value"])]
    return f"; was {_short(kept[-1]['value'])} at {_origin(kept[-1])}" if kept else ""


def _origin(record: Mapping[str, Any]) -> str:
    return f"{record['commit']}, {record['date'][:10]}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def missing(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Commands that measure what is not there or not reached, each once."""
    wanted = [figure.command for figure in FIGURES if figure.name not in found or not figure.reached(found[figure.name][-1]["value"])]
    return list(dict.fromkeys(wanted))


def main(words: list[str] | None = None) -> int:
    """Print the table or the commands; 1 if a figure is missing or not reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--missing", action="store_true", help="print the commands that are still to be run")
    options = parser.parse_args(words)
    found = records(options.results.read_text(encoding="utf-8").splitlines())
    commands = missing(found)
    print("\n".join(commands) if options.missing else table(found))
    return int(bool(commands))


if __name__ == "__main__":
    raise SystemExit(main())
