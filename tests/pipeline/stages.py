"""What tests of the stages ask of a configuration."""

from __future__ import annotations

from pathlib import Path

from dflash_core.config import load_config
from dflash_core.plan import Plan
from tests.tiny_run import ON_DISK

AFTER = {name: list(ON_DISK[index:]) for index, name in enumerate(ON_DISK)}


def plan_of(config: Path, *changes: str) -> Plan:
    return Plan(load_config(config, changes), str(config))


def missing(plan: Plan) -> list[str]:
    """Stages that would be run."""
    return [name for name in ON_DISK if not plan.stage(name).cached]
