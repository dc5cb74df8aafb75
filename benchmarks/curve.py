"""Whether a precision trains as float32 does: loss curves of one real drafter over the same rows, against the spread of seeds.

python -m benchmarks.curve                                         on a GPU: bfloat16 against the reference, and three seeds of it
python -m benchmarks.curve --precisions bfloat16 fp8
python -m benchmarks.curve --devices cuda:0 cuda:1                 replicas against one that takes as many rows in one step
python -m benchmarks.curve --features fp8                          hidden states stored in fp8: curve.bfloat16_stored_fp8.…
python -m benchmarks.curve --device cpu --precisions float32 --seeds 0 --write-reference          the reference, five minutes on one core

The demo's target, prompts and cached responses; hidden states are captured on the device at hand, so float32 features differ in their last bits
between machines and bfloat16 ones, which is what is stored, hardly ever. A drafter of three layers trains for 300 steps of one row: see SETTINGS.
``curve_reference.json`` holds the losses of float32 on the CPU and a digest of the rows; where the rows differ this stops.

curve.<precision>.gap      mean loss of the last third, minus the reference's
curve.<precision>.noise    root mean square of the differences of single steps
curve.<precision>.spread   standard deviation over the seeds of the mean loss of the last third: what a gap is to be compared with
multi.curve_<n>gpu.gap     mean loss of the last third of n replicas, minus that of one device that adds up n passes a step; the replicas are held
                           against each other every 50 steps and at the end, bit by bit
multi.curve_<n>gpu.noise   root mean square of the differences of single steps
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import Recorder, arguments, recorder_for
from dflash_core.config import load_config
from dflash_core.data import SampleTable
from dflash_core.feed import ShardRows
from dflash_core.pipeline import run_stage
from dflash_core.plan import Plan
from dflash_core.shards.reader import ShardSample
from dflash_core.training.course import config_settings

ROOT = Path(__file__).parents[1]
REFERENCE = Path(__file__).with_name("curve_reference.json")
STEPS, WINDOW = 300, 25
BEFORE_SHARDS = ("target", "responses", "samples")
SETTINGS = [
    "target.dtype=float32", "drafter.initial_weights=random", "training.row_length=544", "training.num_anchors=32", f"training.max_steps={STEPS}",
    "training.learning_rate=1e-3", "training.checkpoint_every=1000", "training.log_every=1",
]  # fmt: skip


def plan_for(workspace: Path, device: str, precision: str, seed: int, features: str = "bfloat16", more: Sequence[str] = ()) -> Plan:
    """The plan of one run of the demo's data, with ``more`` settings."""
    settings = [
        f"extraction.feature_dtype={features}",
        f"run.workspace={json.dumps(str(workspace))}", f"run.seed={seed}", f"target.device={device}", f"training.precision={precision}",
        f"training.devices=[{json.dumps('cuda:0' if device == 'cuda' else device)}]",
    ]  # fmt: skip
    return Plan(load_config(ROOT / "configs" / "demo.yaml", [*SETTINGS, *settings, *more]))


class _Samples:
    """The training samples as ``ShardRows`` reads a dataset, without features."""

    def __init__(self, path: Path):
        self._table = SampleTable.open(path)
        self.lengths = self._table.lengths

    def sample(self, i: int) -> ShardSample:
        tokens, loss_mask = (torch.from_numpy(np.array(values)) for values in (self._table.tokens(i), self._table.loss_mask(i)))
        return ShardSample.of(self._table.id(i), {"tokens": tokens, "loss_mask": loss_mask, "features": torch.empty(len(tokens), 0)})


def rows_digest(plan: Plan) -> str:
    """sha256 (hex) of the rows of the run, features aside. Needs the samples alone."""
    for stage in BEFORE_SHARDS:
        run_stage(plan, stage)
    rows = ShardRows(_Samples(plan.folder("samples") / "train.parquet"), plan.config.training, plan.config.run.seed)
    digest = hashlib.sha256()
    for ordinal in range(STEPS):
        row = rows.row(ordinal)
        for values in (row.tokens, row.document_ids, row.anchors, row.loss_mask):
            digest.update(values.numpy().tobytes())
    return digest.hexdigest()


def curve(plan: Plan) -> list[float]:
    """Losses of all steps. Stages before the training that another plan has finished are only found."""
    for stage in (*BEFORE_SHARDS, "shards", "train"):
        run_stage(plan, stage)
    lines = (plan.folder("train") / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [float(json.loads(line)["loss"]) for line in lines]


def course(plan: Plan) -> dict[str, Any]:
    """What a curve depends on beside its rows and its seed: settings of drafter, objective and training but for the precision."""
    settings = config_settings(plan.config)
    return {name: value for name, value in settings.items() if name not in ("run.seed", "training.precision", "training.attention")}


def check_comparable(plan: Plan, rows: str, reference: dict[str, Any]) -> None:
    """Raises ``ValueError`` naming what differs from the reference."""
    found = json.loads(json.dumps(course(plan)))
    differing = [f"{name} is {found.get(name)!r}, there {value!r}" for name, value in reference["course"].items() if found.get(name) != value]
    if rows != reference["rows"]:
        differing.append(f"the rows have digest {rows[:12]}, there {reference['rows'][:12]}")
    if differing:
        raise ValueError(f"not comparable with {REFERENCE.name}: {'; '.join(differing)}. Put it back, or make the reference anew (--write-reference)")


def tail_of(losses: list[float]) -> float:
    """Mean loss of the last third."""
    return statistics.fmean(losses[-(len(losses) // 3) :])


def windows(losses: list[float]) -> list[float]:
    """Mean losses of windows of ``WINDOW`` steps."""
    return [round(statistics.fmean(losses[start : start + WINDOW]), 4) for start in range(0, len(losses), WINDOW)]


def measure_precision(recorder: Recorder, reference: dict[str, Any], workspace: Path, precision: str, seeds: list[int], features: str) -> None:
    """One precision against the reference, and its spread over seeds."""
    name = named(precision, features)
    curves: dict[int, list[float]] = {}
    for seed in seeds:
        plan = plan_for(workspace, recorder.device.type, precision, seed, features)
        rows = rows_digest(plan)
        if seed == reference["seed"]:
            check_comparable(plan, rows, reference)
        curves[seed] = curve(plan)
        if not all(math.isfinite(loss) for loss in curves[seed]):
            raise ValueError(f"seed {seed} has losses that are not finite")
    exact = reference["losses"]
    losses = curves[reference["seed"]]
    print(f"{name}: mean loss of {WINDOW} steps each\n  reference {windows(exact)}", flush=True)
    for seed in seeds:
        print(f"  seed {seed}    {windows(curves[seed])}", flush=True)
    gap, noise = tail_of(losses) - tail_of(exact), float(np.sqrt(np.mean((np.array(losses) - exact) ** 2)))
    largest = max(abs(a - b) for a, b in zip(windows(losses), windows(exact), strict=True))
    recorder.add(f"curve.{name}.gap", gap, "nat", STEPS, {"reference": round(tail_of(exact), 4), "largest window": round(largest, 4)})
    recorder.add(f"curve.{name}.noise", noise, "nat", STEPS)
    if len(seeds) > 1:
        tails = [tail_of(curves[seed]) for seed in seeds]
        recorder.add(f"curve.{name}.spread", statistics.stdev(tails), "nat", len(seeds), {"tails": [round(tail, 4) for tail in tails]})


def measure_replicas(recorder: Recorder, workspace: Path, devices: list[str], precision: str, steps: int) -> None:
    """Replicas on ``devices`` against the first of them alone, with the same rows in every step."""
    settings = [f"training.max_steps={steps}", "training.compare_replicas_every=50"]
    ways = [
        [f"training.devices={json.dumps(devices)}"],
        [f"training.devices={json.dumps(devices[:1])}", f"training.accumulation_steps={len(devices)}"],
    ]
    together, alone = (curve(plan_for(workspace, recorder.device.type, precision, 0, more=[*settings, *way])) for way in ways)
    print(f"{len(devices)} replicas {windows(together)}\n  one device {windows(alone)}", flush=True)
    name = f"multi.curve_{len(devices)}gpu"
    detail = {"precision": precision, "devices": devices, "alone": round(tail_of(alone), 4), "replicas": "bit-identical"}
    recorder.add(f"{name}.gap", tail_of(together) - tail_of(alone), "nat", len(alone), detail)
    recorder.add(f"{name}.noise", float(np.sqrt(np.mean((np.array(together) - alone) ** 2))), "nat", len(alone))


def named(precision: str, features: str) -> str:
    """The precision as figures name it, and that of the stored features where it is not the usual one."""
    return precision if features == "bfloat16" else f"{precision}_stored_{features}"


def write_reference(workspace: Path, device: str, precision: str, seed: int) -> None:
    """Train and write the file that others are compared with."""
    plan = plan_for(workspace, device, precision, seed)
    rows, losses = rows_digest(plan), curve(plan)
    facts = {"precision": precision, "device": device, "torch": torch.__version__, "seed": seed, "rows": rows, "course": course(plan)}
    text = json.dumps({**facts, "losses": [round(loss, 5) for loss in losses]})
    REFERENCE.write_text(text + "\n", encoding="utf-8")
    print(f"wrote {REFERENCE.name}: {windows(losses)}")


def main(words: list[str] | None = None) -> int:
    """Compare the chosen precisions with the reference; 1 if anything failed."""
    parser = arguments(__doc__ or "", ["curve"])
    parser.add_argument("--precisions", nargs="*", default=["bfloat16"], help="values of training.precision")
    parser.add_argument("--features", default="bfloat16", help="value of extraction.feature_dtype")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2], help="seeds of the spread; the reference's is among them")
    parser.add_argument("--devices", nargs="*", help="compare replicas on these devices with one, instead")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of that")
    parser.add_argument("--workspace", type=Path, default=ROOT / "workspace" / "curve", help="where stages are kept: what is there is not done again")
    parser.add_argument("--write-reference", action="store_true", help="make the reference instead, from the first precision and seed")
    options = parser.parse_args(words)
    if options.write_reference:
        write_reference(options.workspace, options.device, options.precisions[0], options.seeds[0])
        return 0
    recorder = recorder_for(options)
    if options.devices:
        measure = partial(measure_replicas, recorder, options.workspace, options.devices, options.precisions[0], options.steps)
        recorder.attempt(f"multi.curve_{len(options.devices)}gpu.noise", measure)
        return int(bool(recorder.failures))
    reference = json.loads(REFERENCE.read_text(encoding="utf-8"))
    for precision in options.precisions:
        measure = partial(measure_precision, recorder, reference, options.workspace, precision, options.seeds, options.features)
        recorder.attempt(f"curve.{named(precision, options.features)}.noise", measure)
    return int(bool(recorder.failures))


if __name__ == "__main__":
    raise SystemExit(main())
