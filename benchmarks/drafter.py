"""What a drafter of a configuration is worth: acceptance on each set of prompts, speed, and acceptance against the tokens trained on.

python -m benchmarks.drafter --config configs/smollm2-135m.yaml
python -m benchmarks.drafter --config configs/smollm2-135m.yaml --set evaluation.served_prompts=null       speed on all prompts
python -m benchmarks.drafter --config configs/smollm2-135m.yaml --set evaluation.device=cpu --set 'evaluation.block_sizes=[4, 8]'

Reads what ``python -m dflash_core evaluate`` or ``dflashctl run`` has left for the same configuration and settings, and appends:

tau.<set>                mean over requests of accepted tokens a round, plus one (greedy, one request at a time); the detail says how it was measured
speedup.gpu              new tokens a second over those of the target alone, both with the same caches and graphs, on the set ``--speed-on``, as it is
                         served (``evaluation.served_dtype``); in float32 ``speedup.gpu.float32``, as nobody serves like that
speedup.cpu.<dtype>      the same on a CPU, where ``speedup.cpu`` is that of the best block size, which ``benchmarks.blocks`` records
tau.trained              acceptance at the end of the training, where it was measured on the way, and in the detail at each evaluation by tokens
drafter.train_s          seconds of the training's steps; like ``tau.trained`` only where the evaluation was on a device of the same type
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.common import Recorder, arguments, recorder_for
from dflash_core.config import PipelineConfig, load_config
from dflash_core.evaluation.panels import LENGTH
from dflash_core.evaluation.result import EvaluationResult, Figures
from dflash_core.pipeline import evaluation_of
from dflash_core.plan import Plan
from dflash_core.training import EVALUATIONS, read_metrics

Key = TypeVar("Key", int, str)


def record_sets(recorder: Recorder, found: EvaluationResult, sets: Collection[str], speed_on: str) -> None:
    """Acceptance on these sets, and speed on one of them."""
    how = {"dtype": found.dtype, "device": found.device, "block_size": found.block_size, "max_new_tokens": found.max_new_tokens}
    for name in sets:
        measured = found.sets[name]
        figures = measured.trained
        acceptance = figures.acceptance
        detail: dict[str, Any] = {
            "interval": _bounds(figures, "acceptance_length"), "pooled": round(acceptance.pooled, 4), "speedup": round(figures.speedup, 3),
            "lossless": measured.lossless, "diverged": measured.diverged, "per_position": [round(share, 3) for share in acceptance.per_position],
        }  # fmt: skip
        recorder.add(f"tau.{name}", acceptance.mean_of_requests, "tokens", figures.prompts, how | detail)
    for at in (found.served, found) if speed_on in sets else ():
        if at is None:
            continue
        figures = at.sets[speed_on].trained
        blocks = {way.way.block_size: way.figures.speedup for way in at.ways if (way.way.batch_size, way.way.temperature) == (1, 0.0)}
        detail = {
            "set": speed_on, "interval": _bounds(figures, "speedup"), "tok_s": round(figures.tokens_per_second, 1),
            "baseline_tok_s": round(figures.baseline_tokens_per_second, 1), "seconds": _rounded(figures.seconds.model_dump()),
            "dtype": at.dtype, "acceptance_length": round(figures.acceptance.mean_of_requests, 3), "diverged": at.sets[speed_on].diverged,
            "diverged_beyond_noise": at.sets[speed_on].diverged_beyond_noise, "threads": found.threads if found.device == "cpu" else None,
            "other_blocks_on_all_prompts": _rounded(blocks),
        }  # fmt: skip
        device = "gpu" if found.device.startswith("cuda") else "cpu"
        name = "speedup.gpu" if (device, at.dtype) == ("gpu", "bfloat16") else f"speedup.{device}.{at.dtype}"
        recorder.add(name, figures.speedup, "ratio", figures.prompts, how | detail)


def record_training(recorder: Recorder, config: PipelineConfig, folder: Path, counts: dict[str, Any]) -> None:
    """How long the training took, and what it had reached after how many tokens."""
    training = config.training
    tokens = training.row_length * training.rows_per_microstep * training.accumulation_steps * len(training.devices)
    seconds = float(counts["training_seconds"])
    recorder.add(
        "drafter.train_s", seconds, "s", int(counts["steps"]), {"ms_a_step": round(1e3 * seconds / int(counts["steps"]), 2), "tokens_a_step": tokens}
    )
    curve = {int(record["step"]) * tokens: round(record[LENGTH], 4) for record in read_metrics(folder / EVALUATIONS)}
    if curve:
        recorder.add("tau.trained", curve[max(curve)], "tokens", training.evaluation.prompts, {"by_tokens": curve})


def _bounds(figures: Figures, name: str) -> list[float] | None:
    if figures.intervals is None:
        return None
    interval = getattr(figures.intervals, name)
    return [round(interval.low, 3), round(interval.high, 3)]


def _rounded(values: Mapping[Key, float]) -> dict[Key, float]:
    return {name: round(value, 3) for name, value in values.items()}


def main(words: list[str] | None = None) -> int:
    """Record what there is; 2 if there is nothing."""
    parser = arguments(__doc__ or "", [])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], metavar="a.b=value", dest="overrides", help="change a setting; repeatable")
    parser.add_argument("--sets", nargs="*", help="sets to record; default: all. Leave out those that were measured in part")
    parser.add_argument("--speed-on", default="gsm8k", help="set whose prompts the speed is stated for")
    options = parser.parse_args(words)
    config = load_config(options.config, options.overrides)
    options.device = config.evaluation.device
    plan = Plan(config, str(options.config))
    train, evaluate = plan.stage("train"), plan.stage("evaluate")
    if not (train.manifest and train.folder and evaluate.manifest and evaluate.folder):
        why = evaluate.why_not if train.manifest else train.why_not
        print(f"There is no evaluation of these settings: {why}. Run: python -m dflash_core evaluate {options.config}", file=sys.stderr)
        return 2
    found = evaluation_of(evaluate.folder)
    if unknown := set(options.sets or ()) - set(found.sets):
        parser.error(f"--sets {' '.join(sorted(unknown))}: the evaluation has {', '.join(found.sets)}")
    recorder = recorder_for(options)
    if config.training.devices[0].partition(":")[0] == recorder.device.type:  # a line names the machine of the evaluation
        record_training(recorder, config, train.folder, train.manifest.counts)
    record_sets(recorder, found, options.sets or found.sets, options.speed_on)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
