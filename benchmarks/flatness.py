"""Training in threads at the size of a Qwen3-8B drafter: is memory flat, what does the engine cost, do replicas scale?

python -m benchmarks.flatness                                       everything for one GPU
python -m benchmarks.flatness --devices cuda:0,cuda:1               everything for two
python -m benchmarks.flatness --sections flat --shape tiny --device cpu --steps 6

Sections: ``overhead`` the trainer's step against the bare step of ``benchmarks.step``, ``flat`` memory of every step of two replicas in threads
(on one GPU unless two are named), ``scaling`` tokens a second of two replicas on two GPUs against one, with their weights compared bit by bit.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from functools import partial
from typing import Any

import torch

from benchmarks.common import SHAPES, Recorder, Shape, arguments, recorder_for, time_ms
from benchmarks.engine import TrainingRun
from benchmarks.step import Step

VARIANTS: dict[str, dict[str, Any]] = {"": {}, ".graphs": {"cuda_graphs": True}}
SETTLED = 5  # steps before which nothing is compared


def measure_flatness(recorder: Recorder, shape: Shape, devices: list[str], steps: int, name: str, training: dict[str, Any]) -> None:
    """Spread of the steps' peaks, growth of what is reserved, and retries, over ``steps`` steps; the worst of the devices."""
    pair = devices if len(devices) > 1 else devices * 2
    with TrainingRun(shape, pair, steps, **training) as run:
        result = run.train()
        records = run.records[SETTLED:]
        step_ms = 1e3 * run.seconds_of_a_step(SETTLED)
        warm_up = {f"replica_{device.replica}": round(device.seconds, 1) for device in run.report.devices}
    peaks, reserved, retries, fragments = (
        [[int(record[f"memory_{kind}_{index}"]) for record in records] for index in _indices(pair)]
        for kind in ("peak", "reserved", "retries", "inactive_split")
    )
    detail = {
        "devices": pair, "steps": result.steps, "loss": round(result.metrics["loss"], 4), "peak_gib": _gib(peaks), "reserved_gib": _gib(reserved),
        "fragments_gib": _gib(fragments), "step_ms": round(step_ms, 2), "warm_up_s": warm_up, **training,
    }  # fmt: skip
    recorder.add(f"{name}.peak_spread", max((max(values) - min(values) for values in peaks), default=0), "bytes", len(records), detail)
    recorder.add(f"{name}.reserved_growth", max((values[-1] - values[0] for values in reserved), default=0), "bytes", len(records))
    recorder.add(f"{name}.retries", sum(values[-1] for values in retries), "retries", len(records))


def _indices(devices: list[str]) -> list[int]:
    return sorted({int(device.partition(":")[2]) for device in devices if device != "cpu"})


def _gib(values: list[list[int]]) -> list[float]:
    return [round(max(of_device) / 2**30, 3) for of_device in values]


def measure_overhead(recorder: Recorder, shape: Shape, device: str, steps: int, name: str, training: dict[str, Any]) -> None:
    """Milliseconds of a step in the trainer, with rows from the loaders, against the same replica called in a loop on one batch that lies ready.

    Of both the second half of the steps counts: a chip that is warm slows down.
    """
    bare = _bare_step_ms(shape, recorder.device, steps)
    with TrainingRun(shape, [device], steps, **training) as run:
        run.train()
        engine = 1e3 * run.seconds_of_a_step(steps // 2)
        waits = statistics.median(record["data_wait_share"] for record in run.records[SETTLED:])
        warm_up = round(run.report.seconds, 1)
    detail = {"bare_ms": round(bare, 3), "engine_ms": round(engine, 3), "data_wait_share": round(waits, 4), "warm_up_s": warm_up}
    recorder.add(name, engine / bare - 1, "share", steps - steps // 2, detail)


def _bare_step_ms(shape: Shape, device: torch.device, steps: int) -> float:
    step = Step(shape, device, "product")
    with step.replica.on_device():
        samples = time_ms(step, device, repeats=steps)
    samples = samples[len(samples) // 2 :]
    del step
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return statistics.median(samples)


def measure_scaling(recorder: Recorder, shape: Shape, devices: list[str], steps: int, name: str, training: dict[str, Any]) -> None:
    """Tokens a second of a replica on each device over those of one replica; fails if the replicas' weights or moments differ afterwards."""
    rates = {}
    for some in (devices[:1], devices):
        with TrainingRun(shape, some, steps, **training) as run:
            run.train()
            rates[len(some)] = len(some) * shape.B * shape.T / run.seconds_of_a_step()
            checksums = [replica.checksums().tolist() for replica in run.session.replicas]
    if any(other != checksums[0] for other in checksums):
        raise ValueError("the replicas differ after training")
    detail = {"tokens_per_second": {number: round(rate) for number, rate in rates.items()}, "replicas": "bit-identical", **training}
    recorder.add(name, rates[len(devices)] / rates[1], "ratio", steps - SETTLED, detail)


def main(words: list[str] | None = None) -> int:
    """Measure the chosen sections; 1 if anything failed."""
    parser = arguments(__doc__ or "", ["overhead", "flat", "scaling"])
    parser.add_argument("--devices", type=lambda text: text.split(","), help="devices of the replicas; default: --device")
    parser.add_argument("--steps", type=int, default=300, help="steps of the section 'flat'; the others take 60 at most")
    parser.add_argument("--shapes", nargs="*", default=["1x2048", "4x3072"], choices=list(SHAPES), help="rows of the section 'scaling'")
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS), help="'' compiled, '.graphs' with CUDA graphs")
    options = parser.parse_args(words)
    devices = options.devices or ["cuda:0" if options.device == "cuda" else options.device]
    options.device = devices[0]
    recorder = recorder_for(options)
    _run(recorder, SHAPES[options.shape], devices, options)
    if recorder.failures:
        print("failed: " + ", ".join(recorder.failures))
    return int(bool(recorder.failures))


def _run(recorder: Recorder, shape: Shape, devices: list[str], options: argparse.Namespace) -> None:
    variants = [variant for variant in options.variants if variant == "" or recorder.device.type == "cuda"]
    few = min(60, options.steps)
    on = "" if len(devices) == 1 else f".{len(devices)}gpu"
    for variant in variants:
        training = VARIANTS[variant]
        if "overhead" in options.sections and len(devices) == 1:
            name = f"engine.overhead.{shape.name}{variant}"
            recorder.attempt(name, partial(measure_overhead, recorder, shape, devices[0], few, name, training))
        if "flat" in options.sections:
            name = f"flatness{on}{variant}"
            recorder.attempt(f"{name}.retries", partial(measure_flatness, recorder, shape, devices, options.steps, name, training))
        if "scaling" in options.sections and len(devices) > 1:
            for rows in options.shapes:
                name = f"multi.scaling_{len(devices)}gpu.{rows}{variant}"
                recorder.attempt(name, partial(measure_scaling, recorder, SHAPES[rows], devices, few, name, training))


if __name__ == "__main__":
    raise SystemExit(main())
