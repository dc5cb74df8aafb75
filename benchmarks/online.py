"""Training fed by a live target, at the size of Qwen3-8B and its drafter: tokens a second, who waits for whom, and how features travel.

python -m benchmarks.online                                        target on cuda:0, drafter on cuda:1; then both on cuda:1
python -m benchmarks.online --target cuda:0 --drafter cuda:0       one GPU
python -m benchmarks.online --shape tiny --device cpu --target cpu --drafter cpu --steps 8

The target has random weights, made on its GPU, and 36 layers, of which those up to the deepest tap run. Sections: ``apart`` target and drafter on the
devices that are named, ``together`` both on the drafter's. The same steps from rows on its device tell how fast the drafter is by itself,
and rows without a drafter how fast the target is.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.common import SHAPES, Recorder, Shape, arguments, recorder_for
from benchmarks.engine import SEED, PackedRows, TrainingRun, chat_lengths, target_info, training_config
from dflash_core.config import PipelineConfig
from dflash_core.drafter import default_tap_layers
from dflash_core.feed import LiveSamples, Loader, Row, loaders_of, target_loaders
from dflash_core.target import TargetInfo, TargetModel

SETTLED = 10  # steps before which nothing counts
LAYERS = 36


class RandomSamples:
    """Tokens of no meaning in samples of the lengths of a chat mix, prompt and response."""

    def __init__(self, shape: Shape):
        self.lengths = chat_lengths(shape.T)
        self.digest = "random"
        self._vocabulary = shape.V

    def __len__(self) -> int:
        return len(self.lengths)

    def id(self, index: int) -> str:
        return f"sample {index}"

    def tokens(self, index: int) -> np.ndarray:
        return np.random.default_rng([SEED, index]).integers(0, self._vocabulary, self.lengths[index]).astype(np.int32)

    def loss_mask(self, index: int) -> np.ndarray:
        return np.arange(self.lengths[index]) >= self.lengths[index] // 4


class RowsOnDevice:
    """A few rows whose features lie on the drafter's device, over and over: whoever trains on them waits for nothing."""

    def __init__(self, shape: Shape, feature_size: int, device: str):
        made = PackedRows(shape, feature_size)
        self._rows = [made.row(ordinal) for ordinal in range(8)]
        self._rows = [replace(row, features=row.features.to(device)) for row in self._rows]

    def rows_per_epoch(self, epoch: int) -> int:
        return len(self._rows)

    def row(self, ordinal: int) -> Row:
        return replace(self._rows[ordinal % len(self._rows)], ordinal=ordinal)


def random_target(shape: Shape, info: TargetInfo, device: str) -> TargetModel:
    """A target of the shape's dimensions, whose weights are drawn on the device: 8 billion of them take minutes on a processor."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=shape.V, hidden_size=shape.H, intermediate_size=shape.I, num_hidden_layers=info.num_layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, max_position_embeddings=info.max_position_embeddings, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(SEED)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32 if device == "cpu" else torch.bfloat16)
    return TargetModel(model, None, info)


def measure_online(recorder: Recorder, shape: Shape, target: str, drafter: str, steps: int, sections: list[str], training: dict[str, Any]) -> None:
    """One warm-up of the drafter; then trainings from memory, from the target on its own device, and from one on the drafter's."""
    began = time.monotonic()
    info = target_info(shape)
    taps = default_tap_layers(LAYERS, shape.layers)
    settings = training_config(shape, [drafter], steps, feed="online", target_devices=[target], **training)
    apart = _loaders(shape, info, target, settings, taps)
    made_s = time.monotonic() - began
    with TrainingRun(shape, [drafter], steps, loaders=apart, feed="online", target_devices=[target], **training) as run:
        warm_up_s = run.report.seconds
        run.train(loaders=loaders_of(RowsOnDevice(shape, len(taps) * shape.H, drafter)))
        alone = shape.B * shape.T / run.seconds_of_a_step(SETTLED)
        detail = {"drafter_alone_tok_s": round(alone), "target_made_s": round(made_s, 1), "warm_up_s": round(warm_up_s, 1), "taps": taps, **training}
        for name, device in (("apart", target), ("together", drafter)):
            if name in sections and (name == "apart" or target != drafter):
                loaders = apart if name == "apart" else _loaders(shape, info, device, settings, taps)
                suffix = "" if device != drafter else ".one_gpu"
                _measure(recorder, run, loaders, f"multi.online_tok_s{suffix}", {"target": device, "drafter": drafter, **detail})


def _loaders(shape: Shape, info: TargetInfo, device: str, settings: PipelineConfig, taps: tuple[int, ...]) -> list[Loader]:
    live = LiveSamples(RandomSamples(shape), lambda _: [random_target(shape, info, device)])  # type: ignore[arg-type]
    return target_loaders(live, settings, taps)


def _measure(recorder: Recorder, run: TrainingRun, loaders: list[Loader], name: str, detail: dict[str, Any]) -> None:
    shape, source = run.shape, loaders[0].source
    times = []
    for ordinal in range(8):
        began = time.monotonic()
        row = source.row(ordinal)
        times.append(time.monotonic() - began)
        if row.give_back is not None:
            row.give_back(None)
    run.train(loaders=loaders)
    records = run.records[SETTLED:]
    keys = ("data_wait_share", "source_wait_share", "feed_bottleneck", "queue_depth")
    means = {key: round(float(np.mean([record[key] for record in records])), 3) for key in keys}
    rate = shape.B * shape.T / run.seconds_of_a_step(SETTLED)
    one, other = torch.device(detail["target"]), torch.device(detail["drafter"])
    copy = "on one device" if one == other else "peer to peer" if torch.cuda.can_device_access_peer(other, one) else "through the driver"
    growth = {key: records[-1][key] - records[0][key] for key in records[0] if key.startswith("memory_reserved")}
    target_alone = shape.T / float(np.median(times[2:]))
    detail |= {**means, "queue_rows": run.config.training.queue_rows, "target_alone_tok_s": round(target_alone), "copy": copy, "grown": growth}
    recorder.add(name, rate, "tok/s", len(records), {**detail, "share_of_drafter_alone": round(rate / detail["drafter_alone_tok_s"], 3)})


def main(words: list[str] | None = None) -> int:
    """Measure the chosen sections; 1 if anything failed."""
    parser = arguments(__doc__ or "", ["apart", "together"])
    parser.add_argument("--target", default="cuda:0", help="device of the target")
    parser.add_argument("--drafter", default="cuda:1", help="device of the drafter")
    parser.add_argument("--steps", type=int, default=60, help="steps of each training")
    parser.add_argument("--no-graphs", action="store_true", help="launch the drafter's kernels one by one, which takes Python's lock from the target")
    options = parser.parse_args(words)
    recorder, shape = recorder_for(options), SHAPES[options.shape]
    training = {"cuda_graphs": options.drafter != "cpu" and not options.no_graphs}
    name = "multi.online_tok_s" + (".one_gpu" if options.target == options.drafter else "")
    recorder.attempt(name, lambda: measure_online(recorder, shape, options.target, options.drafter, options.steps, options.sections, training))
    if recorder.failures:
        print("failed: " + ", ".join(recorder.failures))
    return int(bool(recorder.failures))


if __name__ == "__main__":
    raise SystemExit(main())
