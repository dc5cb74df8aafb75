"""Hidden states at the speed of the chip: random targets on one GPU, made there, on packed samples of the lengths of a chat mix.

python -m benchmarks.extract                                   about 60 s on one GPU; writes up to 15 GB and removes them
python -m benchmarks.extract --sections tiny --device cpu

For each target, all that the product does, a synchronised disk included (``extract.tok_s.<target>``), and the same without its writers
(``extract.tok_s.<target>.passes``), of which the share of the ceiling is stated (``extract.ceiling_share.<target>``). The names of Qwen3-8B's
have no ``<target>``. Operations are those of the layers that run: the linear ones, and attention within each sample.
``extract.packed_error`` compares packed features with those of each sample alone by the target's own code, and ``padded`` beside it those of a
padded batch: what bfloat16 alone makes of the order of sums.
"""

from __future__ import annotations

import argparse
import functools
import gc
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import SHAPES, Recorder, arguments, matmul_ceiling, recorder_for, time_ms
from benchmarks.engine import chat_lengths, target_info
from dflash_core.config import ExtractionConfig
from dflash_core.drafter import default_tap_layers
from dflash_core.shards import ShardCard, extract
from dflash_core.shards.columns import card_of, stored_columns
from dflash_core.shards.extract import batches
from dflash_core.shards.overlap import SLOTS, Slot
from dflash_core.target import TargetInfo, TargetModel


@dataclass(frozen=True)
class Case:
    """A target and how much of it is measured. ``arguments`` are of its Transformers configuration; about ``tokens`` tokens are extracted."""

    family: str
    arguments: dict[str, Any]
    taps: int
    batch_tokens: int
    tokens: int


CASES = {
    "qwen3-8b": Case(
        "qwen3",
        {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
         "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": False, "max_position_embeddings": 40_960},
        taps=5, batch_tokens=32_768, tokens=400_000,
    ),
    "smollm2-135m": Case(
        "llama",
        {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
         "head_dim": 64, "vocab_size": 49_152, "tie_word_embeddings": True, "max_position_embeddings": 8192},
        taps=5, batch_tokens=65_536, tokens=2_500_000,
    ),
    "tiny": Case(
        "qwen3",
        {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 16, "vocab_size": 256, "tie_word_embeddings": False, "max_position_embeddings": 4096},
        taps=2, batch_tokens=2048, tokens=4_000,
    ),
}  # fmt: skip


class RandomSamples:
    """Random tokens in samples of the lengths of a chat mix; the first quarter of each is a prompt."""

    def __init__(self, tokens: int, vocabulary: int):
        lengths = chat_lengths(3072, 2 + tokens // 300)
        self.lengths = lengths[: int(np.searchsorted(lengths.cumsum(), tokens)) + 1]
        self.digest = "random"
        self._pool = np.random.default_rng(0).integers(0, vocabulary, 2**16 + 3072).astype(np.int32)

    def __len__(self) -> int:
        return len(self.lengths)

    def id(self, i: int) -> str:
        return f"sample {i}"

    def tokens(self, i: int) -> np.ndarray:
        start = i * 97 % 2**16
        return self._pool[start : start + self.lengths[i]]

    def loss_mask(self, i: int) -> np.ndarray:
        return np.arange(self.lengths[i]) >= self.lengths[i] // 4


def random_target(case: Case, device: torch.device) -> tuple[TargetModel, TargetInfo]:
    """A target with random weights in bfloat16, made on the device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(case.family, **case.arguments)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    own = {name: case.arguments[name] for name in ("hidden_size", "intermediate_size", "head_dim", "vocab_size", "tie_word_embeddings")}
    info = replace(target_info(SHAPES["tiny"]), num_layers=config.num_hidden_layers, num_heads=config.num_attention_heads,
                   num_kv_heads=config.num_key_value_heads, **own)  # fmt: skip
    return TargetModel(model, None, info), info


def suffix_of(name: str) -> str:
    """What the names of a target's results end with."""
    return "" if name == "qwen3-8b" else f".{name}"


def operations(case: Case, lengths: Sequence[int], layers: int) -> float:
    """Floating-point operations of some layers on samples of these lengths."""
    a = case.arguments
    q, kv = a["num_attention_heads"] * a["head_dim"], a["num_key_value_heads"] * a["head_dim"]
    linear = 2 * a["hidden_size"] * (2 * q + 2 * kv + 3 * a["intermediate_size"])
    tokens = np.asarray(lengths, dtype=np.float64)
    return float(layers * (linear * tokens.sum() + 4 * q * (tokens * (tokens + 1) / 2).sum()))


def measure(recorder: Recorder, name: str, case: Case, ceiling: float, options: argparse.Namespace) -> None:
    """Speed of one target without and with its disk."""
    suffix = suffix_of(name)
    began = time.monotonic()
    target, info = random_target(case, recorder.device)
    taps = default_tap_layers(info.num_layers, case.taps)
    samples: Any = RandomSamples(case.tokens, info.vocab_size)
    lengths, total = samples.lengths.tolist(), int(samples.lengths.sum())
    config = ExtractionConfig(batch_tokens=case.batch_tokens)
    card = card_of(config, info, samples, taps, "bfloat16", 1)
    run = functools.partial(target.packed_hidden_states, tap_layers=taps)
    work = [batch for shard in range(card.num_shards) for batch in batches(lengths, card.samples_of(shard), case.batch_tokens)]
    check_packed(recorder, name, target, taps, samples)
    slots = [Slot(max(case.batch_tokens, *lengths)) for _ in range(SLOTS)]
    passes(run, card, samples, work[:2] + work[-2:], slots)
    print(f"{name}: {total} tokens in {len(samples)} samples, {len(work)} passes, ready after {time.monotonic() - began:.1f} s", flush=True)
    seconds = passes(run, card, samples, work, slots)
    del slots
    rate = operations(case, lengths, max(taps) + 1) / seconds / 1e12
    detail = {
        "tflops": round(rate, 1), "ceiling": round(ceiling, 1), "seconds": round(seconds, 3), "tokens": total, "layers": max(taps) + 1,
        "tflop_linear_share": round(operations(case, [1] * total, max(taps) + 1) / operations(case, lengths, max(taps) + 1), 4),
    }  # fmt: skip
    if recorder.device.type == "cuda":
        detail["sustained"] = round(sustained(recorder.device), 1)
        detail["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    recorder.add(f"extract.ceiling_share{suffix}", rate / ceiling, "share", 1, detail)
    recorder.add(f"extract.tok_s{suffix}.passes", total / seconds, "tok/s", 1, {"batch_tokens": case.batch_tokens})
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        began = time.monotonic()
        config = config.model_copy(update={"samples_per_shard": 64})  # of some gigabytes, for Qwen3-8B
        counts = extract(config, info, [run], samples, Path(folder), tap_layers=taps, target_dtype="bfloat16", code_version=1, progress=show)
        seconds = time.monotonic() - began
        names = ("bytes", "bytes_per_token", "shards", "waited_for_disk_s", "waited_for_target_s")
        detail = {**{key: counts[key] for key in names}, "seconds": round(seconds, 2), "gb_s": round(counts["bytes"] / seconds / 1e9, 3)}
        recorder.add(f"extract.tok_s{suffix}", total / seconds, "tok/s", 1, detail)
    if recorder.device.type == "cuda":
        spent = kernels(run, samples, work[0])
        recorder.add(f"extract.kernels_ms{suffix}", spent.pop("all"), "ms", 1, spent)


def passes(run: Any, card: ShardCard, samples: Any, work: Sequence[list[int]], slots: Sequence[Slot]) -> float:
    """Seconds of the target's passes over some batches, with the copies into pinned memory and nothing written."""
    if card.num_samples and torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    for number, batch in enumerate(work):
        slot = slots[number % len(slots)]
        if number >= len(slots):
            slot.values()
        slot.fill(stored_columns(card, run([torch.tensor(samples.tokens(i), dtype=torch.int32) for i in batch]), int(samples.lengths[batch].sum())))
    for slot in slots[: len(work)]:
        slot.values()
    return time.perf_counter() - began


def check_packed(recorder: Recorder, name: str, target: TargetModel, taps: Sequence[int], samples: Any) -> None:
    """Relative distance of packed features from those of each sample alone, by the target's own code; ``padded``: of a padded batch."""
    documents = [torch.tensor(samples.tokens(i)[:length], dtype=torch.int32) for i, length in enumerate((300, 41, 300, 7))]
    alone = torch.cat([target.hidden_states(ids.long()[None], None, taps)[0] for ids in documents]).float()
    ids_BT = torch.nn.utils.rnn.pad_sequence([ids.long() for ids in documents], batch_first=True)
    mask_BT = torch.arange(ids_BT.shape[1]) < torch.tensor([len(ids) for ids in documents])[:, None]
    padded_BTF = target.hidden_states(ids_BT, mask_BT, taps).float()
    padded = torch.cat([padded_BTF[row, : len(ids)] for row, ids in enumerate(documents)])
    packed = target.packed_hidden_states(documents, taps).float()
    noise = float((padded - alone).norm() / alone.norm())
    recorder.add(f"extract.packed_error{suffix_of(name)}", float((packed - alone).norm() / alone.norm()), "relative", 1, {"padded": round(noise, 5)})


def sustained(device: torch.device, size: int = 8192, repeats: int = 1400) -> float:
    """TFLOP/s of the ceiling's product over some two seconds: what the chip keeps up, where the ceiling is a burst."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    milliseconds = time_ms(lambda: torch.mm(a, b, out=out), device, repeats=repeats)
    return 2 * size**3 * len(milliseconds) / sum(milliseconds) / 1e9


def kernels(run: Any, samples: Any, batch: list[int]) -> dict[str, float]:
    """Milliseconds of the kernels that take most of the device's time in one pass, by the beginning of their names."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    with torch_profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run([torch.tensor(samples.tokens(i), dtype=torch.int32) for i in batch])
        torch.cuda.synchronize()
    spent = sorted(((item.self_device_time_total / 1e3, item.key) for item in profiler.key_averages()), reverse=True)
    return {"all": round(sum(ms for ms, _ in spent), 2), **{name[:60]: round(ms, 2) for ms, name in spent[:16]}}


def show(done: int, total: int, unit: str) -> None:
    """A line of progress every second."""
    if time.monotonic() - show.last > 1.0:  # type: ignore[attr-defined]
        show.last = time.monotonic()  # type: ignore[attr-defined]
        print(f"  {done:,} of {total:,} {unit}", flush=True)


show.last = 0.0  # type: ignore[attr-defined]


def main(words: list[str] | None = None) -> int:
    """Measure what the command line asks for; 1 if anything failed."""
    parser = arguments(__doc__ or "", CASES)
    parser.set_defaults(sections=["qwen3-8b", "smollm2-135m"])
    parser.add_argument("--folder", type=Path, help="where shards are written; default: the system's folder for temporary files")
    options = parser.parse_args(words)
    recorder = recorder_for(options)
    ceiling = matmul_ceiling(recorder, 8192 if recorder.device.type == "cuda" else 256)
    for name in options.sections:
        recorder.attempt(f"extract.ceiling_share{suffix_of(name)}", functools.partial(measure, recorder, name, CASES[name], ceiling, options))
        gc.collect()
        if recorder.device.type == "cuda":
            torch.cuda.empty_cache()
    return int(bool(recorder.failures))


if __name__ == "__main__":
    sys.exit(main())
