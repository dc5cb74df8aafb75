"""What ``dflashctl run`` shows while stages run: live bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from dflash_core.training import RecentMetrics
from dflash_core.words import how_far
from tasks.progress import Watcher

LINE_EVERY_S = 10.0


def console_watcher() -> Watcher:
    """The show that fits standard output."""
    return LiveConsole(sys.stdout) if sys.stdout.isatty() else PlainConsole(sys.stdout)


class PlainConsole:
    """One line when a stage begins and ends, and one every ten seconds in between. Fit for a log file."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._last = 0.0
        self._recent = RecentMetrics()

    def begin(self, stage: str) -> None:
        self._last = time.monotonic()
        self._recent = RecentMetrics()
        self._print(f"{stage}: begins")

    def progress(self, stage: str, done: int, total: int, unit: str, remaining_s: float | None) -> None:
        if time.monotonic() - self._last >= LINE_EVERY_S:
            self._last = time.monotonic()
            self._print(f"{stage}: {how_far(done, total, unit, remaining_s)}{_set_off(self._recent.words())}")

    def metrics(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        self._recent.add(step, metrics)

    def end(self, stage: str, outcome: str | None) -> None:
        self._print(f"{stage}: {outcome or 'not finished'}{_set_off(self._recent.words())}")

    def _print(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # nobody reads any more (`| head`): no reason to lose the run
            print(line, file=self._stream, flush=True)


class LiveConsole:
    """A bar for the stage that runs; finished stages stay as lines above it."""

    def __init__(self, stream: TextIO):
        self._console = Console(file=stream, highlight=False, soft_wrap=True)
        self._bars: Progress | None = None
        self._bar = TaskID(0)
        self._recent = RecentMetrics()

    def begin(self, stage: str) -> None:
        self._recent = RecentMetrics()
        self._bars = Progress(
            SpinnerColumn(), TextColumn("[bold]{task.description}"), BarColumn(30), TextColumn("{task.fields[words]}"), TimeElapsedColumn(),
            console=self._console, transient=True, refresh_per_second=4,
        )  # fmt: skip
        self._bar = self._bars.add_task(f"{stage:<10}", total=None, words="")
        self._bars.start()

    def progress(self, stage: str, done: int, total: int, unit: str, remaining_s: float | None) -> None:
        if self._bars is not None:
            words = how_far(done, total, unit, remaining_s) + _set_off(self._recent.words())
            self._bars.update(self._bar, completed=done, total=total or None, words=words)

    def metrics(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        self._recent.add(step, metrics)

    def end(self, stage: str, outcome: str | None) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
        mark = "[red]✗[/]" if outcome is None else "[green]✓[/]"
        self._console.print(f"{mark} [bold]{stage:<10}[/] {outcome or 'not finished'}{_set_off(self._recent.words())}")


def _set_off(words: str) -> str:
    return f"  {words}" if words else ""
