"""Which block size decodes fastest, one request at a time, and where the time of a round goes. For the CPU first, where a wide pass costs more.

    python -m benchmarks.blocks --drafter FOLDER --device cpu --dtype bfloat16                # under two minutes on 16 cores
    python -m benchmarks.blocks --drafter FOLDER --device cpu --dtype float32 --sections parts

speed: every prompt is answered by the target alone and then with each block size, so that whatever slows the machine down slows all of them; both
sides have the same cache, products and (on CUDA) graphs. Appends ``blocks.<cpu or gpu>.<dtype>.<block>``: tokens a second over those of the
target alone. The detail has the same ratio of processor time, which is the one to believe with one thread on a machine that others use, too, how
many texts equal the target's own, seconds by stage, and the acceptance length. On a CPU ``speedup.cpu`` is the best of them, in bfloat16 on GSM8K;
``speedup.gpu`` is another thing, the speed as it is served, which ``benchmarks.drafter`` records.

parts (on a CPU): ``blocks.part.<part>.<dtype>.<width>``, median milliseconds of processor time of a pass of the target over so many tokens, of the
head alone, of the drafter's layers, and of what the drafter takes in; each in turn.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.common import Recorder, arguments, recorder_for
from dflash_core.config import TargetConfig
from dflash_core.data import render_prompt
from dflash_core.data.benchmarks import BENCHMARKS
from dflash_core.data.types import Message
from dflash_core.decoding import Generation, Room, measure_acceptance, open_decoder, open_verifier
from dflash_core.drafter import DFlashDrafter, load_checkpoint
from dflash_core.target import TargetModel, resolve_target

CONTEXT = 256
CALLS = 9


def main() -> None:
    parser = arguments(__doc__, ["speed", "parts"])
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--drafter", type=Path, required=True, help="folder of a checkpoint or an export")
    parser.add_argument("--set", default="gsm8k", choices=[name.removeprefix("builtin:") for name in BENCHMARKS], help="whose first prompts")
    parser.add_argument("--count", type=int, default=8, help="prompts")
    parser.add_argument("--new", type=int, default=64, help="tokens of an answer at most")
    parser.add_argument("--blocks", type=int, nargs="*", default=[4, 6, 8, 16])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    options = parser.parse_args()
    recorder = recorder_for(options)
    target = TargetModel.from_pretrained(resolve_target(TargetConfig(model=options.target)), dtype=options.dtype, device=options.device)
    drafter = load_checkpoint(options.drafter).to(target.device, target.dtype).eval()
    if "speed" in options.sections:
        measure_speed(recorder, target, drafter, read_set(target, options.set, options.count), options)
    if "parts" in options.sections and target.device.type == "cpu":
        measure_parts(recorder, target, drafter, [1, 2, *options.blocks], options.dtype)


def read_set(target: TargetModel, name: str, count: int) -> list[list[int]]:
    """The first prompts of a built-in set; of conversations the first turn."""
    rows = itertools.islice(BENCHMARKS[f"builtin:{name}"](), count)
    texts = [row["prompt"] if "prompt" in row else row["messages"][0]["content"] for row in rows]
    return [render_prompt(target.tokenizer, [Message("user", text)]) for text in texts]


def measure_speed(recorder: Recorder, target: TargetModel, drafter: DFlashDrafter, prompts: Sequence[list[int]], options: argparse.Namespace) -> None:
    """blocks.<cpu or gpu>.<dtype>.<block>, of other sets than GSM8K with the set behind"""
    longest, stops = max(map(len, prompts)), target.info.eos_token_ids
    verifier = open_verifier(target, Room(1, longest, options.new, max(options.blocks)))
    decoders = {}
    for block in (1, *options.blocks):
        room = Room(1, longest, options.new, block)
        decoders[block] = open_decoder(target, drafter if block > 1 else None, verifier, room, stop_ids=stops)
        decoders[block].generate([prompts[0]], most=2 * block)  # kernels, graphs and packed weights are nobody's time
    answers: dict[int, list[Generation]] = defaultdict(list)
    busy: dict[int, float] = defaultdict(float)
    for prompt in prompts:
        for block, decoder in decoders.items():
            began = time.process_time()
            answers[block] += decoder.generate([prompt])
            busy[block] += time.process_time() - began
    tokens = {block: sum(len(one.tokens) for one in found) for block, found in answers.items()}
    seconds = {block: sum(one.seconds for one in found) for block, found in answers.items()}
    device = "gpu" if target.device.type == "cuda" else "cpu"
    ratios = {block: tokens[block] / seconds[block] / (tokens[1] / seconds[1]) for block in options.blocks}
    for block, ratio in ratios.items():
        acceptance = measure_acceptance(answers[block], block)
        detail = {
            "set": options.set, "drafter": options.drafter.name, "threads": torch.get_num_threads(),
            "of_processor_time": round(tokens[block] / busy[block] / (tokens[1] / busy[1]), 3),
            "tau": round(acceptance.mean_of_requests, 3), "pooled": round(acceptance.pooled, 3),
            "tok_s": round(tokens[block] / seconds[block], 2), "alone_tok_s": round(tokens[1] / seconds[1], 2),
            "same_text": f"{sum(a.tokens == b.tokens for a, b in zip(answers[block], answers[1], strict=True))}/{len(prompts)}",
            **{f"{stage}_s": round(sum(getattr(one, f"{stage}_seconds") for one in answers[block]), 3) for stage in ("prefill", "draft", "verify")},
        }  # fmt: skip
        name = f"blocks.{device}.{options.dtype}.{block}" + (f".{options.set}" if options.set != "gsm8k" else "")
        recorder.add(name, ratio, "ratio", len(prompts), detail)
    if (device, options.dtype, options.set) == ("cpu", "bfloat16", "gsm8k"):
        fastest = max(ratios, key=ratios.__getitem__)
        recorder.add("speedup.cpu", ratios[fastest], "ratio", len(prompts), {"block_size": fastest, "threads": torch.get_num_threads()})


@torch.inference_mode()
def measure_parts(recorder: Recorder, target: TargetModel, drafter: DFlashDrafter, widths: Sequence[int], dtype: str) -> None:
    """blocks.part.<part>.<dtype>.<width>"""
    verifier = open_verifier(target, Room(1, CONTEXT, max(widths), max(widths)))
    cache, taps = drafter.new_cache(1, CONTEXT + max(widths)), drafter.config.tap_layers
    ids, start, zero = torch.randint(100, target.info.vocab_size, (1, CONTEXT)), torch.tensor([CONTEXT]), torch.tensor([0])
    features = verifier.prefill(ids, start, zero, taps).features
    assert features is not None
    drafter.read_context(features, zero, cache)
    for width in dict.fromkeys(widths):
        block, hidden = ids[:, :width].clone(), torch.randn(1, width, target.info.hidden_size, dtype=target.dtype)
        embeddings, committed = target.vocabulary.embed(block), features[:, :width].clone()
        parts: dict[str, Callable[[], object]] = {
            "pass": lambda block=block, width=width: verifier.forward(block, start, taps if width > 1 else None),  # type: ignore[misc]
            "head": lambda hidden=hidden: target.vocabulary.logits(hidden),  # type: ignore[misc]
            "draft": lambda embeddings=embeddings: drafter.draft(embeddings, start, cache),  # type: ignore[misc]
            "read": lambda committed=committed: drafter.read_context(committed, start, cache),  # type: ignore[misc]
        }
        samples: dict[str, list[float]] = defaultdict(list)
        for turn in range(CALLS + 1):
            for name, part in parts.items():
                began = time.thread_time()
                part()
                if turn:
                    samples[name].append(1e3 * (time.thread_time() - began))
        for name, found in samples.items():
            recorder.add(f"blocks.part.{name}.{dtype}.{width}", statistics.median(found), "ms", CALLS, {"min": round(min(found), 2)})


if __name__ == "__main__":
    main()
