"""What extraction.trim saves of the bytes of shards, on real lengths. Runs on the CPU.

python -m benchmarks.trim

The mix ``demo`` is the samples of configs/demo.yaml (its responses are cached, so nothing is generated). ``files``: each module of Python's standard
library is a prompt of the demo's target, with a response as long as one of the demo's, drawn at random; modules of which prompt and response
are no longer than 16,384 tokens. ``chat`` is log-normal with a median of 700 tokens, half of it the response. Features are those of Qwen3-8B: five
taps in bfloat16.

trim.saved.<mix>.<window>                share of the bytes; window 0: a drafter with full attention
trim.saved.<mix>.<window>.last_hidden    the same where last hidden states are stored, too
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.common import Recorder, arguments, recorder_for
from benchmarks.packing import Mix, chat_mix, demo_mix
from dflash_core.config import ExtractionConfig
from dflash_core.data import Message, render_prompt
from dflash_core.plan import Plan
from dflash_core.shards.columns import all_columns, trimmed_bytes
from dflash_core.shards.format import TOKENS
from dflash_core.shards.trim import count_used
from dflash_core.target import load_tokenizer

TAPS, HIDDEN, LONGEST = 5, 4096, 16_384
WINDOWS = (0, 512, 2048, 4096)


class Samples:
    """The loss masks of a mix."""

    def __init__(self, mix: Mix):
        self._mix = mix

    def __len__(self) -> int:
        return len(self._mix.lengths)

    def loss_mask(self, index: int) -> npt.NDArray[np.bool_]:
        """[t]: the response, at the end."""
        tokens = int(self._mix.lengths[index])
        return np.arange(tokens) >= tokens - self._mix.responses[index]


def files_mix(plan: Plan, responses: npt.NDArray[np.int64]) -> Mix:
    """Modules of the standard library, to be explained."""
    tokenizer = load_tokenizer(plan.info.path)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [f"What does this module do?\n\n{path.read_text(encoding='utf-8')}" for path in files]
    prompts = np.array([len(render_prompt(tokenizer, [Message("user", text)])) for text in texts])
    lengths = prompts + (drawn := np.random.default_rng(0).choice(responses, len(prompts)))
    return Mix("files", lengths[lengths <= LONGEST], drawn[lengths <= LONGEST])


def measure_trimming(recorder: Recorder, mix: Mix, window: int) -> None:
    """Bytes of a mix, whole and trimmed for one window."""
    samples: Any = Samples(mix)
    rows = {TOKENS: int(mix.lengths.sum()), **count_used(samples, window)}
    for teacher in ("none", "last_hidden"):
        columns = all_columns(ExtractionConfig(teacher=teacher, trim=True), TAPS, HIDDEN)
        saved = trimmed_bytes(columns, rows)
        whole = saved + sum(rows[column.counted_by] * column.token_bytes for column in columns)
        detail = {**rows, "whole_gb": round(whole / 1e9, 2), "saved_gb": round(saved / 1e9, 2)}
        recorder.add(f"trim.saved.{mix.name}.{window}{'' if teacher == 'none' else f'.{teacher}'}", saved / whole, "share", len(samples), detail)


def main() -> int:
    """Measure every mix for every window."""
    parser = arguments(__doc__ or "", ["trim"])
    parser.set_defaults(device="cpu")
    recorder = recorder_for(parser.parse_args())
    demo, plan = demo_mix()
    for mix in (demo, chat_mix(), files_mix(plan, demo.responses)):
        for window in WINDOWS:
            measure_trimming(recorder, mix, window)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
