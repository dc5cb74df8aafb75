"""What ``dflashctl run`` shows while stages run: live bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from tasks.progress import Watcher, in_words

LINE_EVERY_S = 10.0


def console_watcher() -> Watcher:
    """The show that fits standard output."""
    return LiveConsole(sys.stdout) if sys.stdout.isatty() else PlainConsole(sys.stdout)


class PlainConsole:
    """One line when a stage begins and ends, and one every ten seconds in between. Fit for a log file."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._last = 0.0
        self._metrics: dict[str, float] = {}

    def begin(self, stage: str) -> None:
        self._last = time.monotonic()
        self._metrics.clear()
        self._print(f"{stage}: begins")

    def progress(self, stage: str, done: int, total: int, unit: str, remaining_s: float | None) -> None:
        if time.monotonic() - self._last >= LINE_EVERY_S:
            self._last = time.monotonic()
            self._print(f"{stage}: {in_words(done, total, unit, remaining_s)}{training_words(self._metrics)}")

    def metrics(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        self._metrics |= metrics

    def end(self, stage: str, outcome: str | None) -> None:
        self._print(f"{stage}: {outcome or 'not finished'}{training_words(self._metrics)}")

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class LiveConsole:
    """A bar for the stage that runs; finished stages stay as lines above it."""

    def __init__(self, stream: TextIO):
        self._console = Console(file=stream, highlight=False)
        self._bars: Progress | None = None
        self._bar = TaskID(0)
        self._metrics: dict[str, float] = {}

    def begin(self, stage: str) -> None:
        self._metrics.clear()
        self._bars = Progress(
            SpinnerColumn(), TextColumn("[bold]{task.description}"), BarColumn(30), TextColumn("{task.fields[words]}"), TimeElapsedColumn(),
            console=self._console, transient=True, refresh_per_second=4,
        )  # fmt: skip
        self._bar = self._bars.add_task(f"{stage:<10}", total=None, words="")
        self._bars.start()

    def progress(self, stage: str, done: int, total: int, unit: str, remaining_s: float | None) -> None:
        if self._bars is not None:
            words = in_words(done, total, unit, remaining_s) + training_words(self._metrics)
            self._bars.update(self._bar, completed=done, total=total or None, words=words)

    def metrics(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        self._metrics |= metrics

    def end(self, stage: str, outcome: str | None) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
        mark = "[red]✗[/]" if outcome is None else "[green]✓[/]"
        self._console.print(f"{mark} [bold]{stage:<10}[/] {outcome or 'not finished'}{training_words(self._metrics)}")


def training_words(metrics: Mapping[str, float]) -> str:
    """The few metrics that say whether a training goes well."""
    named = (
        ("loss", "loss {:.3f}"),
        ("token_accuracy", "accuracy {:.1%}"),
        ("tokens_per_second", "{:,.0f} tokens/s"),
        ("eval/acceptance_length", "acceptance length {:.2f}"),
    )
    words = [text.format(metrics[name]) for name, text in named if name in metrics]
    return "  " + ", ".join(words) if words else ""
