"""One training step of one replica on one GPU: labels, mask, compiled drafter, vocabulary loss, backward, clipping, AdamW with fp32 masters.

python -m benchmarks.step                                   everything, at one row of 2048
python -m benchmarks.step --sections step profile --shape 4x3072
python -m benchmarks.step --sections step --variants batched/fused/1024

A variant is attention layout / optimiser / loss chunk. The first one listed is recorded as ``step.bf16.<shape>``, the others with the variant
as suffix. Optimisers: ``fused`` is one Triton kernel a tensor over bf16 weights and gradients with fp32 masters and moments; ``torch`` is
torch's fused AdamW over fp32 copies of the gradients. Both clip by the global norm without waiting for the device.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.nn.attention.flex_attention import BlockMask

import dflash_core.drafter.model as drafter_model
from benchmarks.attention import attend, mask_for, measure_attention
from benchmarks.common import SHAPES, Recorder, Shape, anchors_of, arguments, matmul_ceiling, recorder_for, time_ms, triton_runs
from benchmarks.loss import measure_loss
from benchmarks.mask import measure_mask
from dflash_core.drafter import DFlashConfig, DFlashDrafter, block_labels, block_positions, block_tokens, dflash_dense_mask
from dflash_core.objective import linear_cross_entropy, slot_weights

VARIANTS = ("grouped/fused/1024", "batched/fused/1024", "batched/fused/2048", "batched/torch/1024")
MAX_NORM, BETAS, LEARNING_RATE = 1.0, (0.9, 0.95), 6e-4
OBJECTIVE = SimpleNamespace(weighting="decay", gamma=None, dpace_alpha=0.5)  # ObjectiveConfig's fields; pydantic may not be there


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


class Optimiser:
    """fp32 masters and moments of bf16 weights; ``update`` clips by the global norm and takes one step."""

    def __init__(self, kind: str, weights: list[nn.Parameter]):
        self.kind, self.weights = kind, weights
        device = weights[0].device
        self.masters = [nn.Parameter(weight.detach().float()) for weight in weights]
        self.rate = torch.full((), LEARNING_RATE, device=device)
        self.updates = torch.zeros((), device=device)
        if kind == "torch":
            self.adamw = torch.optim.AdamW(self.masters, lr=self.rate, betas=BETAS, weight_decay=0.0, fused=True)
            for master in self.masters:
                master.grad = torch.zeros_like(master)
        else:
            self.first, self.second = ([torch.zeros_like(master) for master in self.masters] for _ in range(2))

    def update(self) -> Tensor:
        """Returns the global norm of the gradients before clipping, float32 scalar on the device; a norm that is not finite changes nothing."""
        gradients = [cast(Tensor, weight.grad) for weight in self.weights]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2, torch.float32)))
        scale = (MAX_NORM / (norm + 1e-6)).clamp(max=1.0)
        finite = norm.isfinite()
        if self.kind == "torch":
            copies = [cast(Tensor, master.grad) for master in self.masters]
            torch._foreach_copy_(copies, gradients)
            self.adamw.grad_scale, self.adamw.found_inf = 1 / scale, (~finite).float()  # type: ignore[attr-defined]
            self.adamw.step()
            torch._foreach_copy_([weight.data for weight in self.weights], [master.data for master in self.masters])
        else:
            from benchmarks.fused_adamw import adamw_

            self.updates += finite
            scale = torch.where(finite, scale, torch.nan)
            weights, masters = [weight.data for weight in self.weights], [master.data for master in self.masters]
            adamw_(weights, gradients, masters, self.first, self.second, scale=scale, learning_rate=self.rate, updates=self.updates, betas=BETAS)
        for weight in self.weights:
            weight.grad = None  # the backward pass then hands its own tensors over instead of adding to these
        return norm


class Step:
    """A drafter with everything one training step needs, on random data."""

    def __init__(self, shape: Shape, device: torch.device, layout: str, optimiser: str, chunk: int):
        self.shape, self.device, self.layout, self.chunk = shape, device, layout, chunk
        self.config = drafter_config(shape)
        torch.manual_seed(0)
        with torch.device(device):
            self.drafter = DFlashDrafter(self.config).to(device, torch.bfloat16)
            for weight in self.drafter.parameters():
                if weight.dim() > 1:
                    nn.init.normal_(weight, std=0.02)
            self.head_VH = torch.randn(shape.V, shape.H).mul_(0.02).bfloat16()
            self.embedding_VH = torch.randn(shape.V, shape.H).mul_(0.02).bfloat16()
            self.features_BTF = torch.randn(shape.B, shape.T, self.config.feature_size, dtype=torch.bfloat16)
            self.tokens_BT = torch.randint(0, shape.V, (shape.B, shape.T))
            self.mask_BT = torch.ones(shape.B, shape.T, dtype=torch.bool)
            self.positions_BT = torch.arange(shape.T).repeat(shape.B, 1)
        self.anchors_BN, self.documents_BT = anchors_of(shape, device)
        self.optimiser = Optimiser(optimiser, list(self.drafter.parameters()))
        self.on_gpu = device.type == "cuda"
        self.forward: Callable[..., Tensor] = torch.compile(self.drafter, dynamic=False, fullgraph=True) if self.on_gpu else self.drafter

    def __call__(self) -> tuple[Tensor, Tensor]:
        """One step; returns loss and gradient norm, on the device."""
        S, config = self.shape.S, self.config
        labels_BNS = block_labels(self.tokens_BT, self.mask_BT, self.documents_BT, self.anchors_BN, S, config.spec)
        ids_BQ = block_tokens(self.tokens_BT, self.anchors_BN, config).flatten(1)
        positions_BQ = block_positions(self.positions_BT, self.anchors_BN, S).flatten(1)
        mask: BlockMask | Tensor
        if self.on_gpu:
            mask = mask_for(self.layout, self.shape, self.anchors_BN, self.documents_BT)
        else:
            mask = dflash_dense_mask(self.anchors_BN, self.documents_BT, S)
        hidden_BQH = self.forward(self.features_BTF, self.embedding_VH[ids_BQ], self.positions_BT, positions_BQ, mask)
        losses = linear_cross_entropy(
            hidden_BQH.flatten(0, 1), self.head_VH, labels_BNS.flatten(), chunk_slots=self.chunk, max_labelled=self.shape.labelled
        )  # fmt: skip
        weights_BNS, denominator = slot_weights(cast(Any, OBJECTIVE), labels_BNS, losses.probability.view(labels_BNS.shape))
        loss = (weights_BNS.flatten() * losses.nll).sum() / denominator
        loss.backward()
        return loss.detach(), self.optimiser.update()


def measure_step(recorder: Recorder, shape: Shape, variants: list[str], ceiling: float) -> None:
    """Milliseconds, share of the matmul ceiling and peak memory of each variant."""
    for i, variant in enumerate(variants):
        name = f"step.bf16.{shape.name}" + ("" if i == 0 else "." + variant.replace("/", "-"))
        recorder.attempt(f"{name}.peak", partial(_measure_variant, recorder, shape, name, variant, ceiling))


def _measure_variant(recorder: Recorder, shape: Shape, name: str, variant: str, ceiling: float) -> None:
    step = build(variant, shape, recorder.device)
    results = [step() for _ in range(3)]  # compiles on the first
    samples = time_ms(step, recorder.device, repeats=30)
    results.append(step())
    losses, norms = ([round(float(value), 4) for value in column] for column in zip(*results, strict=True))
    detail = {"variant": variant, "losses": losses, "norms": norms, "min": round(min(samples), 3), "max": round(max(samples), 3)}
    if not all(math.isfinite(value) for value in losses + norms):
        raise ValueError(f"losses {losses} and gradient norms {norms} are not finite")
    milliseconds = statistics.median(samples)
    recorder.add(name, milliseconds, "ms", len(samples), detail)
    recorder.add(
        f"{name}.ceiling_share", shape.flops / milliseconds / 1e9 / ceiling, "share", len(samples), {"tflop": shape.flops / 1e12, "ceiling": ceiling}
    )
    recorder.add(f"{name}.tokens", shape.B * shape.T / milliseconds * 1e3, "tok/s", len(samples))
    peak = _memory(step, recorder.device)
    recorder.add(f"{name}.peak", peak.pop("peak_gib"), "GiB", 20, peak)


def build(variant: str, shape: Shape, device: torch.device) -> Step:
    """A step of a variant; frees whatever the variant before held, and hands the drafter its attention layout."""
    layout, optimiser, chunk = variant.split("/")
    if device.type == "cuda":
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)

    def flex(q: Tensor, k: Tensor, v: Tensor, *, block_mask: BlockMask, enable_gqa: bool) -> Tensor:
        return attend(layout, q, k, v, block_mask, {})

    drafter_model.flex_attention = flex  # type: ignore[assignment, attr-defined]
    return Step(shape, device, layout, optimiser, int(chunk))


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
        "peak_gib": max(peaks),
        "spread": max(peaks) - min(peaks),
        "reserved": max(reserved),
        "grown": reserved[-1] - reserved[0],
        "retries": retries,
    }


def profile_step(recorder: Recorder, shape: Shape, variant: str, folder: Path) -> None:
    """Where the device time of a step goes, by kind of kernel; the kernels one by one in ``<folder>/profile-<shape>.txt``."""

    def run() -> None:
        step = build(variant, shape, recorder.device)
        for _ in range(3):
            step()
        steps = 3
        with torch.profiler.profile() as profiler:
            for _ in range(steps):
                step()
            if step.on_gpu:
                torch.cuda.synchronize()
        kernels: dict[str, tuple[float, int]] = {}
        for event in profiler.events():
            on_device = event.device_type == DeviceType.CUDA
            if on_device == step.on_gpu:
                spent, count = kernels.get(event.name, (0.0, 0))
                kernels[event.name] = spent + (event.time_range.elapsed_us() if on_device else event.self_cpu_time_total) / 1e3 / steps, count + 1
        shares: dict[str, float] = {}
        for kernel, (spent, _) in kernels.items():
            shares[kind_of(kernel)] = shares.get(kind_of(kernel), 0.0) + spent
        lines = [
            f"{spent:9.3f} ms {count / steps:7.1f} x {kernel}" for kernel, (spent, count) in sorted(kernels.items(), key=lambda item: -item[1][0])
        ]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"profile-{shape.name}.txt").write_text("\n".join(lines[:200]) + "\n", encoding="utf-8")
        print("\n".join(line[:150] for line in lines[:25]), flush=True)
        detail = {name: round(spent, 3) for name, spent in sorted(shares.items(), key=lambda item: -item[1])}
        recorder.add(f"step.profile.{shape.name}", sum(shares.values()), "ms", steps, {"variant": variant, **detail})

    recorder.attempt(f"step.profile.{shape.name}", run)


def kind_of(kernel: str) -> str:
    """The kind of a kernel, from its name."""
    kinds = {
        "product": ("gemm", "nvjet", "cutlass", "cublas", "splitk", "aten::mm", "aten::addmm"),
        "flex backward": ("flex_attention_backward",),
        "flex forward": ("flex_attention",),
        "loss kernel": ("softmax_gradient",),
        "optimiser": ("adam",),
        "copies": ("memcpy", "memset", "copy"),
    }
    lowered = kernel.lower()
    return next((kind for kind, words in kinds.items() if any(word in lowered for word in words)), "element-wise")


def main(words: list[str] | None = None) -> int:
    """Measure the chosen sections; 1 if anything failed."""
    parser = arguments(__doc__ or "", ["ceiling", "mask", "loss", "attention", "step", "profile"])
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), help="attention layout / optimiser / loss chunk")
    parser.add_argument("--attention", nargs="*", help="variants of benchmarks.attention to measure; default: all")
    options = parser.parse_args(words)
    recorder, shape = recorder_for(options), SHAPES[options.shape]
    variants = [variant for variant in options.variants if triton_runs(recorder.device) or "/fused/" not in variant]
    sections = set(options.sections)
    ceiling = matmul_ceiling(recorder, 8192 if recorder.device.type == "cuda" else 64) if sections & {"ceiling", "step"} else 0.0
    if "mask" in sections:
        measure_mask(recorder, shape)
    if "step" in sections:
        measure_step(recorder, shape, variants, ceiling)
    if "profile" in sections:
        profile_step(recorder, shape, variants[0], options.results.parent)
    if "loss" in sections:
        measure_loss(recorder, shape)
    if "attention" in sections:
        measure_attention(recorder, shape, options.attention)
    if recorder.failures:
        print("failed: " + ", ".join(recorder.failures))
    return int(bool(recorder.failures))


if __name__ == "__main__":
    raise SystemExit(main())
