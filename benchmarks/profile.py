"""Where the device time of the product's step goes: kernels by kind, and the gaps between them.

python -m benchmarks.profile
python -m benchmarks.profile --variants ungraphed fp8 --shape 4x3072

The kinds and ``gaps`` add up to the time of a step under the profiler. ``profile-<shape>[.<variant>].txt`` has the kernels one by one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from benchmarks.common import SHAPES, Recorder, Shape, arguments, recorder_for
from benchmarks.step import VARIANTS, build

# The first kind with a word in the kernel's name; inductor names a kernel after the operations that it fuses.
KINDS: Mapping[str, tuple[str, ...]] = {
    "attention backward": ("flex_attention_backward", "keys_kernel", "queries_kernel", "own_block_kernel", "cpu_backward"),
    "attention forward": ("flex_attention", "forward_kernel", "scaled_dot_product"),
    "loss kernel": ("_exponentials_kernel", "_softmax_kernel", "_hidden_gradient_kernel"),
    "optimiser": ("_adamw_kernel", "_square_sum_kernel", "_fused_adamw", "linalg_vector_norm", "lpnorm"),
    "casts to fp8": ("_cast_kernel", "_largest_kernel", "float8", "e4m3"),
    "products": ("gemm", "nvjet", "cutlass", "cublas", "splitk", "aten::mm", "aten::addmm", "_scaled_mm"),
    "SwiGLU": ("silu",),
    "rope, with the norm of heads": ("cat_mul_neg", "neg_slice", "neg_split", "mul_neg", "slice_backward", "aten::neg"),
    "norms": ("rms_norm",),
    "other compiled": ("triton_",),
    "copies and fills": ("memcpy", "memset", "copy", "fill"),
}
PRODUCTS_OF_THE_VOCABULARY = "products of the vocabulary"


class Kernel(NamedTuple):
    """One launch: name, and begin and end in microseconds."""

    name: str
    begin: float
    end: float


def kind_of(name: str) -> str:
    """The kind of a kernel, from its name."""
    lowered = name.lower()
    return next((kind for kind, words in KINDS.items() if any(word in lowered for word in words)), "other")


def idle_time(kernels: Iterable[Kernel]) -> float:
    """Microseconds between the first begin and the last end in which none of the kernels ran."""
    idle, busy_until = 0.0, None
    for kernel in sorted(kernels, key=lambda kernel: kernel.begin):
        if busy_until is not None:
            idle += max(0.0, kernel.begin - busy_until)
        busy_until = kernel.end if busy_until is None else max(busy_until, kernel.end)
    return idle


def profile_step(recorder: Recorder, shape: Shape, variant: str, folder: Path) -> None:
    """Profile three steps of a variant and record milliseconds of a step by kind."""
    name = f"step.profile.{shape.name}" + ("" if variant == "product" else f".{variant}")

    def run() -> None:
        step = build(variant, shape, recorder.device)
        on_gpu, steps = recorder.device.type == "cuda", 3
        with step.replica.on_device():
            for _ in range(3):
                step()
            if on_gpu:
                torch.cuda.synchronize()
            with torch.profiler.profile(record_shapes=True) as profiler:
                for _ in range(steps):
                    step()
                if on_gpu:
                    torch.cuda.synchronize()
        events = list(profiler.events())
        kernels = [
            Kernel(event.name, event.time_range.start, event.time_range.end if on_gpu else event.time_range.start + event.self_cpu_time_total)
            for event in events
            if (event.device_type == DeviceType.CUDA) == on_gpu and not event.name.startswith("##")  # inductor's ranges around its kernels
        ]
        spent: defaultdict[str, float] = defaultdict(float)
        lines: defaultdict[str, list[float]] = defaultdict(list)
        for kernel in kernels:
            spent[kind_of(kernel.name)] += (kernel.end - kernel.begin) / 1e3 / steps
            lines[kernel.name].append((kernel.end - kernel.begin) / 1e3 / steps)
        vocabulary = _of_the_vocabulary(events, shape.V, on_gpu) / 1e3 / steps
        if vocabulary:  # the operations of a replayed graph are not told, so that their shapes are not, either
            spent["products"] -= vocabulary
            spent[PRODUCTS_OF_THE_VOCABULARY] += vocabulary
        if on_gpu:
            spent["gaps"] = idle_time(kernels) / 1e3 / steps
        listing = [
            f"{sum(times):9.3f} ms {len(times) / steps:7.1f} x {name}" for name, times in sorted(lines.items(), key=lambda item: -sum(item[1]))
        ]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name.removeprefix('step.').replace('.', '-', 1)}.txt").write_text("\n".join(listing[:200]) + "\n", encoding="utf-8")
        print("\n".join(line[:150] for line in listing[:15]), flush=True)
        total = sum(spent.values())
        detail = {kind: round(milliseconds, 3) for kind, milliseconds in sorted(spent.items(), key=lambda item: -item[1])}
        for kind, milliseconds in detail.items():
            print(f"  {kind:32s} {milliseconds:9.3f} ms  {milliseconds / total:6.1%}", flush=True)
        recorder.add(name, total, "ms", steps, {"variant": variant, **detail})

    recorder.attempt(name, run)


def _of_the_vocabulary(events: Iterable[Any], vocabulary: int, on_gpu: bool) -> float:
    """Microseconds of the products one side of which is the vocabulary: kernels cannot be told apart by name, their operations can by shape."""
    total = 0.0
    for event in events:
        if kind_of(event.name) == "products" and any(vocabulary in shape for shape in event.input_shapes or []):
            total += sum(kernel.duration for kernel in event.kernels) if on_gpu else event.self_cpu_time_total
    return total


def main(words: list[str] | None = None) -> int:
    """Profile the chosen variants; 1 if anything failed."""
    parser = arguments(__doc__ or "", ["profile"])
    parser.add_argument("--variants", nargs="*", default=["ungraphed"], choices=list(VARIANTS), help="settings of the step")
    options = parser.parse_args(words)
    recorder = recorder_for(options)
    for variant in options.variants:
        profile_step(recorder, SHAPES[options.shape], variant, options.results.parent)
    return int(bool(recorder.failures))


if __name__ == "__main__":
    raise SystemExit(main())
