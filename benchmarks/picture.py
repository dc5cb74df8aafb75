"""The picture of what a real drafter is worth, for the documentation: acceptance by tokens trained on, by set, and by position in the block.

    python -m benchmarks.picture          # draws docs/images/drafter.png from the newest lines of results.jsonl; needs matplotlib

Its description, which PNG files have room for, is the values that it shows: a test compares them with ``results.jsonl``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.common import RESULTS
from benchmarks.figures import records
from dflash_core.evaluation.panels import BLUE, GREEN, GREY, INK, LIGHT, ORANGE, style

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "drafter.png"
SETS = {"heldout": "held-out prompts", "gsm8k": "GSM8K", "humaneval": "HumanEval", "mtbench": "MT-bench"}
COLOURS = dict(zip(SETS, (GREY, BLUE, GREEN, ORANGE), strict=True))


def shown(results: Path = RESULTS) -> dict[str, Any]:
    """What the picture shows: ``trained`` {tokens: length}, and of each set ``length``, ``interval``, ``prompts`` and ``per_position``."""
    found = {name: lines[-1] for name, lines in records(results.read_text(encoding="utf-8").splitlines()).items()}
    sets = {}
    for name in SETS:
        line = found[f"tau.{name}"]
        sets[name] = {"length": line["value"], "prompts": line["samples"], **{key: line["detail"][key] for key in ("interval", "per_position")}}
    return {"trained": found["tau.trained"]["detail"]["by_tokens"], "sets": sets}


def draw(values: Mapping[str, Any]) -> Figure:
    """Three panels beside each other."""
    figure = Figure(figsize=(12.0, 3.7), dpi=110, facecolor="white")
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots(1, 3)
    draw_training(axes[0], values["trained"])
    draw_sets(axes[1], values["sets"])
    draw_positions(axes[2], values["sets"])
    return figure


def draw_training(axes: Any, trained: Mapping[str, float]) -> None:
    """Acceptance length against the tokens trained on; the longest in words."""
    _frame(axes, "While it trains, 16 held-out prompts", "tokens trained on, millions", "acceptance length (1 = no drafter)")
    millions, lengths = [int(tokens) / 1e6 for tokens in trained], [*trained.values()]
    axes.plot(millions, lengths, color=BLUE, linewidth=2, marker="o", markersize=4)
    best = max(range(len(lengths)), key=lengths.__getitem__)
    _label(axes, millions[best], lengths[best], lengths[best])
    axes.set_ylim(1.0, 1.12 * lengths[best])


def draw_sets(axes: Any, sets: Mapping[str, Any]) -> None:
    """Acceptance length of each set, with its interval."""
    _frame(axes, "Afterwards, set by set", "acceptance length, 95 % interval", "")
    names = [*sets][::-1]  # the first on top
    for place, name in enumerate(names):
        found = sets[name]
        axes.hlines(place, *found["interval"], color=COLOURS[name], linewidth=2.5, alpha=0.5)
        axes.plot([found["length"]], [place], "o", color=COLOURS[name], markersize=8)
        _label(axes, found["length"], place, found["length"])
    axes.set_yticks(range(len(names)), [f"{SETS[name]} ({sets[name]['prompts']})" for name in names])
    axes.set_ylim(-0.5, len(sets) - 0.4)
    axes.set_xlim(left=1.0)


def draw_positions(axes: Any, sets: Mapping[str, Any]) -> None:
    """Share of rounds in which each drafted position was accepted."""
    _frame(axes, "Drafted tokens accepted", "position in the block", "% of rounds")
    for name, found in sets.items():
        shares = [100 * share for share in found["per_position"]]
        axes.plot(range(1, len(shares) + 1), shares, color=COLOURS[name], linewidth=2, marker="o", markersize=3, label=SETS[name])
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8.5, frameon=False)


def _label(axes: Any, x: float, y: float, value: float) -> None:
    axes.annotate(f"{value:.2f}", (x, y), xytext=(0, 8), textcoords="offset points", ha="center", fontsize=9, color=INK)


def _frame(axes: Any, title: str, x_label: str, y_label: str) -> None:
    style(axes, title, x_label, y_label)
    axes.grid(axis="x", color=LIGHT, linewidth=0.8)


def main(words: list[str] | None = None) -> int:
    """Draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    options = parser.parse_args(words)
    values = shown(options.results)
    draw(values).savefig(options.picture, format="png", metadata={"Software": None, "Description": json.dumps(values)})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
