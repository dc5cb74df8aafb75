"""The pictures' building blocks: each function draws one subject into one Axes, in one style.

matplotlib's object interface only (no pyplot, no rcParams), so any thread may draw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_core.evaluation.compare import Comparison
from dflash_core.evaluation.intervals import Interval
from dflash_core.evaluation.result import EvaluationResult, Figures, StageSeconds
from dflash_core.words import counted

BLUE, ORANGE, GREEN, GREY, LIGHT, INK, FAINT = "#2563eb", "#f59e0b", "#10b981", "#9ca3af", "#dbe3ee", "#111827", "#6b7280"
_SERIES = (BLUE, ORANGE, GREEN, GREY)
LENGTH = "eval/acceptance_length"
Metrics = Sequence[Mapping[str, float]]


def draw_loss(axes: Any, metrics: Metrics) -> None:
    """Loss by step, each record and a running mean; accuracy of the first drafted slot on the right axis."""
    steps, losses = series(metrics, "loss")
    style(axes, "Training loss", "optimiser step", "loss")
    axes.plot(steps, losses, color=LIGHT, linewidth=1)
    axes.plot(steps, running_mean(losses), color=BLUE, linewidth=2)
    axes.margins(x=0.02)
    axes.set_ylabel("loss", color=BLUE, fontsize=9)
    slots, accuracy = series(metrics, "accuracy_slot_1")
    _right_axis(axes, slots, running_mean([100 * value for value in accuracy]), "next-token accuracy, %", top=100)


def draw_acceptance(axes: Any, result: EvaluationResult) -> None:
    """Share of rounds in which each drafted position was accepted, before training and after it."""
    style(axes, "Drafted tokens accepted, by position", "position in the block", "% of rounds")
    pairs: list[tuple[str, str, Figures]] = [("after training", BLUE, result.trained)]
    if result.untrained is not None:
        pairs.insert(0, ("before training", GREY, result.untrained))
    width = 0.8 / len(pairs)
    for number, (label, colour, figures) in enumerate(pairs):
        shares = [100 * share for share in figures.acceptance.per_position]
        places = [slot + (number - (len(pairs) - 1) / 2) * width for slot in range(1, len(shares) + 1)]
        bars = axes.bar(places, shares, width * 0.92, color=colour, label=f"{label}: {figures.acceptance.mean_of_requests:.2f} tokens a pass")
        if label == "after training":
            axes.bar_label(
                bars, [f"{share:.0f}" if share >= 1 or share == 0 else f"{share:.1f}" for share in shares], fontsize=8, color=INK, padding=2
            )
    axes.set_xticks(range(1, result.block_size))
    axes.margins(y=0.18)
    axes.legend(fontsize=8.5, frameon=False, loc="upper right")


def draw_evaluations(axes: Any, metrics: Metrics) -> None:
    """Acceptance length by step, measured while training went on; the best one marked, of equal ones the last. First token accepted on the right."""
    steps, lengths = series(metrics, LENGTH)
    style(axes, "Acceptance length during training", "optimiser step", "acceptance length (1 = no drafter)")
    axes.plot(steps, lengths, color=BLUE, linewidth=2, marker="o", markersize=4)
    best = max(range(len(steps)), key=lambda index: (lengths[index], steps[index]))
    axes.annotate(f"{lengths[best]:.2f}", (steps[best], lengths[best]), xytext=(0, 6), textcoords="offset points", ha="center", fontsize=9, color=INK)
    axes.margins(x=0.04, y=0.15)
    axes.set_ylabel("acceptance length", color=BLUE, fontsize=9)
    slots, shares = series(metrics, "eval/accepted_slot_1")
    _right_axis(axes, slots, [100 * share for share in shares], "first drafted token accepted, %", top=100)


def draw_prompts(axes: Any, result: EvaluationResult) -> None:
    """Acceptance length of every prompt, sorted, with the mean."""
    lengths = sorted((row.acceptance_length for row in result.rows if row.acceptance_length is not None), reverse=True)
    style(axes, "Tokens per target pass, prompt by prompt", f"{counted(len(lengths), 'prompt')}, best first", "acceptance length (1 = no drafter)")
    if not lengths:
        return
    axes.bar(range(1, len(lengths) + 1), [length - 1 for length in lengths], bottom=1, color=BLUE, width=0.72)
    mean = result.trained.acceptance.mean_of_requests
    axes.axhline(mean, color=ORANGE, linewidth=1.5)
    axes.annotate(f"mean {mean:.2f}", (len(lengths) + 0.4, mean), xytext=(0, 4), textcoords="offset points", ha="right", fontsize=9, color=ORANGE)
    axes.set_ylim(1.0, max(2.0, 1 + (max(lengths) - 1) * 1.1))
    axes.set_xticks([])


def draw_sets(axes: Any, result: EvaluationResult) -> None:
    """Acceptance length of each set, with its 95 % interval."""
    style(axes, "Tokens per target pass, set by set", "acceptance length, 95 % interval (1 = no drafter)", "")
    rows: dict[str, tuple[float, Interval | None]] = {}
    for name, found in result.sets.items():
        interval = found.trained.intervals.acceptance_length if found.trained.intervals else None
        rows[f"{name} ({found.prompts})"] = found.trained.acceptance.mean_of_requests, interval
    _dots(axes, rows, "{:.2f}")
    axes.axvline(result.trained.acceptance.mean_of_requests, color=ORANGE, linewidth=1.5)
    axes.set_xlim(left=1.0)
    axes.margins(x=0.1)


def draw_differences(axes: Any, comparison: Comparison) -> None:
    """Difference of acceptance length prompt by prompt, sorted, with the mean and its 95 % interval."""
    overall = comparison.overall
    differences = sorted((row.second - row.first for row in comparison.rows), reverse=True)
    title = f"{comparison.second_name} against {comparison.first_name}, prompt by prompt"
    style(axes, title, f"{counted(len(differences), 'prompt')}: {overall.better} better, {overall.worse} worse", "difference in acceptance length")
    axes.bar(range(len(differences)), differences, color=[BLUE if value > 0 else GREY for value in differences], width=0.8)
    if overall.interval:
        axes.axhspan(overall.interval.low, overall.interval.high, color=ORANGE, alpha=0.2, linewidth=0)
    axes.axhline(overall.difference, color=ORANGE, linewidth=1.5)
    axes.axhline(0.0, color=INK, linewidth=0.8)
    label = f"mean {overall.difference:+.3f}, p = {overall.p_value:.2g}"
    axes.annotate(label, (1.0, 1.0), xycoords="axes fraction", ha="right", va="bottom", fontsize=9, color=ORANGE)
    axes.set_xticks([])


def draw_set_differences(axes: Any, comparison: Comparison) -> None:
    """Difference of acceptance length of each set, with its 95 % interval."""
    style(axes, "Set by set", "difference in acceptance length, 95 % interval", "")
    _dots(axes, {f"{name} ({found.prompts})": (found.difference, found.interval) for name, found in comparison.sets.items()}, "{:+.3f}")
    axes.axvline(0.0, color=INK, linewidth=0.8)
    axes.margins(x=0.15)


def _dots(axes: Any, rows: Mapping[str, tuple[float, Interval | None]], spelled: str) -> None:
    """A line for each row, the first on top: its value as a dot, and its interval."""
    axes.grid(axis="x", color=LIGHT, linewidth=0.8)
    axes.grid(visible=False, axis="y")
    labels = [*rows][::-1]
    for place, label in enumerate(labels):
        value, interval = rows[label]
        if interval:
            axes.hlines(place, interval.low, interval.high, color=BLUE, linewidth=2.5, alpha=0.45)
        axes.plot([value], [place], "o", color=BLUE, markersize=8)
        axes.annotate(spelled.format(value), (value, place), xytext=(0, 8), textcoords="offset points", ha="center", fontsize=9, color=INK)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(-0.5, len(labels) - 0.3)


def draw_time(axes: Any, result: EvaluationResult) -> None:
    """Milliseconds per new token and where they go, as it is served, the target alone against the target with the drafter."""
    trained = result.as_served.trained
    baseline_tokens = trained.baseline_tokens_per_second * trained.baseline_seconds.total
    rows = [("with drafter", trained.seconds, trained.tokens), ("target alone", trained.baseline_seconds, baseline_tokens)]
    style(axes, "Time per new token", f"milliseconds ({result.as_served.dtype}, {_where(result)})", "")
    axes.grid(axis="x", color=LIGHT, linewidth=0.8)
    axes.grid(visible=False, axis="y")
    for place, (_, seconds, tokens) in enumerate(rows):
        left = 0.0
        for colour, (stage, value) in zip(_SERIES, _stages(seconds), strict=True):
            milliseconds = 1e3 * value / tokens
            axes.barh(place, milliseconds, left=left, color=colour, height=0.5, label=stage if place == 0 else None)
            left += milliseconds
        axes.annotate(f"{left:.3g} ms", (left, place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9, color=INK)
    axes.set_yticks(range(len(rows)), [label for label, _, _ in rows])
    axes.margins(x=0.16)
    axes.set_ylim(-0.5, len(rows) - 0.05)
    axes.legend(fontsize=8.5, frameon=False, ncols=4, loc="upper left", handlelength=1, columnspacing=1.2, borderaxespad=0.1)


def draw_throughput(axes: Any, metrics: Metrics) -> None:
    """Training tokens per second by step."""
    steps, speeds = series(metrics, "tokens_per_second")
    style(axes, "Training throughput", "optimiser step", "tokens per second")
    axes.plot(steps, speeds, color=LIGHT, linewidth=1)
    axes.plot(steps, running_mean(speeds), color=BLUE, linewidth=2)
    axes.margins(x=0.02, y=0.15)
    axes.set_ylim(bottom=0)


def draw_optimiser(axes: Any, metrics: Metrics) -> None:
    """Gradient norm before clipping by step; learning rate on the right axis."""
    steps, norms = series(metrics, "grad_norm")
    style(axes, "Gradient norm and learning rate", "optimiser step", "")
    axes.plot(steps, norms, color=BLUE, linewidth=1.2)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("gradient norm", color=BLUE, fontsize=9)
    axes.margins(x=0.02)
    _right_axis(axes, *series(metrics, "learning_rate"), "learning rate")


def draw_feed(axes: Any, metrics: Metrics) -> None:
    """Share of the time that training waited for rows, by step; rows in the queue on the right axis."""
    steps, shares = series(metrics, "data_wait_share")
    style(axes, "Waiting for data", "optimiser step", "")
    axes.plot(steps, [100 * share for share in shares], color=BLUE, linewidth=1.2)
    axes.set_ylim(0, max([10.0, *(110 * share for share in shares)]))
    axes.set_ylabel("% of the time", color=BLUE, fontsize=9)
    axes.margins(x=0.02)
    _right_axis(axes, *series(metrics, "queue_depth"), "rows in the queue")


def draw_memory(axes: Any, metrics: Metrics) -> None:
    """Memory by step: resident set of the process, and peak and reserved memory of each GPU."""
    style(axes, "Memory during training", "optimiser step", "GiB")
    names = sorted({name for record in metrics for name in record if name == "memory_rss" or name.startswith(("memory_peak", "memory_reserved"))})
    for number, name in enumerate(names):
        steps, values = series(metrics, name)
        axes.plot(steps, [value / 2**30 for value in values], color=_SERIES[number % len(_SERIES)], linewidth=2, label=_memory_label(name))
    axes.margins(x=0.02, y=0.25)
    axes.set_ylim(bottom=0)
    if names:
        axes.legend(fontsize=8.5, frameon=False, ncols=3, loc="upper right")


def series(metrics: Metrics, name: str) -> tuple[list[float], list[float]]:
    """Steps and values of one metric, where it was recorded."""
    found = [(record["step"], record[name]) for record in metrics if name in record]
    return [step for step, _ in found], [value for _, value in found]


def running_mean(values: Sequence[float], share: float = 0.05) -> list[float]:
    """Mean of each value and its neighbours, ``share`` of the whole, half of them on each side where there are so many."""
    reach = round(len(values) * share / 2)
    windows = (values[max(0, centre - reach) : centre + reach + 1] for centre in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _right_axis(axes: Any, steps: Sequence[float], values: Sequence[float], label: str, top: float | None = None) -> None:
    if not steps:
        return
    right = axes.twinx()
    right.set_facecolor("none")
    right.plot(steps, values, color=ORANGE, linewidth=1.6)
    right.set_ylim(0, top)
    right.set_ylabel(label, color=ORANGE, fontsize=9)
    right.tick_params(length=0, labelsize=8, labelcolor=ORANGE)
    right.spines[:].set_visible(False)


def style(axes: Any, title: str, x_label: str, y_label: str) -> None:
    """What all pictures have in common: title, labels, a grid along y, on whatever is behind."""
    axes.set_facecolor("none")  # whatever the page has behind it
    axes.set_title(title, fontsize=11, fontweight="bold", color=INK, loc="left", pad=10)
    axes.set_xlabel(x_label, fontsize=9, color=FAINT)
    axes.set_ylabel(y_label, fontsize=9, color=FAINT)
    axes.tick_params(length=0, labelsize=8.5, labelcolor=FAINT)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(LIGHT)
    axes.grid(axis="y", color=LIGHT, linewidth=0.8)
    axes.set_axisbelow(True)


def _stages(seconds: StageSeconds) -> list[tuple[str, float]]:
    return [("target", seconds.verify), ("drafter", seconds.draft), ("prefill", seconds.prefill), ("other", seconds.other)]


def _where(result: EvaluationResult) -> str:
    if result.device != "cpu":
        return result.device
    return f"{result.threads} CPU thread{'s' if result.threads > 1 else ''}"


def _memory_label(name: str) -> str:
    if name == "memory_rss":
        return "process"
    kind, _, device = name.removeprefix("memory_").rpartition("_")
    return f"GPU {device} {kind}"
