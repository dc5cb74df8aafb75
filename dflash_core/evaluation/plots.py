"""Pictures of a run: its charts for a page of HTML, and one PNG file that tells the most of it for the README.

    write_picture(folder / "report.png", training.read_metrics(train_folder / "metrics.jsonl"), result)

Needs matplotlib (the extra ``pipeline``), which the rest of the core does without.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from dflash_core.evaluation.compare import Comparison
from dflash_core.evaluation.panels import (
    BLUE,
    FAINT,
    GREEN,
    GREY,
    INK,
    LENGTH,
    LIGHT,
    ORANGE,
    Metrics,
    draw_acceptance,
    draw_differences,
    draw_evaluations,
    draw_feed,
    draw_loss,
    draw_memory,
    draw_optimiser,
    draw_prompts,
    draw_set_differences,
    draw_sets,
    draw_throughput,
    draw_time,
)
from dflash_core.evaluation.result import EvaluationResult
from dflash_core.stages import atomic_write
from dflash_core.words import counted

_VARIABLES = {INK: "ink", FAINT: "faint", LIGHT: "light", BLUE: "blue", ORANGE: "orange", GREEN: "green", GREY: "grey"}


def write_picture(path: Path, metrics: Metrics, result: EvaluationResult) -> Path:
    """Draw the report as a PNG file; returns its path."""
    with atomic_write(path) as temporary:
        report_figure(metrics, result).savefig(temporary, format="png", metadata={"Software": None})
    return path


def write_comparison(path: Path, comparison: Comparison) -> Path:
    """Draw two drafters prompt by prompt and set by set as a PNG file; returns its path."""
    figure = _figure(12.0, 4.4)
    axes: Any = figure.subplots(1, 2, width_ratios=[3, 2])
    draw_differences(axes[0], comparison)
    draw_set_differences(axes[1], comparison)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format="png", metadata={"Software": None})
    return path


def inline_charts(metrics: Metrics, result: EvaluationResult) -> list[str]:
    """Every chart as an ``<svg>`` element for a page that sets the colours by CSS variables: --ink, --faint, --light, --blue, --orange, …"""
    panels: list[Callable[[Any], None]] = [
        lambda axes: draw_acceptance(axes, result),
        lambda axes: draw_prompts(axes, result),
        lambda axes: draw_time(axes, result),
    ]
    if len(result.sets) > 1:
        panels.insert(1, lambda axes: draw_sets(axes, result))
    if metrics:
        training = (draw_loss, draw_optimiser, draw_throughput, draw_feed, draw_memory)
        panels += [lambda axes, draw=draw: draw(axes, metrics) for draw in training]  # type: ignore[misc]
    if any(LENGTH in record for record in metrics):
        panels.insert(1, lambda axes: draw_evaluations(axes, metrics))
    return [_inline_svg(draw) for draw in panels]


def _inline_svg(draw: Callable[[Any], None]) -> str:
    figure = _figure(6.4, 3.7)
    figure.patch.set_alpha(0.0)
    draw(figure.add_subplot())
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = re.sub(r"<metadata>.*?</metadata>", "", buffer.getvalue(), flags=re.DOTALL)
    svg = re.sub(r'\b(width|height)="[\d.]+pt" ?', "", svg[svg.index("<svg") :], count=2)
    for colour, name in _VARIABLES.items():
        svg = svg.replace(colour, f"var(--{name})")
    return svg


def report_figure(metrics: Metrics, result: EvaluationResult) -> Figure:
    """The whole result on one page: headline figures, loss, acceptance by position and by prompt, time per token."""
    figure = _figure(12.0, 8.4)
    figure.set_layout_engine("constrained", w_pad=0.2, h_pad=0.12, hspace=0.06, wspace=0.05)
    parts: Any = figure.subfigures(2, 1, height_ratios=[1.0, 4.0])
    _draw_heading(parts[0], result)
    axes = parts[1].subplots(2, 2)
    draw_loss(axes[0, 0], metrics)
    draw_acceptance(axes[0, 1], result)
    draw_prompts(axes[1, 0], result)
    draw_time(axes[1, 1], result)
    return figure


def _draw_heading(figure: Any, result: EvaluationResult) -> None:
    trained, served = result.trained, result.as_served.trained
    figure.text(0.022, 0.86, f"DFlash drafter for {result.target}", fontsize=16, fontweight="bold", color=INK, va="center")
    of_sets = f" of {len(result.sets)} sets" if len(result.sets) > 1 else ", held out"
    how = f"greedy, {counted(result.prompts, 'prompt')}{of_sets}, up to {result.max_new_tokens} new tokens, blocks of {result.block_size}"
    figure.text(0.978, 0.86, how, fontsize=9.5, color=FAINT, ha="right", va="center")
    intervals = trained.intervals
    before = "" if result.untrained is None else f"\n{result.untrained.acceptance.mean_of_requests:.2f} before training"
    length = f" ({intervals.acceptance_length.low:.2f}–{intervals.acceptance_length.high:.2f})" if intervals else ""
    tiles = [
        (f"{100 * result.lossless:.0f} %", "of answers are exactly the target's own" if result.dtype == "float32" else "of answers are lossless"),
        (f"{trained.acceptance.mean_of_requests:.2f}", f"tokens per target pass{length}{before}"),
        (f"{100 * trained.target_passes_saved_per_token:.0f} %", "of the target's passes saved"),
        (
            f"{served.speedup:.2f}×",
            f"the speed without drafter, in {result.as_served.dtype}\n"
            f"{served.tokens_per_second:,.1f} against {served.baseline_tokens_per_second:,.1f} tokens/s",
        ),
    ]
    for number, (value, meaning) in enumerate(tiles):
        left = 0.022 + number * 0.2425
        axes = figure.add_axes((left, 0.02, 0.2285, 0.64))
        axes.set_axis_off()
        axes.add_patch(FancyBboxPatch((0.0, 0.0), 1.0, 1.0, boxstyle="round,pad=0,rounding_size=0.03", facecolor="#f4f7fb", edgecolor=LIGHT))
        axes.text(0.06, 0.66, value, fontsize=24, fontweight="bold", color=BLUE if number < 3 else INK, va="center", transform=axes.transAxes)
        axes.text(0.06, 0.24, meaning, fontsize=9, color=FAINT, va="center", transform=axes.transAxes, linespacing=1.35)


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=130, facecolor="white")
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.12)
    FigureCanvasAgg(figure)
    return figure
