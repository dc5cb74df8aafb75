"""Does training in threads survive? Fresh processes with cold caches train four compiled replicas in four threads that start 0.4 s apart.

python -m benchmarks.threads                                        20 warmed processes and 6 controls, on one GPU
python -m benchmarks.threads --processes 1 --controls 1 --device cpu --steps 4 --limit-s 600

The warmed ones run the product: warm-up on the main thread, then the trainer with its guard. The controls run the same with the warm-up left out
and the guard off, so that every thread compiles for itself; they are expected to crash or hang, or else the test shows nothing.
One more process trains with ``training.cuda_graphs`` and times the host's share of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.common import Recorder, Shape, arguments, recorder_for
from benchmarks.engine import StaggeredRows, TrainingRun
from dflash_core.errors import LateCompilationError
from dflash_core.training.guard import compiled_graphs
from dflash_core.training.replica import Replica

SHAPE = Shape("threads", 1, 256, N=32, S=8, H=256, I=512, V=2048, layers=1, heads=4, kv_heads=2, head_dim=64, chunk=256)
PAUSE_S = 0.4
KINDS = ("warmed", "control", "graphs")
_ANSWER = "ANSWER "


def measure_threads(recorder: Recorder, options: argparse.Namespace) -> None:
    """Run all processes, ``options.jobs`` at a time, and record how they ended."""
    kinds = ["graphs"] * (recorder.device.type == "cuda") + ["control"] * options.controls + ["warmed"] * options.processes
    began = time.monotonic()

    def one(kind: str) -> dict[str, Any]:
        if time.monotonic() - began > options.deadline_s:
            return {"kind": kind, "outcome": "not run"}
        answer = {"kind": kind, **_process(kind, options)}
        print(json.dumps(answer)[:400], flush=True)
        return answer

    with ThreadPoolExecutor(options.jobs) as pool:
        answers = [answer for answer in pool.map(one, kinds) if answer["outcome"] != "not run"]
    recorder.failures += [f"a {answer['kind']} process: {answer['error']}" for answer in answers if answer["outcome"] == "broken"]
    by_kind = {kind: [answer for answer in answers if answer["kind"] == kind] for kind in KINDS}
    if warmed := by_kind["warmed"]:
        failed = [answer for answer in warmed if answer["outcome"] != "trained"]
        detail = {
            "outcomes": Counter(answer["outcome"] for answer in warmed), "errors": sorted({answer["error"][:200] for answer in failed}),
            "warm_up_s": _median(warmed, "warm_up_s"), "training_s": _median(warmed, "training_s"), "steps": options.steps,
        }  # fmt: skip
        recorder.add("threads.failures", len(failed), "processes", len(warmed), detail)
        recorder.add("threads.late_compiles", sum(answer.get("late_compiles", 0) for answer in warmed), "graphs", len(warmed))
        if len(failed) < len(warmed):
            recorder.add("threads.host_ms.compiled", _median(warmed, "host_ms"), "ms", len(warmed))
    if controls := by_kind["control"]:
        failed = [answer for answer in controls if answer["outcome"] not in ("trained", "broken")]
        errors = Counter(answer["error"][:160] for answer in failed)
        detail = {"outcomes": Counter(answer["outcome"] for answer in controls), "errors": errors, "limit_s": options.limit_s}
        recorder.add("threads.control_failures", len(failed), "processes", len(controls), detail)
    for answer in by_kind["graphs"]:
        if answer["outcome"] != "trained":
            recorder.failures.append("threads.host_ms")
            print(f"threads.host_ms FAILED: {answer}")
        else:
            recorder.add("threads.host_ms", answer["host_ms"], "ms", answer["host_samples"], {"replicas": options.replicas, **answer})


def _median(answers: list[dict[str, Any]], name: str) -> float:
    return round(statistics.median([answer[name] for answer in answers if name in answer] or [0.0]), 3)


def _process(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """One fresh process with empty caches; killed after ``options.limit_s``."""
    command = [sys.executable, "-m", "benchmarks.threads", "--child", kind, "--device", options.device]
    command += ["--steps", str(options.steps), "--replicas", str(options.replicas)]
    with tempfile.TemporaryDirectory() as caches:
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton", "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
        try:
            output, _ = process.communicate(timeout=options.limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return {"outcome": "hung", "error": f"killed after {options.limit_s:g} s"}
    answers = [line.removeprefix(_ANSWER) for line in output.splitlines() if line.startswith(_ANSWER)]
    if not answers:
        # a signal is the product's; an exception outside of training is this script's own
        return {"outcome": "died" if process.returncode < 0 else "broken", "error": " ".join(output.split())[-300:]}
    answer: dict[str, Any] = json.loads(answers[-1])
    return answer


def child(kind: str, device: str, replicas: int, steps: int) -> dict[str, Any]:
    """Train in this process; what came of it."""
    devices = [f"{device}:0" if device == "cuda" else device] * replicas
    training = {"cuda_graphs": kind == "graphs"}
    host = HostTime()
    began = time.monotonic()
    with _unwarmed() if kind == "control" else nullcontext():
        source = StaggeredRows(SHAPE, SHAPE.layers * SHAPE.H, PAUSE_S)
        run = TrainingRun(SHAPE, devices, steps, source=source, compare_replicas_every=10, **training)
        warmed, graphs = time.monotonic(), compiled_graphs()
        try:
            with host.measured():
                run.train()
        except Exception as error:
            outcome = "compiled late" if isinstance(error, LateCompilationError) else "crashed"
            message = f"{type(error).__name__}: {' '.join(str(error).split())}"
            return {"outcome": outcome, "error": message, "late_compiles": compiled_graphs() - graphs}
    milliseconds = host.milliseconds_of_a_step(skip=3 * replicas)
    return {
        "outcome": "trained", "error": "", "late_compiles": compiled_graphs() - graphs, "warm_up_s": round(warmed - began, 2),
        "training_s": round(time.monotonic() - warmed, 2), "host_ms": round(statistics.median(milliseconds), 3), "host_samples": len(milliseconds),
        "host_ms_max": round(max(milliseconds), 3),
    }  # fmt: skip


class HostTime:
    """How long the workers' threads are in what computes a step, without waiting for rows, for each other or for the device."""

    PARTS = ("begin_step", "micro_step", "close_step", "apply")

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # of the step under way, by thread
        self._steps: list[float] = []

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Times the parts of every step of every replica of the process."""
        with mock.patch.multiple(Replica, **{name: self._timed(name, getattr(Replica, name)) for name in self.PARTS}):
            yield

    def _timed(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            thread, began = threading.get_ident(), time.perf_counter()
            result = original(*arguments)
            self._seconds[thread] = self._seconds.get(thread, 0.0) + time.perf_counter() - began
            if name == self.PARTS[-1]:
                self._steps.append(self._seconds.pop(thread))
            return result

        return timed

    def milliseconds_of_a_step(self, skip: int) -> list[float]:
        """Of each step of each replica but the first ``skip``, or the first half if they are fewer."""
        return [1e3 * seconds for seconds in self._steps[min(skip, len(self._steps) // 2) :]]


class _NoGuard:
    """In the place of the guard: lets everything compile."""

    def __enter__(self) -> _NoGuard:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def explained(self) -> nullcontext[None]:
        return nullcontext()


@contextmanager
def _unwarmed() -> Iterator[None]:
    def skip(replica: Replica, rows: list[Any]) -> None:
        if replica.device.type == "cuda":
            torch.cuda.synchronize(replica.device)

    with mock.patch.object(Replica, "warm_up", skip), mock.patch("dflash_core.training.trainer.CompileGuard", _NoGuard):
        yield


def main(words: list[str] | None = None) -> int:
    """Measure; 1 if a warmed process failed."""
    parser = arguments(__doc__ or "", [])
    parser.add_argument("--processes", type=int, default=20, help="warmed processes")
    parser.add_argument("--controls", type=int, default=6, help="processes that skip the warm-up")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) * 3 // 4), help="processes at a time")
    parser.add_argument("--replicas", type=int, default=4, help="threads of a process, all on one device")
    parser.add_argument("--steps", type=int, default=40, help="steps of a process")
    parser.add_argument("--limit-s", type=float, default=110.0, help="seconds after which a process is killed and counts as hung")
    parser.add_argument("--deadline-s", type=float, default=1e9, help="seconds after which no further process is started")
    parser.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.child:
        sys.path.insert(0, str(Path.cwd()))
        answer = child(options.child, options.device, options.replicas, options.steps)
        print(_ANSWER + json.dumps(answer), flush=True)
        os._exit(0)  # threads that hang would keep the process
    recorder = recorder_for(options)
    recorder.attempt("threads.failures", lambda: measure_threads(recorder, options))
    if recorder.failures:
        print("failed: " + "; ".join(recorder.failures))
    return int(bool(recorder.failures))


if __name__ == "__main__":
    raise SystemExit(main())
