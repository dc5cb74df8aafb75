"""Padding in packed rows, and documents left without an anchor, on real lengths. Runs on the CPU.

python -m benchmarks.packing
python -m benchmarks.packing --prompts prompts.jsonl --row-lengths 512 2048

The mix ``demo`` is the samples of configs/demo.yaml (its responses are cached, so nothing is generated). ``--prompts`` adds a mix: its
conversations, rendered, each with a response as long as one of the demo's, drawn at random. ``chat`` is log-normal with a median of 700 tokens.

packing.waste.<mix>.<row length>     share of all row positions that are padding; its detail has the least that whole rows allow
packing.starved.<mix>.<row length>   share of documents without an anchor in one epoch; its detail has what drawing over the whole row would give
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.common import Recorder, arguments, recorder_for
from dflash_core.config import load_config
from dflash_core.data import SampleTable, render_prompt
from dflash_core.drafter import sample_anchors
from dflash_core.feed import pack_rows
from dflash_core.feed.source import row_generator
from dflash_core.pipeline import run_stage
from dflash_core.plan import Plan
from dflash_core.target import load_tokenizer

DEMO = Path(__file__).parents[1] / "configs" / "demo.yaml"
POSITIONS_PER_ANCHOR = 8  # as in gpu-demo.yaml


class Mix(NamedTuple):
    """Tokens of each sample, and how many of them, the last ones, are the response."""

    name: str
    lengths: npt.NDArray[np.int64]
    responses: npt.NDArray[np.int64]


def demo_mix() -> tuple[Mix, Plan]:
    """The demo's training samples, from the stage's own files."""
    plan = Plan(load_config(DEMO))
    for stage in ("target", "responses", "samples"):
        run_stage(plan, stage)
    table = SampleTable.open(plan.folder("samples") / "train.parquet")
    responses = [int(table.loss_mask(i).sum()) for i in range(len(table))]
    return Mix("demo", table.lengths, np.array(responses)), plan


def prompts_mix(path: Path, plan: Plan, responses: npt.NDArray[np.int64]) -> Mix:
    """Conversations of a JSONL file as prompts of the demo's target, with responses of drawn lengths."""
    tokenizer = load_tokenizer(plan.info.path)
    conversations = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    prompts = np.array([len(render_prompt(tokenizer, conversation["messages"])) for conversation in conversations])
    drawn = np.random.default_rng(0).choice(responses, len(prompts))
    return Mix(path.stem, prompts + drawn, drawn)


def chat_mix(count: int = 5000) -> Mix:
    """Long conversations of very different lengths, none longer than 3072."""
    lengths = np.exp(np.random.default_rng(0).normal(math.log(700), 0.8, count)).clip(16, 3072).astype(np.int64)
    return Mix("chat", lengths, lengths // 2)


def measure_packing(recorder: Recorder, mix: Mix, row_length: int) -> None:
    """Padding and starved documents of one mix in rows of one length."""
    if mix.lengths.max() > row_length:
        return
    rows = pack_rows(mix.lengths, row_length, seed=0, epoch=0)
    total, positions = int(mix.lengths.sum()), len(rows) * row_length
    least = -(-total // row_length) * row_length
    recorder.add(
        f"packing.waste.{mix.name}.{row_length}", 1 - total / positions, "share", len(mix.lengths),
        {"rows": len(rows), "tokens": total, "least": round(1 - total / least, 5)},
    )  # fmt: skip
    slots = row_length // POSITIONS_PER_ANCHOR
    starved, starved_by_chance = 0, 0.0
    for index, row in enumerate(rows):
        documents_T = torch.arange(len(row)).repeat_interleave(torch.from_numpy(mix.lengths[list(row)])).int()
        mask_T = torch.cat([torch.arange(mix.lengths[i]) >= mix.lengths[i] - mix.responses[i] for i in row])
        anchors = sample_anchors(mask_T, documents_T, slots, row_generator(0, 0, index))
        starved += len(row) - len(documents_T[anchors[anchors >= 0]].unique())
        valid = [max(0, int(mix.responses[i]) - 1) for i in row]
        starved_by_chance += sum(_chance_of_none(sum(valid), own, slots) for own in valid)
    documents = len(mix.lengths)
    detail = {"documents": starved, "slots": slots, "drawn over the row": round(starved_by_chance / documents, 5)}
    recorder.add(f"packing.starved.{mix.name}.{row_length}", starved / documents, "share", documents, detail)


def _chance_of_none(positions: int, own: int, slots: int) -> float:
    """Chance that none of a document's ``own`` positions is among ``slots`` drawn from all ``positions`` of its row."""
    if positions - own < slots:
        return 0.0 if own else 1.0
    return math.comb(positions - own, slots) / math.comb(positions, slots)


def main() -> int:
    """Measure every mix at every row length that holds its longest sample."""
    parser = arguments(__doc__ or "", ["packing"])
    parser.add_argument("--prompts", type=Path, nargs="*", default=[], help="JSONL files of conversations: one more mix each")
    parser.add_argument("--row-lengths", type=int, nargs="*", default=[512, 544, 1024, 2048, 3072], help="row lengths in tokens")
    parser.set_defaults(device="cpu")
    options = parser.parse_args()
    recorder = recorder_for(options)
    demo, plan = demo_mix()
    mixes = [demo, *(prompts_mix(path, plan, demo.responses) for path in options.prompts), chat_mix()]
    for mix in mixes:
        for row_length in options.row_lengths:
            measure_packing(recorder, mix, row_length)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
