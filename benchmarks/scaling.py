"""Tokens a second of a replica on each of several GPUs over those of one, for rows of several shapes.

python -m benchmarks.flatness --sections scaling --devices cuda:0,cuda:1

Most of the time goes into compiling, so each shape has a process, and all warm up at once. When all are warm they measure one after the other,
each when it is told to. A process trains all replicas and then the first alone, with CUDA graphs and then without, and fails if the replicas'
weights or moments differ afterwards. Memory is watched in the longest of these trainings, of the last shape, without graphs.

With ``--sync sharded`` no replica can train alone, and milliseconds of a step are recorded in the place of the ratio.
"""

from __future__ import annotations

import argparse
import queue
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

from benchmarks.common import SHAPES, Recorder, Shape, arguments, recorder_for
from benchmarks.engine import TrainingRun
from benchmarks.flatness import SETTLED, record_flatness

_READY, _GO = "READY", "GO\n"
_MOST_STEPS, _FEWEST_STEPS, _TOKENS = 60, SETTLED + 4, 45_000  # of a training that only tells a rate: three or four seconds
_NAMES = {"4x3072": "", "1x2048": "_1x2048"}


def measure_scaling(recorder: Recorder, shapes: list[Shape], devices: list[str], steps: int, sync: str) -> None:
    """A process for each shape; what fails in one is among ``recorder.failures``, and the others go on."""
    began, news = time.monotonic(), queue.SimpleQueue[tuple[str, str | None]]()
    processes = {shape.name: _start(recorder, shape, devices, steps if shape is shapes[-1] else 0, sync) for shape in shapes}

    def listen(name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            news.put((name, line.rstrip()))
        news.put((name, None))

    for name, process in processes.items():
        threading.Thread(target=listen, args=(name, process), daemon=True).start()
    waiting, warming, measuring = list(processes), set(processes), None
    while waiting or measuring:
        if measuring is None and not warming:
            measuring = waiting.pop(0)
            stdin = processes[measuring].stdin
            assert stdin is not None
            stdin.write(_GO)
            stdin.flush()
        name, line = news.get()
        print(f"[{time.monotonic() - began:6.1f} s] {name}: {'has ended' if line is None else line}", flush=True)
        if line == _READY:
            warming.discard(name)
        elif line is None:
            warming.discard(name)
            measuring = None if measuring == name else measuring
            waiting = [other for other in waiting if other != name]
            if processes[name].wait():
                recorder.failures.append(f"scaling of {name}")


def _start(recorder: Recorder, shape: Shape, devices: list[str], steps: int, sync: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.scaling", "--shape", shape.name, "--devices", ",".join(devices), "--steps", str(steps)]
    command += ["--sync", sync]
    command += ["--results", str(recorder.path.resolve()), "--commit", recorder.commit, *(["--dirty"] if recorder.dirty else [])]
    root = Path(__file__).resolve().parents[1]
    return subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def measure(recorder: Recorder, shape: Shape, devices: list[str], steps: int, sync: str) -> None:
    """In a process of its own: warm up, wait for the word, and measure. Memory is watched over ``steps`` steps, not at all if 0."""
    with TrainingRun(shape, devices, _MOST_STEPS, compile="auto", cuda_graphs="auto", sync=sync) as run:
        print(f"warmed up: {[round(device.seconds, 1) for device in run.report.devices]} s", flush=True)
        print(_READY, flush=True)
        if sys.stdin.readline() != _GO:
            raise SystemExit("whoever started this process has ended")
        for variant in (".graphs", "") if devices[0] != "cpu" else ("",):
            if sync == "all_reduce":
                run.make_equal()
            if not variant:
                run.drop_graphs()
            watching = bool(steps) and not variant
            together = _rate(run, len(devices), steps if watching else None)
            checksums = [replica.checksums().tolist() for replica in run.session.replicas]
            if any(other != checksums[0] for other in checksums):
                raise ValueError("the replicas differ after training")
            detail = {
                "replicas": "bit-identical",
                "sync_share": round(statistics.median(record["sync_share"] for record in run.records[SETTLED:]), 4),
            }
            milliseconds, samples = 1e3 * run.seconds_of_a_step(SETTLED), len(run.records) - SETTLED
            if watching:
                record_flatness(recorder, run, sync=sync, **detail)
            where = f"{len(devices)}gpu{_NAMES.get(shape.name, '_' + shape.name)}"
            if sync != "all_reduce":
                recorder.add(f"multi.step_{where}.{sync}{variant}", milliseconds, "ms", samples, detail)
                continue
            alone = _rate(run, 1)
            rates = {"1": round(alone), str(len(devices)): round(together)}
            recorder.add(f"multi.scaling_{where}{variant}", together / alone, "ratio", samples, {"tokens_per_second": rates, **detail})


def _rate(run: TrainingRun, replicas: int, steps: int | None = None) -> float:
    """Tokens a second of all replicas together, over as many steps as take a few seconds, or ``steps``."""
    tokens, began = run.shape.B * run.shape.T, time.monotonic()
    run.train(steps or min(max(_FEWEST_STEPS, _TOKENS // tokens), _MOST_STEPS), replicas)
    print(f"{replicas} replicas: {1e3 * run.seconds_of_a_step(SETTLED):.1f} ms a step, {time.monotonic() - began:.1f} s", flush=True)
    return replicas * tokens / run.seconds_of_a_step(SETTLED)


def main(words: list[str] | None = None) -> int:
    """What ``measure_scaling`` starts."""
    parser = arguments(__doc__ or "", [])
    parser.add_argument("--devices", type=lambda text: text.split(","), required=True, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--sync", required=True, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    options.device = options.devices[0]
    measure(recorder_for(options), SHAPES[options.shape], options.devices, options.steps, options.sync)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
