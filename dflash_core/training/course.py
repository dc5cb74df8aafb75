"""What the course of a training depends on: the settings that a checkpoint must have in common with the run that resumes from it."""

from __future__ import annotations

from typing import Any

from dflash_core.config import PipelineConfig

OPERATIONAL = {
    "launcher",
    "feed",
    "target_devices",
    "cuda_graphs",
    "queue_rows",
    "log_every",
    "checkpoint_every",
    "keep_checkpoints",
    "compare_replicas_every",
    "max_nonfinite_steps",
    "strict_memory",
    "sync",
    "stall_timeout_s",
    "evaluation",
    "keep",
}
"""Settings of ``training`` that change how it is run and watched, not what comes out."""

# Settings that change how a run is executed, but not its course: they may differ when it is resumed.
_FREE = {
    "training": {"devices", "rows_per_microstep", "accumulation_steps", "activation_checkpointing", "compile", "epochs", "max_steps", *OPERATIONAL},
    "objective": {"chunk_slots"},
    "drafter": {"initial_checkpoint"},
}


def config_settings(config: PipelineConfig) -> dict[str, Any]:
    """Field path → value of every setting that the course of training depends on. Devices may change if the rows of a step stay the same."""
    settings: dict[str, Any] = {
        "run.seed": config.run.seed,
        "rows of an optimiser step (training.devices × accumulation_steps × rows_per_microstep)": config.rows_per_step,
    }
    for section in ("drafter", "objective", "training"):
        values = getattr(config, section).model_dump(mode="json", exclude=_FREE[section])
        settings.update({f"{section}.{name}": value for name, value in values.items()})
    return settings
