"""How much faster is a second start? Two fresh processes warm up one after the other, with one cache folder that is empty at first.

python -m benchmarks.starts                                     about 80 s on one GPU
python -m benchmarks.starts --shape tiny --device cpu
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.common import SHAPES, Recorder, arguments, recorder_for
from benchmarks.engine import TrainingRun

_ANSWER = "ANSWER "


def measure_starts(recorder: Recorder, options: argparse.Namespace) -> None:
    """Seconds of the replicas' warm-up in both processes, and their ratio."""
    with tempfile.TemporaryDirectory() as cache:
        first, second = (_start(cache, options) for _ in range(2))
    detail = {"first": first, "second": second, "shape": options.shape}
    recorder.add("warmup.second_start_ratio", first["replicas_s"] / second["replicas_s"], "ratio", 1, detail)


def _start(cache: str, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.starts", "--child", "--shape", options.shape, "--device", options.device]
    environment = {name: value for name, value in os.environ.items() if name not in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    began = time.monotonic()
    done = subprocess.run(command, env={**environment, "DFLASH_CACHE": cache}, stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith(_ANSWER)).removeprefix(_ANSWER))
    print(answer, flush=True)
    return {**answer, "process_s": round(time.monotonic() - began, 2)}


def _child(options: argparse.Namespace) -> None:
    device = "cuda:0" if options.device == "cuda" else options.device
    with TrainingRun(SHAPES[options.shape], [device], 1) as run:
        seconds = sum(device.seconds for device in run.report.devices)
        print(_ANSWER + json.dumps({"replicas_s": round(seconds, 2), "warm_up_s": round(run.report.seconds, 2)}), flush=True)


def main(words: list[str] | None = None) -> int:
    """Measure; 1 if it failed."""
    parser = arguments(__doc__ or "", [])
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.child:
        _child(options)
        return 0
    recorder = recorder_for(options)
    recorder.attempt("warmup.second_start_ratio", lambda: measure_starts(recorder, options))
    return int(bool(recorder.failures))


if __name__ == "__main__":
    raise SystemExit(main())
