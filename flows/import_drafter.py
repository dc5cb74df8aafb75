"""``dflashctl import``: a drafter of another trainer as the start of a training here."""

from __future__ import annotations

from pathlib import Path

from dflash_core.config import TargetConfig
from dflash_core.drafter.foreign import import_drafter
from dflash_core.target.info import read_target_info


def bring_in(source: Path, out: Path, target: str | None) -> None:
    """Write ``out`` and print what it holds and how to go on with it.

    Raises:
        CheckpointError: ``source`` is no drafter that can be trained further here, or not one for ``target``.
        TargetError: ``target`` is not on this machine.
    """
    info = read_target_info(TargetConfig.model_validate({"model": target})) if target else None
    imported = import_drafter(source, out, info)
    config = imported.config
    print(f"{out}: from the layout of {imported.layout}, {config.num_parameters():,} parameters in {imported.dtype}, every tensor as it was read")
    if imported.left_out:
        print(f"left out, since the target has them: {', '.join(imported.left_out)}")
    if info is None:
        print("not held against a target; --target MODEL does that")
    print(f"To train it further:\n{imported.settings()}")
