"""Training in threads at the size of a Qwen3-8B drafter: is memory flat, what does the engine cost, do replicas scale?

python -m benchmarks.flatness --sections overhead                                        one GPU, about 90 s
python -m benchmarks.flatness --sections flat                                            two replicas on one GPU, about 2 min
python -m benchmarks.flatness --sections scaling --devices cuda:0,cuda:1                 two GPUs, about 140 s; flat memory is measured by the way
python -m benchmarks.flatness --sections flat --shape tiny --device cpu --steps 6

Sections: ``overhead`` the trainer's step against the bare step of ``benchmarks.step``, ``flat`` memory of every step of two replicas in threads,
``scaling`` tokens a second of replicas on several GPUs against one (``benchmarks.scaling``).
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from functools import partial
from typing import Any

from benchmarks.common import SHAPES, Recorder, Shape, arguments, recorder_for, time_ms
from benchmarks.engine import TrainingRun
from benchmarks.step import bare_step

SETTLED = 5  # steps before which nothing is compared
_BATCHES = 8  # different ones in the bare step


def measure_flatness(recorder: Recorder, shape: Shape, devices: list[str], steps: int) -> None:
    """Memory over ``steps`` steps of two replicas."""
    pair = devices if len(devices) > 1 else devices * 2
    with _warmed(shape, pair, steps) as run:
        loss = run.train().metrics["loss"]
        record_flatness(recorder, run, loss=round(loss, 4), warm_up_s=[round(device.seconds, 1) for device in run.report.devices])


def record_flatness(recorder: Recorder, run: TrainingRun, **detail: Any) -> None:
    """Spread of the steps' peaks, growth of what is reserved, and retries, over the last training of ``run``; the worst of its devices."""
    records = run.records[SETTLED:]
    peaks, reserved, retries, fragments = (
        [[int(record[f"memory_{kind}_{index}"]) for record in records] for index in _indices(run.devices)]
        for kind in ("peak", "reserved", "retries", "inactive_split")
    )
    detail = {
        "shape": run.shape.name, "devices": run.devices, "steps": SETTLED + len(records), "peak_gib": _gib(peaks), "reserved_gib": _gib(reserved),
        "fragments_gib": _gib(fragments), "step_ms": round(1e3 * run.seconds_of_a_step(SETTLED), 2), **detail,
    }  # fmt: skip
    recorder.add("flatness.peak_spread", max((max(values) - min(values) for values in peaks), default=0), "bytes", len(records), detail)
    recorder.add("flatness.reserved_growth", max((values[-1] - values[0] for values in reserved), default=0), "bytes", len(records))
    recorder.add("flatness.retries", sum(values[-1] for values in retries), "retries", len(records))


def _indices(devices: list[str]) -> list[int]:
    return sorted({int(device.partition(":")[2]) for device in devices if device != "cpu"})


def _gib(values: list[list[int]]) -> list[float]:
    return [round(max(of_device) / 2**30, 3) for of_device in values]


def measure_overhead(recorder: Recorder, shape: Shape, device: str, steps: int) -> None:
    """A step in the trainer, with rows from the loaders, against the same replica called in a loop on batches that lie ready on the device.

    Both on rows of the same source, with CUDA graphs and then without. The bare loop is timed before and after the trainer, and of each the second
    half of the steps counts: a chip that is warm slows down.
    """
    with _warmed(shape, [device], steps, cuda_graphs="auto") as run:
        replica = run.session.replicas[0]
        batches = itertools.cycle([run.batch(number).to(replica.device) for number in range(_BATCHES)])

        def bare_ms() -> float:
            with replica.on_device():
                samples = time_ms(lambda: bare_step(replica, [next(batches)]), replica.device, repeats=2 * steps // 3)
            return statistics.median(samples[len(samples) // 2 :])

        for variant in (".graphs", "") if device != "cpu" else ("",):
            if not variant:
                run.drop_graphs()
            before = bare_ms()
            run.train()
            after, engine = bare_ms(), 1e3 * run.seconds_of_a_step(steps // 2)
            detail = {
                "bare_ms": [round(before, 3), round(after, 3)], "engine_ms": round(engine, 3), "warm_up_s": round(run.report.seconds, 1),
                "data_wait_share": round(statistics.median(record["data_wait_share"] for record in run.records[SETTLED:]), 4),
            }  # fmt: skip
            recorder.add(f"engine.overhead.{shape.name}{variant}", 2 * engine / (before + after) - 1, "share", steps - steps // 2, detail)


def _warmed(shape: Shape, devices: list[str], steps: int, **training: Any) -> TrainingRun:
    began = time.monotonic()
    print(f"warming up {len(devices)} replicas of {shape.name}", flush=True)
    run = TrainingRun(shape, devices, steps, compile="auto", **training)
    print(f"warmed up after {time.monotonic() - began:.1f} s, of which {run.report.seconds:.1f} s in the product", flush=True)
    return run


def main(words: list[str] | None = None) -> int:
    """Measure the chosen sections; 1 if anything failed."""
    parser = arguments(__doc__ or "", ["overhead", "flat", "scaling"])
    parser.add_argument("--devices", type=lambda text: text.split(","), help="devices of the replicas; default: --device")
    parser.add_argument("--steps", type=int, default=300, help="steps over which memory is watched; other trainings take fewer")
    parser.add_argument("--sync", default="all_reduce", choices=["all_reduce", "sharded"], help="training.sync of the section 'scaling'")
    parser.add_argument("--shapes", nargs="*", default=["4x3072", "1x2048"], choices=list(SHAPES), help="rows of the section 'scaling'")
    options = parser.parse_args(words)
    devices = options.devices or ["cuda:0" if options.device == "cuda" else options.device]
    options.device = devices[0]
    recorder, shape = recorder_for(options), SHAPES[options.shape]
    _run(recorder, shape, devices, options)
    if recorder.failures:
        print("failed: " + ", ".join(recorder.failures))
    return int(bool(recorder.failures))


def _run(recorder: Recorder, shape: Shape, devices: list[str], options: argparse.Namespace) -> None:
    if "overhead" in options.sections and len(devices) == 1:
        name = f"engine.overhead.{shape.name}"
        recorder.attempt(name, partial(measure_overhead, recorder, shape, devices[0], min(40, options.steps)))
    if "flat" in options.sections:
        recorder.attempt("flatness.retries", partial(measure_flatness, recorder, shape, devices, options.steps))
    if "scaling" in options.sections and len(devices) > 1:
        from benchmarks.scaling import measure_scaling  # which imports this module

        measure_scaling(recorder, [SHAPES[name] for name in options.shapes], devices, options.steps, options.sync)


if __name__ == "__main__":
    raise SystemExit(main())
