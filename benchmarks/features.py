"""What storing hidden states in fp8 costs: the held-out loss of one drafter trained from either, against what another seed changes.

python -m benchmarks.features --config configs/smollm2-135m.yaml --steps 800 --set 'data.sources=[{source: prompts.jsonl.gz, limit: 6000}]' \\
    --set data.heldout_fraction=0.05                                                        on a GPU, four minutes of an H200
python -m benchmarks.features --device cpu --steps 8 --seeds 0 1 --set 'data.sources=[{source: builtin:python-tasks, limit: 60}]'    on one core

One preparation of the data for all; shards of it in bfloat16 and in fp8; from each of them one drafter a seed (first weights, order of the rows,
anchors). All are judged on the conversations that the stage 'samples' holds out, with the same anchors, and on hidden states in bfloat16, which
are nearer to what a served drafter gets. Stages are kept: ``benchmarks.losses`` with the same workspace, sources and --set takes the same answers
and samples.

features.<dtype>.seed<k>.heldout_loss   mean cross-entropy (nat) of all labelled slots, each counting once; in the detail the share of first slots
                                        whose label is the likeliest token, and the mean training loss of the last 50 steps (weighted as the
                                        objective says, so not to be compared with the other)
features.fp8.gap                        mean over the seeds of fp8 less that of bfloat16 (nat); in the detail the spread (largest less smallest) of
                                        bfloat16's seeds, and the differences seed by seed
features.fp8.gap_of_spread              the gap over that spread: at most 1 where fp8 costs no more than another seed
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import Recorder, arguments, recorder_for
from benchmarks.losses import ROOT, shared_settings
from dflash_core.config import load_config
from dflash_core.data import SampleTable
from dflash_core.feed import ShardRows, collate
from dflash_core.pipeline import run_stage
from dflash_core.plan import CODE_VERSIONS, Plan
from dflash_core.runners import drafter_config_of, trained_drafter
from dflash_core.shards import ShardDataset, extract
from dflash_core.shards.extract import target_threads
from dflash_core.target import TargetVocabulary
from dflash_core.training.metrics import read_metrics
from dflash_core.training.replica import Replica, compute_dtype

DTYPES = ("bfloat16", "fp8")
LAST = 50  # steps that the training loss is of
ALL_SLOTS_ALIKE = ["objective.weighting=uniform", "objective.distillation.weight=0", "training.accumulation_steps=1", "training.compile=off"]


@dataclass(frozen=True)
class Judgement:
    """Of a drafter on the held-out rows: mean cross-entropy (nat) of ``slots`` labelled slots, and the share of first slots that it hits."""

    loss: float
    accuracy: float
    slots: int


def plan_for(options: argparse.Namespace, device: str, dtype: str, seed: int, more: list[str] | None = None) -> Plan:
    """The plan of one training."""
    precision = "float32" if device == "cpu" else "bfloat16"
    ours = [f"extraction.feature_dtype={dtype}", f"run.seed={seed}", "training.log_every=10", *(more or [])]
    settings = [*shared_settings(options, device), f"training.precision={precision}", *options.overrides, *ours]
    return Plan(load_config(options.config, settings), str(options.config))


def check_disjoint(training: SampleTable, heldout: SampleTable) -> None:
    """Raises ``ValueError`` where a held-out prompt is trained on too."""
    trained = {training.prompt_tokens(i).tobytes() for i in range(len(training))}
    shared = [heldout.id(i) for i in range(len(heldout)) if heldout.prompt_tokens(i).tobytes() in trained]
    if shared:
        raise ValueError(f"{len(shared)} of {len(heldout)} held-out prompts are trained on too, {shared[0]!r} among them: they can judge nothing")


def heldout_features(plan: Plan) -> ShardDataset:
    """Hidden states in bfloat16 of the held-out conversations, made where they are missing."""
    samples = plan.folder("samples")
    heldout = SampleTable.open(samples / "heldout.parquet")
    check_disjoint(SampleTable.open(samples / "train.parquet"), heldout)
    dtype, device = plan.config.target.dtype, plan.config.target.device
    config = plan.config.extraction.model_copy(update={"feature_dtype": "bfloat16", "teacher": "none", "trim": False})
    key = plan.key("shards")
    assert key is not None, "the target is known once there are samples"
    folder = plan.workspace / "heldout" / key[:12]
    targets, _ = target_threads([plan.target_model(dtype, device)], config, plan.tap_layers)
    extract(config, plan.info, targets, heldout, folder, tap_layers=plan.tap_layers, target_dtype=dtype, code_version=CODE_VERSIONS["shards"])
    return ShardDataset(folder)


class HeldOutRows:
    """The rows that every drafter is judged on, with anchors drawn once, and the replica that takes each one's weights."""

    def __init__(self, plan: Plan, dataset: ShardDataset):
        """``plan`` weighs all slots alike, and does not compile: so few rows are sooner done without."""
        training = plan.config.training
        device = torch.device(training.devices[0])
        self.conversations, self.digest = len(dataset), dataset.digest
        rows = ShardRows(dataset, training, seed=0)
        self._rows = [rows.row(ordinal) for ordinal in range(rows.rows_per_epoch(0))]
        self._together = training.rows_per_microstep
        dtype = torch.float32 if device.type == "cpu" else compute_dtype(training.precision)
        vocabulary = TargetVocabulary.from_pretrained(plan.info, dtype=dtype, device=device)
        self._replica = Replica(0, device, plan.config, drafter_config_of(plan), vocabulary)

    def judge(self, weights: Mapping[str, Tensor]) -> Judgement:
        """Passes of training, whose gradients are dropped."""
        replica, loss, slots, first, hits = self._replica, 0.0, 0.0, 0, 0
        replica.load(weights)
        slot = replica.drafter.config.spec.first_predicting_slot
        for start in range(0, len(self._rows), self._together):
            replica.begin_step()
            replica.micro_step(collate(self._rows[start : start + self._together]))
            totals = replica.tail.read(replica.totals)
            loss, slots = loss + totals.loss * totals.denominator, slots + totals.denominator
            first, hits = first + totals.labelled[slot], hits + totals.hits[slot]
        replica.begin_step()
        return Judgement(loss / slots, hits / first, int(slots))


class Comparison:
    """All trainings of one command, their data prepared before the first of them."""

    def __init__(self, options: argparse.Namespace, device: str):
        self._options, self._device = options, device
        plans = {dtype: plan_for(options, device, dtype, options.seeds[0]) for dtype in DTYPES}
        for plan in plans.values():
            for stage in ("target", "responses", "samples", "shards"):
                run_stage(plan, stage)
        exact = plans["bfloat16"]
        dataset = heldout_features(exact)
        for plan in plans.values():
            plan.release_target()
        self.heldout = HeldOutRows(plan_for(options, device, "bfloat16", options.seeds[0], ALL_SLOTS_ALIKE), dataset)
        self._shards = {dtype: plan.key("shards") for dtype, plan in plans.items()}
        self._judged: dict[tuple[str, int], tuple[Judgement, dict[str, Any]]] = {}

    def judged(self, dtype: str, seed: int) -> tuple[Judgement, dict[str, Any]]:
        """Train unless that has been done, and judge; the second is the detail of its record."""
        if (dtype, seed) not in self._judged:
            self._judged[dtype, seed] = self._judge(dtype, seed)
        return self._judged[dtype, seed]

    def _judge(self, dtype: str, seed: int) -> tuple[Judgement, dict[str, Any]]:
        plan = plan_for(self._options, self._device, dtype, seed)
        if plan.key("shards") != self._shards[dtype]:
            raise ValueError("run.seed decides here what the data is. Leave out the source 'target', and set data.generation.temperature to 0")
        counts = run_stage(plan, "train").manifest.counts
        judgement = self.heldout.judge(trained_drafter(plan).state_dict())
        records = read_metrics(plan.folder("train") / "metrics.jsonl")
        steps = int(counts["steps"])
        return judgement, {
            "accuracy_slot_1": round(judgement.accuracy, 4),
            "training_loss": round(statistics.fmean(record["loss"] for record in records if record["step"] > steps - LAST), 4),
            "steps": steps,
            "tokens": steps * plan.config.rows_per_step * plan.config.training.row_length,
            "ms_a_step": round(1e3 * float(counts["training_seconds"]) / steps, 2),
            "heldout": {"conversations": self.heldout.conversations, "digest": self.heldout.digest[:12]},
            **self.settings,
        }

    @property
    def settings(self) -> dict[str, Any]:
        """What the command was given, for the record."""
        return {"config": Path(self._options.config).name, "settings": self._options.overrides}


def record_one(recorder: Recorder, comparison: Comparison, dtype: str, seed: int) -> None:
    """features.<dtype>.seed<k>.heldout_loss"""
    judgement, detail = comparison.judged(dtype, seed)
    recorder.add(f"features.{dtype}.seed{seed}.heldout_loss", judgement.loss, "nat", judgement.slots, detail)


def record_gap(recorder: Recorder, comparison: Comparison, seeds: list[int]) -> None:
    """features.fp8.gap and, where there is a spread, features.fp8.gap_of_spread"""
    judged = {dtype: [comparison.judged(dtype, seed)[0] for seed in seeds] for dtype in DTYPES}
    exact, stored = ([judgement.loss for judgement in judged[dtype]] for dtype in DTYPES)
    gap, spread = statistics.fmean(stored) - statistics.fmean(exact), max(exact) - min(exact)
    detail = {
        "spread": round(spread, 5),
        "by_seed": [round(there - here, 5) for here, there in zip(exact, stored, strict=True)],
        "seeds": seeds,
        "accuracy_slot_1": {dtype: [round(judgement.accuracy, 4) for judgement in judged[dtype]] for dtype in DTYPES},
        **comparison.settings,
    }
    if spread > 0:
        recorder.add("features.fp8.gap_of_spread", gap / spread, "ratio", len(seeds), {"gap": round(gap, 5), "spread": round(spread, 5)})
    recorder.add("features.fp8.gap", gap, "nat", len(seeds), detail)


def main(words: list[str] | None = None) -> int:
    """Train and judge with every seed from both; 1 if anything failed."""
    parser = arguments(__doc__ or "", ["features"])
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "demo.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=value", dest="overrides", help="change a setting; repeatable")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--workspace", type=Path, default=ROOT / "workspace" / "losses", help="where stages are kept; that of benchmarks.losses")
    options = parser.parse_args(words)
    recorder = recorder_for(options)
    prepared = functools.cache(lambda: Comparison(options, recorder.device.type))  # not where all is there
    for seed in options.seeds:  # seed by seed, so that a run that is cut short has pairs
        for dtype in DTYPES:
            name = f"features.{dtype}.seed{seed}.heldout_loss"
            recorder.attempt(name, lambda dtype=dtype, seed=seed: record_one(recorder, prepared(), dtype, seed))  # type: ignore[misc]
            if recorder.failures:
                return 1  # the others are for nothing without it
    recorder.attempt("features.fp8.gap", lambda: record_gap(recorder, prepared(), options.seeds))
    return int(bool(recorder.failures))


if __name__ == "__main__":
    raise SystemExit(main())
