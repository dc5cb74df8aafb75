"""What the benchmarks share: shapes, timing, and the writer of results.

Every measurement is one JSON line {name, value, unit, gpu, torch, commit, dirty, date, samples, detail}. A measurement whose line is already
in the results file for the same GPU and commit is skipped, so a run that was cut short goes on where it stopped. A variant that fails is
reported and passed over.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
RESULTS = Path(__file__).with_name("results.jsonl")


@dataclass(frozen=True)
class Shape:
    """Rows and drafter of one measurement. B rows, T row length, N anchors a row, S block size, H hidden, I MLP, V vocabulary."""

    name: str
    B: int
    T: int
    N: int = 512
    S: int = 16
    H: int = 4096
    I: int = 12_288  # noqa: E741
    V: int = 151_936
    layers: int = 5
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    chunk: int = 1024

    @property
    def Q(self) -> int:  # noqa: N802
        """Draft positions of a row."""
        return self.N * self.S

    @property
    def labelled(self) -> int:
        """Most labelled slots of all rows together: every slot but the anchors'."""
        return self.B * self.N * (self.S - 1)

    @property
    def flops(self) -> float:
        """Floating-point operations of the products of one training step: linears three times forward, vocabulary twice, attention left out."""
        context, block = self.B * self.T, self.B * self.Q
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = block * self.H * (2 * q + 3 * self.I) + (context + block) * self.H * 2 * kv
        drafter = 2 * 3 * (context * self.layers * self.H * self.H + self.layers * layer)
        return float(drafter + 2 * 2 * self.labelled * self.H * self.V)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("1x2048", 1, 2048),
        Shape("4x3072", 4, 3072),
        Shape("1x16384", 1, 16_384, N=2048),
        Shape("tiny", 1, 96, N=8, S=4, H=64, I=96, V=256, layers=2, heads=4, kv_heads=2, head_dim=16, chunk=16),
    )
}


class Recorder:
    """Appends results to a file and knows which ones are there already."""

    def __init__(self, path: Path, device: torch.device, commit: str, dirty: bool, again: bool = False):
        self.path, self.device = path, device
        self.gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        self.commit, self.dirty = commit, dirty
        self.failures: list[str] = []
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() and not again else []
        records = [json.loads(line) for line in lines]
        self._done = {record["name"] for record in records if record["gpu"] == self.gpu and record["commit"] == commit and record["dirty"] == dirty}

    def add(self, name: str, value: float, unit: str, samples: int, detail: dict[str, Any] | None = None) -> None:
        """Append one result and print it."""
        record = {
            "name": name,
            "value": round(float(value), 5),
            "unit": unit,
            "gpu": self.gpu,
            "torch": torch.__version__,
            "commit": self.commit,
            "dirty": self.dirty,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "samples": samples,
            "detail": detail or {},
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        print(f"{name:58s} {value:12.4f} {unit:8s} {json.dumps(record['detail'])}", flush=True)

    def measure(
        self, name: str, function: Callable[[], object], *, repeats: int = 20, setup: Callable[[], object] | None = None, ahead_ms: float = 0,
        **detail: Any,
    ) -> float | None:  # fmt: skip
        """Median milliseconds of ``function``, recorded under ``name``; None where it was there already or the function failed."""

        def timed() -> float:
            samples = time_ms(function, self.device, repeats=repeats, setup=setup, ahead_ms=ahead_ms)
            median = statistics.median(samples)
            self.add(name, median, "ms", len(samples), {"min": round(min(samples), 4), "max": round(max(samples), 4), **detail})
            return median

        return self.attempt(name, timed)

    def attempt(self, name: str, function: Callable[[], Result]) -> Result | None:
        """Run one variant unless its result is there; a failure is printed and does not stop the others."""
        if name in self._done:
            print(f"{name:58s} already measured", flush=True)
            return None
        try:
            return function()
        except Exception:
            self.failures.append(name)
            print(f"{name:58s} FAILED\n{traceback.format_exc(limit=-2)[-800:]}", flush=True)
            return None


def time_ms(
    function: Callable[[], object], device: torch.device, *, repeats: int, setup: Callable[[], object] | None = None, ahead_ms: float = 0
) -> list[float]:
    """Milliseconds of each of ``repeats`` calls after three to warm up, in device time, without the ``setup`` before each.

    Away from CUDA two calls after one, by the clock on the wall.

    Args:
        ahead_ms: the device sleeps so long first, while the host launches. Where the host takes longer to launch than the device to run, it is
            the host that is timed otherwise. Calls should be few kernels: a device takes in about a thousand before the host has to wait.
    """
    if device.type != "cuda":
        return [_wall_ms(function, setup) for _ in range(3)][1:]
    if ahead_ms:
        function()
        torch.cuda._sleep(round(ahead_ms * 2e6))  # cycles; an H200 has about two million in a millisecond
    events = []
    for _ in range(3 + repeats):
        if setup is not None:
            setup()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events[3:]]


def _wall_ms(function: Callable[[], object], setup: Callable[[], object] | None) -> float:
    if setup is not None:
        setup()
    began = time.perf_counter()
    function()
    return (time.perf_counter() - began) * 1e3


def triton_runs(device: torch.device) -> bool:
    """Triton kernels run on CUDA, and anywhere in the interpreter."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def matmul_ceiling(recorder: Recorder, size: int = 8192) -> float:
    """TFLOP/s of a square bf16 product on random data, measured in this process: the ceiling that shares are stated of."""
    a, b = (torch.randn(size, size, device=recorder.device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    samples = time_ms(lambda: torch.mm(a, b, out=out), recorder.device, repeats=30)
    rate = 2 * size**3 / statistics.median(samples) / 1e9
    recorder.add("ceiling.bf16", rate, "TFLOP/s", len(samples), {"size": size})
    return rate


def anchors_of(shape: Shape, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random ascending anchors [B, N] and document ids [B, T] of rows that are one supervised document each."""
    from dflash_core.drafter import sample_anchors

    documents_BT = torch.zeros(shape.B, shape.T, dtype=torch.int32)
    mask_BT = torch.ones(shape.B, shape.T, dtype=torch.bool)
    draws = [sample_anchors(mask_BT[b], documents_BT[b], shape.N, torch.Generator().manual_seed(seed + b)) for b in range(shape.B)]
    return torch.stack(draws).to(device), documents_BT.to(device)


def arguments(description: str, sections: Iterable[str]) -> argparse.ArgumentParser:
    """The command line that all benchmarks share."""
    names = list(sections)
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--sections", nargs="*", default=names, choices=names, help="what to measure")
    parser.add_argument("--shape", default="1x2048", choices=list(SHAPES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--results", type=Path, default=RESULTS, help="JSON lines are appended here")
    parser.add_argument("--commit", help="commit of the code, where there is no git to ask")
    parser.add_argument("--dirty", action="store_true", help="the code differs from --commit")
    parser.add_argument("--again", action="store_true", help="measure also what the results file has already")
    return parser


def recorder_for(options: argparse.Namespace) -> Recorder:
    """The recorder that the command line describes."""
    commit, dirty = (options.commit, options.dirty) if options.commit else _git_state()
    return Recorder(options.results, torch.device(options.device), commit, dirty, options.again)


def _git_state() -> tuple[str, bool]:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=RESULTS.parent, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.CalledProcessError):
        return "unknown", True
