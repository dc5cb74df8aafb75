"""One training step of the product: ``training.replica.Replica`` of one GPU on random data, from rows to updated weights.

python -m benchmarks.step                                   everything, at one row of 2048
python -m benchmarks.step --sections step profile --shape 4x3072
python -m benchmarks.step --sections step --variants product host

The variant ``product`` is recorded as ``step.bf16.<shape>``, ``fp8`` as ``step.fp8.<shape>``, the others with their name as suffix. Rows
lie on the GPU, except in ``host``; in ``windows`` all layers but the last see an eighth of the row. The section ``profile`` takes the first variant.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.attention import measure_attention
from benchmarks.common import SHAPES, Recorder, Shape, anchors_of, arguments, matmul_ceiling, recorder_for, time_ms
from benchmarks.loss import measure_loss
from benchmarks.mask import measure_mask
from dflash_core.config import parse_config
from dflash_core.drafter import DFlashConfig
from dflash_core.feed import Batch, Row, collate
from dflash_core.training.guard import prepare_for_threads
from dflash_core.training.replica import Replica

# name: settings that differ from the product's
VARIANTS: dict[str, dict[str, Any]] = {
    "product": {},
    "chunk2048": {"objective": {"chunk_slots": 2048}},
    "accumulate2": {"training": {"accumulation_steps": 2}},
    "host": {},
    "flex": {"training": {"attention": "flex"}},
    "ungraphed": {"training": {"cuda_graphs": False}},
    "muon": {"training": {"optimizer": "muon"}},
    "checkpointing": {"training": {"activation_checkpointing": True}},
    "fp8": {"training": {"precision": "fp8"}},
    "windows": {},
}
LEARNING_RATE = 6e-4


def drafter_config(shape: Shape) -> DFlashConfig:
    """A drafter of the shape's dimensions for a made-up target."""
    return DFlashConfig(
        target_name=shape.name,
        num_target_layers=36,
        tap_layers=tuple(range(1, 1 + shape.layers)),
        hidden_size=shape.H,
        intermediate_size=shape.I,
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.V,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        max_position_embeddings=40_960,
        block_size=shape.S,
        mask_token_id=shape.V - 1,
    )


@dataclass(frozen=True)
class RandomVocabulary:
    """Embedding and head of a made-up target."""

    embedding_weight: Tensor
    head_weight: Tensor
    logit_softcap: float | None = None
    logit_scale: float = 1.0

    def embed(self, ids: Tensor) -> Tensor:
        """[..., H]."""
        return functional.embedding(ids, self.embedding_weight)


class Step:
    """A replica of the product on random data. Call it inside ``replica.on_device()``."""

    def __init__(self, shape: Shape, device: torch.device, variant: str):
        settings = VARIANTS[variant]
        training = {
            "devices": ["cuda:0" if device.type == "cuda" else "cpu"], "row_length": shape.T, "num_anchors": shape.N, "rows_per_microstep": shape.B,
            "queue_rows": 2 * shape.B, "precision": "bfloat16", **settings.get("training", {}),
        }  # fmt: skip
        drafter = drafter_config(shape)
        if variant == "windows":
            drafter = replace(drafter, sliding_window=shape.T // 8, sliding_layers=tuple(range(drafter.num_layers - 1)))
        config = parse_config(
            {
                "target": {"model": shape.name},
                "data": {"sources": [{"source": "none.jsonl"}], "max_length": shape.T},
                "drafter": {"block_size": shape.S, "mask_token_id": drafter.mask_token_id},
                "objective": {"chunk_slots": shape.chunk, **settings.get("objective", {})},
                "training": training,
            }
        )
        torch.manual_seed(0)
        with torch.device(device):
            vocabulary = RandomVocabulary(*(torch.randn(shape.V, shape.H).mul_(0.02).bfloat16() for _ in range(2)))
        self.replica = Replica(0, torch.device(training["devices"][0]), config, drafter, vocabulary)
        weights = self.replica.layout.views(self.replica.weights)
        for weight in weights.values():
            weight.fill_(1.0) if weight.dim() == 1 else weight.normal_(std=0.02)
        self.replica.load(weights)
        self.rows = self._rows(shape, torch.device("cpu") if variant == "host" else device, drafter.feature_size)
        self.micro_steps = config.training.accumulation_steps
        self.replica.warm_up(self.rows)

    @staticmethod
    def _rows(shape: Shape, device: torch.device, feature_size: int) -> list[Row]:
        anchors_BN, documents_BT = anchors_of(shape, device)
        rows = []
        for b in range(shape.B):
            with torch.device(device):
                features = torch.randn(shape.T, feature_size, dtype=torch.bfloat16)
                tokens, positions = torch.randint(0, shape.V, (shape.T,)), torch.arange(shape.T)
                mask = torch.ones(shape.T, dtype=torch.bool)
            rows.append(Row(b, 0, features, tokens, documents_BT[b], positions, mask, anchors_BN[b], (f"row {b}",)))
        return rows

    def __call__(self) -> None:
        """One optimiser step; waits for nothing."""
        bare_step(self.replica, (collate(self.rows) for _ in range(self.micro_steps)))


def bare_step(replica: Replica, batches: Iterable[Batch]) -> None:
    """One optimiser step of a replica that has no others, and nothing else; waits for nothing."""
    replica.begin_step()
    for batch in batches:
        replica.micro_step(batch)
    replica.close_step(False)
    replica.apply(LEARNING_RATE)


def measure_step(recorder: Recorder, shape: Shape, variants: list[str], ceiling: float) -> None:
    """Milliseconds, share of the matmul ceiling and peak memory of each variant."""
    for variant in variants:
        precision, _, rest = ("bf16." + variant.removeprefix("product") if variant.partition(".")[0] != "fp8" else variant).partition(".")
        name = f"step.{precision}.{shape.name}" + (f".{rest}" if rest else "")
        recorder.attempt(f"{name}.peak", partial(_measure_variant, recorder, shape, name, variant, ceiling))


def _measure_variant(recorder: Recorder, shape: Shape, name: str, variant: str, ceiling: float) -> None:
    step = build(variant, shape, recorder.device)
    with step.replica.on_device():
        totals = []
        for _ in range(3):
            step()
            totals.append(step.replica.totals_later()())
        samples = time_ms(step, recorder.device, repeats=30)
        step()
        totals.append(step.replica.totals_later()())
        peak = _memory(step, recorder.device)
    losses, norms = [round(total.loss, 4) for total in totals], [round(total.grad_norm, 4) for total in totals]
    if not all(math.isfinite(value) for value in losses + norms):
        raise ValueError(f"losses {losses} and gradient norms {norms} are not finite")
    detail = {"variant": variant, "losses": losses, "norms": norms, "min": round(min(samples), 3), "max": round(max(samples), 3)}
    milliseconds = statistics.median(samples)
    flops = shape.flops * step.micro_steps
    recorder.add(name, milliseconds, "ms", len(samples), detail)
    recorder.add(f"{name}.ceiling_share", flops / milliseconds / 1e9 / ceiling, "share", len(samples), {"tflop": flops / 1e12, "ceiling": ceiling})
    recorder.add(f"{name}.tokens", step.micro_steps * shape.B * shape.T / milliseconds * 1e3, "tok/s", len(samples))
    recorder.add(f"{name}.peak", peak.pop("peak_gib"), "GiB", 20, peak)


def build(variant: str, shape: Shape, device: torch.device) -> Step:
    """A warmed step of a variant; frees whatever the variant before held."""
    prepare_for_threads()
    if device.type == "cuda":
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return Step(shape, device, variant)


def _memory(step: Step, device: torch.device) -> dict[str, float]:
    """Peak GiB of each of 20 steps and how much it and the reserved memory move."""
    if device.type != "cuda":
        return {"peak_gib": 0.0}
    peaks, reserved = [], []
    for _ in range(20):
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        peaks.append(torch.cuda.max_memory_allocated(device) / 2**30)
        reserved.append(torch.cuda.memory_reserved(device) / 2**30)
    retries = torch.cuda.memory_stats(device)["num_alloc_retries"]
    return {
        "peak_gib": max(reserved if step.replica.graphed else peaks),  # the allocator does not count what lies in graphs as allocated
        "spread": max(peaks) - min(peaks),
        "reserved": max(reserved),
        "grown": reserved[-1] - reserved[0],
        "retries": retries,
    }


def main(words: list[str] | None = None) -> int:
    """Measure the chosen sections; 1 if anything failed."""
    parser = arguments(__doc__ or "", ["ceiling", "mask", "loss", "attention", "step", "profile"])
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS), help="settings of the step")
    parser.add_argument("--attention", nargs="*", help="variants of benchmarks.attention to measure; default: all")
    options = parser.parse_args(words)
    recorder, shape = recorder_for(options), SHAPES[options.shape]
    sections = set(options.sections)
    ceiling = matmul_ceiling(recorder, 8192 if recorder.device.type == "cuda" else 64) if sections & {"ceiling", "step"} else 0.0
    if "mask" in sections:
        measure_mask(recorder, shape)
    if "step" in sections:
        measure_step(recorder, shape, options.variants, ceiling)
    if "profile" in sections:
        from benchmarks.profile import profile_step  # which imports this module

        profile_step(recorder, shape, options.variants[0], options.results.parent)
    if "loss" in sections:
        measure_loss(recorder, shape)
    if "attention" in sections:
        measure_attention(recorder, shape, options.attention)
    if recorder.failures:
        print("failed: " + ", ".join(recorder.failures))
    return int(bool(recorder.failures))


if __name__ == "__main__":
    raise SystemExit(main())
