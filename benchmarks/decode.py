"""Decoding by the target alone and with a drafter: new tokens per second, at several batch sizes, with CUDA graphs and without.

    python -m benchmarks.decode --drafter folder --prompts prompts.jsonl     # or --untrained: random weights, for the machinery alone
    python -m benchmarks.decode --untrained --device cpu --dtype float32 --batches 1 2 --count 2 --new 8

Prompts are JSON lines with ``messages``; without a file, a few of our own. Under a minute and a half on one GPU. Both sides share the
target's static cache, kernels and graphs. A line's detail has milliseconds of a round, and of a batch by stage, the acceptance length, and how many
texts equal those without graphs.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import Recorder, arguments, recorder_for
from benchmarks.regenerate import read_prompts
from dflash_core.config import DrafterConfig, TargetConfig
from dflash_core.data import render_prompt
from dflash_core.data.types import Message
from dflash_core.decoding import Generation, Room, Sampling, measure_acceptance, open_decoder, open_verifier
from dflash_core.drafter import DFlashConfig, DFlashDrafter, load_checkpoint
from dflash_core.target import TargetModel, resolve_target

OWN = (
    "Write a Python function that returns the longest word of a sentence.", "Explain why the sky is blue.", "How fast is 60 km in 45 minutes?",
    "Name three uses of a paper clip.", "Write a limerick about a lighthouse.", "What is the difference between a list and a tuple in Python?",
    "Tom has 3 boxes of 12 eggs and breaks 5. How many are left?", "Summarise the plot of Hamlet in three sentences.",
)  # fmt: skip


def main() -> None:
    parser = arguments(__doc__, ["graphs", "eager", "sampled"])
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--drafter", type=Path, help="folder of a checkpoint or an export")
    parser.add_argument("--untrained", action="store_true", help="a drafter of random weights")
    parser.add_argument("--prompts", type=Path, help="JSON lines with 'messages'")
    parser.add_argument("--count", type=int, default=32, help="prompts")
    parser.add_argument("--new", type=int, default=128, help="tokens of an answer, exactly")
    parser.add_argument("--block", type=int, help="block size; default: the drafter's")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    options = parser.parse_args()
    if bool(options.drafter) == options.untrained:
        parser.error("give either --drafter or --untrained")
    recorder = recorder_for(options)
    target = TargetModel.from_pretrained(resolve_target(TargetConfig(model=options.target)), dtype=options.dtype, device=options.device)
    drafter = (load_checkpoint(options.drafter) if options.drafter else _untrained(target)).to(target.device, target.dtype).eval()
    prompts = _prompts(target, options.prompts, options.count)
    eager: dict[tuple[int, str], list[Generation]] = {}
    for section in sorted(options.sections):  # eager before graphs, which are compared with it
        for rows in options.batches:
            some = prompts[: 2 * rows] if section == "eager" else prompts[: max(8, rows)]
            recorder.attempt(
                f"decode.b{rows}.{section}",
                lambda rows=rows, section=section, some=some: _measure(recorder, target, drafter, some, rows, section, options, eager),  # type: ignore[misc]
            )


def _measure(
    recorder: Recorder, target: TargetModel, drafter: DFlashDrafter, prompts: Sequence[list[int]], rows: int, section: str,
    options: argparse.Namespace, eager: dict[tuple[int, str], list[Generation]],
) -> None:  # fmt: skip
    room = Room(rows, max(map(len, prompts)), options.new, options.block or drafter.config.block_size)
    verifier = open_verifier(target, room, graphs=section != "eager")
    sampling = Sampling(1.0, top_p=0.95) if section == "sampled" else Sampling()
    speeds = {}
    for side, model in (("alone", None), ("drafted", drafter)):
        decoder = open_decoder(target, model, verifier, room, stop_ids=(), sampling=sampling)
        decoder.generate(prompts[:rows], most=8)
        batches = [prompts[at : at + rows] for at in range(0, len(prompts), rows)]
        answers = [answer for batch in batches for answer in decoder.generate(batch)]
        seconds = sum(answer.seconds for answer in answers)
        speeds[side] = sum(len(answer.tokens) for answer in answers) / seconds
        eager.setdefault((rows, side), answers)
        detail = {
            "prompts": len(prompts),
            "rounds_ms": round(1e3 * seconds * rows / sum(answer.target_passes - 1 for answer in answers), 3),
            **{
                name: round(1e3 * sum(getattr(answer, f"{name}_seconds") for answer in answers) / len(batches), 1)
                for name in ("prefill", "draft", "verify")
            },
            "block": room.block_size if model else 1,
            "dtype": options.dtype,
            "drafter": "untrained" if options.untrained else options.drafter.name,
        }
        if model:
            acceptance = measure_acceptance(answers, room.block_size)
            detail |= {"tau": round(acceptance.mean_of_requests, 3), "speedup": round(speeds["drafted"] / speeds["alone"], 3)}
        if section == "graphs" and eager[rows, side] is not answers:
            pairs = list(zip(answers, eager[rows, side], strict=False))
            detail["as_eager"] = f"{sum(a.tokens == b.tokens for a, b in pairs)}/{len(pairs)}"
        recorder.add(f"decode.b{rows}.{section}.{side}", speeds[side], "tokens/s", len(answers), detail)


def _untrained(target: TargetModel) -> DFlashDrafter:
    mask = target.info.vocab_size - 1 if target.info.model_type != "llama" else 16
    shape = DrafterConfig(num_layers=5, block_size=16, mask_token_id=mask)
    return DFlashDrafter(DFlashConfig.from_target(target.info, shape)).init_weights(0)


def _prompts(target: TargetModel, path: Path | None, count: int) -> list[list[int]]:
    if path is not None:
        return read_prompts(path, target, count)
    return [render_prompt(target.tokenizer, [Message("user", text)]) for text in itertools.islice(itertools.cycle(OWN), count)]


if __name__ == "__main__":
    main()
