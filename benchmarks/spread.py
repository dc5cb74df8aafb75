"""A target spread over two GPUs as a pipeline of batches, against the same target on one: random weights of Qwen3-8B's size, made there.

python -m benchmarks.spread                                    about 60 s on two GPUs; writes nothing but its results
python -m benchmarks.spread --sections tiny --device cpu

``spread.speedup`` is tokens a second of two GPUs with two threads, over those of one GPU; 2 would be perfect. Beside it ``one_thread``: the same two
GPUs with one batch at a time, which a pipeline must beat. Features of both are compared bit for bit before anything is timed.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.common import Recorder, arguments, recorder_for
from benchmarks.extract import CASES, Case, RandomSamples, random_target
from dflash_core.drafter import default_tap_layers
from dflash_core.shards.extract import batches
from dflash_core.target import TargetModel
from dflash_core.target.spread import divide
from dflash_core.target.structure import find_structure

_SIZES = ("qwen3-8b", "tiny")


def spread_over(target: TargetModel, devices: Sequence[str]) -> TargetModel:
    """The same weights with the later layers moved to the second device; ``target`` is of no use after that."""
    model = target._model
    structure = find_structure(model)
    first_layers = divide([sum(part.numel() for part in layer.parameters()) for layer in structure.layers], len(devices))
    for layer in structure.layers[first_layers[1] :]:
        layer.to(devices[1])
    getattr(structure.decoder, structure.norm_name).to(devices[1])
    structure.head.to(devices[1])
    return TargetModel(model, None, target.info, devices, first_layers)


def seconds_of(target: TargetModel, work: Sequence[list[torch.Tensor]], taps: Sequence[int], threads: int) -> float:
    """Time of all batches, dealt out to so many threads as they come for them."""
    left, turn = iter(work), threading.Lock()

    def run() -> None:
        while True:
            with turn:
                documents = next(left, None)
            if documents is None:
                break
            target.packed_hidden_states(documents, taps)
            if target.device.type == "cuda":
                torch.cuda.current_stream(target.devices[-1]).synchronize()

    workers = [threading.Thread(target=run) for _ in range(threads)]
    began = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for device in {*target.devices} if target.device.type == "cuda" else ():
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def measure(recorder: Recorder, name: str, case: Case) -> None:
    """One GPU, then two with one thread, then two with two."""
    devices = ("cuda:0", "cuda:1") if recorder.device.type == "cuda" else ("cpu", "cpu")
    target, info = random_target(case, torch.device(devices[0]))
    taps = default_tap_layers(info.num_layers, case.taps)
    samples: Any = RandomSamples(case.tokens, info.vocab_size)
    lengths, total = samples.lengths.tolist(), int(samples.lengths.sum())
    work = [[torch.tensor(samples.tokens(i)) for i in batch] for batch in batches(lengths, range(len(samples)), case.batch_tokens)]
    wanted = target.packed_hidden_states(work[-1], taps).cpu()
    seconds_of(target, work[:2], taps, 1)
    one = total / seconds_of(target, work, taps, 1)
    spread = spread_over(target, devices)
    del target
    if not torch.equal(spread.packed_hidden_states(work[-1], taps).cpu(), wanted):
        raise AssertionError("features of the spread target differ from those of one device")
    seconds_of(spread, work[:4], taps, 2)
    alone, both = (total / seconds_of(spread, work, taps, threads) for threads in (1, 2))
    detail = {"one_device": round(one), "one_thread": round(alone), "two_threads": round(both), "tokens": total, "batches": len(work)}
    recorder.add("spread.speedup" + ("" if name == "qwen3-8b" else f".{name}"), both / one, "times", 1, detail)


def main(words: list[str] | None = None) -> int:
    """Measure what the command line asks for; 1 if anything failed."""
    parser = arguments(__doc__ or "", _SIZES)
    parser.set_defaults(sections=["qwen3-8b"])
    options = parser.parse_args(words)
    recorder = recorder_for(options)
    for name in options.sections:
        recorder.attempt(f"spread.speedup.{name}", functools.partial(measure, recorder, name, CASES[name]))
    return int(bool(recorder.failures))


if __name__ == "__main__":
    sys.exit(main())
