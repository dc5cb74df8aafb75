"""``dflashctl plan``: the stages of a run, which are cached and why not, and what the others will take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.text import Text

from dflash_core.checks import advice
from dflash_core.errors import TargetError
from dflash_core.estimate import Estimate, Forecast, estimate
from dflash_core.plan import ONLINE, Plan, StagePlan
from dflash_core.retrain.config import RetrainConfig, load_any_config
from dflash_core.target.device import total_memory
from dflash_core.words import duration, in_bytes
from flows.show import print_rows, standard_output

_UNDISTURBED = 0.8
_WORTH_TRIMMING = 0.05
_SMALLER = {
    "responses": "lower data.generation.batch_size or max_new_tokens",
    "shards": "lower extraction.batch_tokens",
    "train": "lower training.rows_per_microstep or num_anchors, or set training.activation_checkpointing or training.sync = sharded",
    "evaluate": "lower evaluation.batch_sizes or max_new_tokens",
}


def show_plan(path: Path, overrides: Sequence[str]) -> None:
    """Print the plan of a configuration, or of the round that a retraining would take up. Nothing is run.

    Nothing is written but the champion that such a round begins from, which is fetched.

    Raises:
        ConfigError: the configuration is wrong or does not fit this machine, the target or the data.
        TrackingError: it is that of a retraining, and the MLflow store with its champion cannot be used.
    """
    config = load_any_config(path, overrides)
    if not isinstance(config, RetrainConfig):
        _show(Plan(config, str(path)))
        return
    from tasks.retrain import foreseen  # MLflow takes seconds

    with foreseen(config) as (sentence, training):
        print(sentence)
        if training is not None:
            _show(Plan(training, str(path)))


def _show(plan: Plan) -> None:
    stages = plan.stages
    try:
        forecast = estimate(plan)
    except TargetError:  # not on this machine yet
        forecast = None
    print_plan(plan, stages, forecast)
    for sentence in advice(plan.config):
        print(f"Note: {sentence}")


def print_plan(plan: Plan, stages: dict[str, StagePlan], forecast: Forecast | None) -> None:
    """The plan as a table, then what to expect in a few lines. ``memory`` is that of the device that needs most."""
    console = standard_output()
    estimates, unknown = forecast.stages if forecast else {}, Estimate("")
    left = {
        name: estimates.get(name, unknown)
        for name, stage in stages.items()
        if not stage.cached and not (name == "warm_up" and stages["train"].cached)
    }
    rows: list[dict[str, str | Text]] = []
    for name, stage in stages.items():
        row: dict[str, str | Text] = {"stage": name, "state": stage.why_not or "", "makes": estimates.get(name, unknown).rows}
        if stage.manifest is not None:
            size, took = sum(record.bytes for record in stage.manifest.files), f"took {duration(stage.manifest.seconds)}"
            row |= {"state": Text("cached", "green"), "disk": in_bytes(size), "memory": "", "time": took}
        else:
            guess = left.get(name, unknown)
            row |= {"disk": in_bytes(guess.disk_bytes), "memory": in_bytes(guess.memory_bytes), "time": in_time(guess.seconds)}
        rows.append(row)
    console.print(Text.assemble((plan.config.run.name, "bold"), f": {plan.config.target.model}, in {plan.workspace}"))
    print_rows(console, rows, left=3, unbroken=("disk", "memory", "time"))
    if forecast is None:
        print("The target is not here yet. Sizes and times are known once the stage 'target' has run.")
        return
    if all(stage.cached for name, stage in stages.items() if name != "warm_up" and stage.why_not != ONLINE):
        print("All is done: a run would only verify it.")
        return
    seconds, disk = sum(item.seconds or 0.0 for item in left.values()), sum(item.disk_bytes or 0 for item in left.values())
    memory = max(item.memory_bytes or 0 for item in left.values())
    print(f"To do: about {in_time(seconds)} (within a factor of two), {in_bytes(disk)} of disk, {in_bytes(memory)} of memory at the most.")
    if (share := forecast.rates.share) < _UNDISTURBED:
        print(
            f"That is without other programs, which leave this one {share:.0%} of a processor at present: with them about {in_time(seconds / share)}."
        )
    for line in [*about_trimming(plan, left), *too_large(left)]:
        print(line)


def about_trimming(plan: Plan, stages: Mapping[str, Estimate]) -> Iterator[str]:
    """What ``extraction.trim`` saves of the shards that are to be made, or would, where that is worth a setting."""
    shards = stages.get("shards")
    if shards is None or not shards.trimmable_bytes or shards.disk_bytes is None:
        return
    trims, saved = plan.config.extraction.trim, shards.trimmable_bytes
    share = saved / (shards.disk_bytes + (saved if trims else 0))
    if trims or share >= _WORTH_TRIMMING:
        yield f"extraction.trim {'saves' if trims else 'would save'} {in_bytes(saved)} of disk, {share:.1%} of the shards."


def too_large(stages: Mapping[str, Estimate]) -> Iterator[str]:
    """What does not fit into the memory of a device, a sentence each."""
    for name, remedy in _SMALLER.items():
        for device, size in (stages[name].memory or {} if name in stages else {}).items():
            if size > (there := total_memory(device)):
                yield f"{name} needs about {in_bytes(size)} on {device}, which has {in_bytes(there)}: {remedy}."


def in_time(seconds: float | None) -> str:
    """``7 min 5 s``; nothing for None."""
    return "" if seconds is None else duration(seconds)
