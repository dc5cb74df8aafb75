"""What each loss makes of the same data, steps and first weights: acceptance lengths of one drafter for each.

python -m benchmarks.losses --device cpu                                   the demo's data and drafter, 200 steps: four minutes a loss on one core
python -m benchmarks.losses --config configs/smollm2-135m.yaml --steps 600 --set 'data.sources=[{source: prompts.jsonl.gz, limit: 6000}]'   on a GPU
python -m benchmarks.losses --precisions bfloat16 fp8                      every loss in each precision
python -m benchmarks.losses --table                                        a table of what there is in the results, and nothing else

All share one set of shards, which hold the target's last hidden states. Measured on held-out prompts, greedy, since values of different
losses cannot be compared. Lines are appended as they come, and what is there is not done again.

losses.<loss>.<precision>.acceptance   mean over requests of accepted tokens a round, plus one; in the detail its 95 % interval, the pooled
                                       mean, the share of each slot, and milliseconds of a step
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

from benchmarks.common import Recorder, arguments, recorder_for
from dflash_core.config import load_config
from dflash_core.pipeline import evaluation_of, run_stage
from dflash_core.plan import Plan

ROOT = Path(__file__).parents[1]
LOSSES = {
    "decay": ["objective.weighting=decay"],
    "dpace": ["objective.weighting=dpace"],
    "distilled_decay": ["objective.weighting=decay", "objective.distillation.weight=1.0"],
    "distilled_dpace": ["objective.weighting=dpace", "objective.distillation.weight=1.0"],
    "half_decay": ["objective.weighting=decay", "objective.distillation.weight=0.5"],
    "half_dpace": ["objective.weighting=dpace", "objective.distillation.weight=0.5"],
    "half_dpace_t2": ["objective.weighting=dpace", "objective.distillation.weight=0.5", "objective.distillation.temperature=2.0"],
}
IN_WORDS = {
    "decay": "cross-entropy, decay",
    "dpace": "cross-entropy, D-PACE",
    "distilled_decay": "distillation, decay",
    "distilled_dpace": "distillation, D-PACE",
    "half_decay": "half and half, decay",
    "half_dpace": "half and half, D-PACE",
    "half_dpace_t2": "half and half at temperature 2, D-PACE",
}


def shared_settings(options: argparse.Namespace, device: str) -> list[str]:
    """Settings of a comparison on one device, where only the last weights of ``options.steps`` steps count."""
    on = json.dumps("cuda:0" if device == "cuda" else device)
    settings = [
        f"run.workspace={json.dumps(str(options.workspace))}", f"target.device={on}", f"training.devices=[{on}]", f"evaluation.device={on}",
        f"training.max_steps={options.steps}", "training.epochs=1000", f"training.checkpoint_every={options.steps}", "evaluation.sets=[]",
    ]  # fmt: skip
    return [*settings, "target.dtype=float32", "evaluation.dtype=float32"] if device == "cpu" else settings


def plan_for(options: argparse.Namespace, device: str, loss: str, precision: str) -> Plan:
    """The plan of one loss; all up to the shards is the same for all."""
    settings = [
        *shared_settings(options, device), "extraction.teacher=last_hidden", f"training.precision={precision}",
        "evaluation.untrained_prompts=0", f"evaluation.num_prompts={options.prompts}",
    ]  # fmt: skip
    return Plan(load_config(options.config, [*settings, *options.overrides, *LOSSES[loss]]), str(options.config))


def measure(recorder: Recorder, options: argparse.Namespace, loss: str, precision: str) -> None:
    """Train with one loss, decode, and record."""
    plan = plan_for(options, recorder.device.type, loss, precision)
    for stage in ("target", "responses", "samples", "shards"):
        run_stage(plan, stage)
    trained = run_stage(plan, "train").manifest.counts
    figures = evaluation_of(run_stage(plan, "evaluate").folder).trained
    acceptance, intervals = figures.acceptance, figures.intervals
    detail = {
        "interval": [round(intervals.acceptance_length.low, 3), round(intervals.acceptance_length.high, 3)] if intervals else None,
        "pooled": round(acceptance.pooled, 4),
        "per_position": [round(share, 3) for share in acceptance.per_position],
        "token_accuracy": trained.get("final_token_accuracy"),
        "ms_a_step": round(1e3 * float(trained["training_seconds"]) / int(trained["steps"]), 2),
        "steps": trained["steps"],
        "config": Path(options.config).name,
        "settings": options.overrides,
    }
    recorder.add(f"losses.{loss}.{precision}.acceptance", acceptance.mean_of_requests, "tokens", figures.prompts, detail)


def table(results: Path) -> str:
    """The newest line of each loss and precision, device by device, as markdown."""
    newest = {}
    for line in results.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        _, *words = record["name"].split(".")
        if record["name"].startswith("losses.") and words[0] in IN_WORDS:
            newest[record["gpu"], record["detail"]["steps"], words[0], words[1]] = record
    lines = ["| loss | precision | acceptance length, 95 % interval | pooled | slot 1 | ms a step | where |", "|---|---|---|---|---|---|---|"]
    for (gpu, steps, loss, precision), record in newest.items():
        detail = record["detail"]
        interval = "–".join(f"{bound:.2f}" for bound in detail["interval"] or ())
        lines.append(
            f"| {IN_WORDS[loss]} | {precision} | {record['value']:.2f} ({interval}) | {detail['pooled']:.2f} "
            f"| {detail['per_position'][0]:.0%} | {detail['ms_a_step']:.0f} | {gpu}, {steps} steps |"
        )
    return "\n".join(lines)


def main(words: list[str] | None = None) -> int:
    """Measure the chosen losses; 1 if anything failed."""
    parser = arguments(__doc__ or "", ["losses"])
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "demo.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=value", dest="overrides", help="change a setting; repeatable")
    parser.add_argument("--losses", nargs="*", default=list(LOSSES), choices=list(LOSSES))
    parser.add_argument("--precisions", nargs="*", help="values of training.precision; default: bfloat16, and float32 on a CPU")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=16, help="held-out prompts")
    parser.add_argument("--workspace", type=Path, default=ROOT / "workspace" / "losses", help="where stages are kept")
    parser.add_argument("--table", action="store_true", help="print a table of the results instead")
    options = parser.parse_args(words)
    if options.table:
        print(table(options.results))
        return 0
    recorder = recorder_for(options)
    for precision in options.precisions or ["float32" if recorder.device.type == "cpu" else "bfloat16"]:
        for loss in options.losses:
            recorder.attempt(f"losses.{loss}.{precision}.acceptance", partial(measure, recorder, options, loss, precision))
    return int(bool(recorder.failures))


if __name__ == "__main__":
    raise SystemExit(main())
