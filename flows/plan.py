"""``dflashctl plan``: the stages of a run, which are cached and why not, and what the others will take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from dflash_core.config import load_config
from dflash_core.errors import TargetError
from dflash_core.estimate import Estimate, estimate
from dflash_core.plan import ONLINE, Plan, StagePlan
from tasks.progress import duration


def show_plan(path: Path, overrides: Sequence[str]) -> None:
    """Print the plan of a configuration. Nothing is run and nothing is written.

    Raises:
        ConfigError: the configuration is wrong or does not fit this machine, the target or the data.
    """
    plan = Plan(load_config(path, overrides), str(path))
    stages = plan.stages
    try:
        estimates = estimate(plan)
    except TargetError:  # not on this machine yet
        estimates = {}
    print_plan(plan, stages, estimates)


def print_plan(plan: Plan, stages: dict[str, StagePlan], estimates: dict[str, Estimate]) -> None:
    """The plan as a table, then what to expect in one line."""
    console = Console(highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("stage", "state", "makes"):
        table.add_column(heading)
    for heading in ("disk", "memory", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    unknown = Estimate("", None, None, None)
    for name, stage in stages.items():
        guess = estimates.get(name, unknown)
        if stage.manifest is not None:
            size = sum(record.bytes for record in stage.manifest.files)
            table.add_row(name, "[green]cached[/]", guess.rows, in_bytes(size), "", f"took {duration(stage.manifest.seconds)}")
        else:
            table.add_row(name, stage.why_not or "", guess.rows, in_bytes(guess.disk_bytes), in_bytes(guess.memory_bytes), in_time(guess.seconds))
    console.print(f"[bold]{plan.config.run.name}[/]: {plan.config.target.model}, in {plan.workspace}")
    console.print(table)
    if not estimates:
        console.print("The target is not here yet. Sizes and times are known once the stage 'target' has run.")
        return
    left = [estimates[name] for name, stage in stages.items() if not stage.cached and name in estimates]
    seconds = sum(item.seconds or 0.0 for item in left)
    disk = sum(item.disk_bytes or 0 for item in left)
    memory = max((item.memory_bytes or 0 for item in left), default=0)
    if all(stage.cached for name, stage in stages.items() if name != "warm_up" and stage.why_not != ONLINE):
        console.print("All is done: a run would only verify it.")
    else:
        console.print(
            f"To do: about {in_time(seconds)} (within a factor of two), {in_bytes(disk)} of disk, {in_bytes(memory)} of memory at the most."
        )


def in_bytes(count: int | None) -> str:
    """``1.2 GB``; nothing for None."""
    if count is None:
        return ""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def in_time(seconds: float | None) -> str:
    """``7 min 5 s``; nothing for None."""
    return "" if seconds is None else duration(seconds)
