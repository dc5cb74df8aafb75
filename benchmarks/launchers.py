"""Training of one process for each GPU, under torchrun: the tokens a second that ``benchmarks.flatness --sections scaling`` has for threads.

torchrun --nproc-per-node 2 -m benchmarks.launchers                                          about 100 s with cold caches
torchrun --nproc-per-node 2 -m benchmarks.launchers --device cpu --shapes tiny --steps 8

All processes train the same drafter together; the first one records.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from benchmarks.common import SHAPES, Recorder, Shape, arguments, recorder_for
from benchmarks.engine import TrainingRun
from dflash_core.training import Ranks, this_rank

SETTLED = 10  # steps before which nothing counts


def measure(recorder: Recorder, shape: Shape, ranks: Ranks, device: str, steps: int, name: str, training: dict[str, Any]) -> None:
    """Tokens a second of all processes together."""
    devices = [f"{device}:{rank}" if device == "cuda" else device for rank in range(ranks.size)]
    with TrainingRun(shape, devices, steps, launcher="torchrun", **training) as run:
        warm_up_s = run.report.seconds
        run.train()
        if ranks.rank == 0:
            rate = ranks.size * shape.B * shape.T / run.seconds_of_a_step(SETTLED)
            record = run.records[-1]
            waits = {key: round(record[key], 4) for key in ("data_wait_share", "sync_share") if key in record}
            recorder.add(name, rate, "tok/s", steps - SETTLED, {"devices": devices, "warm_up_s": round(warm_up_s, 1), **waits, **training})


def main(words: list[str] | None = None) -> int:
    """Measure the chosen shapes; 1 if anything failed."""
    parser = arguments(__doc__ or "", [])
    parser.add_argument("--shapes", nargs="*", default=["1x2048", "4x3072"], choices=list(SHAPES), help="rows of the training")
    parser.add_argument("--steps", type=int, default=50, help="steps of each training")
    parser.add_argument("--no-graphs", action="store_true", help="launch every kernel by itself instead of CUDA graphs")
    parser.add_argument("--sync", default="all_reduce", choices=["all_reduce", "sharded"], help="training.sync")
    parser.add_argument("--compile", default="on", choices=["on", "off"], help="training.compile")
    options = parser.parse_args(words)
    ranks = this_rank()
    if ranks is None:
        parser.error("start it with torchrun")
    device = "cuda" if options.device.startswith("cuda") else "cpu"
    graphs = device == "cuda" and not options.no_graphs
    recorder = recorder_for(options)
    for shape in options.shapes:
        name = f"multi.torchrun_{ranks.size}gpu_{shape}" + ("" if options.sync == "all_reduce" else f".{options.sync}")
        name += "" if graphs or device == "cpu" else ".no_graphs"
        training = {"cuda_graphs": graphs, "compile": options.compile, "sync": options.sync}
        recorder.attempt(name, partial(measure, recorder, SHAPES[shape], ranks, device, options.steps, name, training))
    ranks.leave()
    return int(bool(recorder.failures))


if __name__ == "__main__":
    status = main()
    os._exit(status)  # NCCL's own threads need not be waited for
