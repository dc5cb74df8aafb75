"""How much data a run has: exact once the samples are there, before that guessed from the settings and the files."""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet

from dflash_core.config import PromptSource
from dflash_core.data.benchmarks import REQUESTS
from dflash_core.plan import Plan

_ROWS_OF_UNKNOWN = 10_000
_PROMPT = 100


@dataclass(frozen=True)
class Amounts:
    """Of the training data; ``heldout`` are the conversations for evaluation, ``exact`` is False for a guess from the settings.

    longest_prompt: tokens; a guess in any case, at most what leaves room for a response
    """

    conversations: int
    samples: int
    tokens: int
    response_tokens: int
    heldout: int
    longest_prompt: int
    exact: bool


def amounts_of(plan: Plan) -> Amounts:
    """What the stage 'samples' has found, or else a guess."""
    data = plan.config.data
    longest = max(1, min(data.max_length - data.min_response_tokens, 4 * _PROMPT))
    found = plan.stage("samples").manifest
    if found is not None:
        counts = found.counts
        train, tokens, supervised = counts["train"], counts["train_tokens"], counts["train_supervised"]
        return Amounts(counts["conversations"], train, tokens, supervised, counts["heldout"], longest, exact=True)
    conversations = sum(rows_of(item) for item in data.sources)
    heldout = max(1, round(conversations * data.heldout_fraction))
    samples = max(1, conversations - heldout)
    response = min(data.generation.max_new_tokens, data.max_length)
    return Amounts(conversations, samples, samples * min(data.max_length, _PROMPT + response), samples * response, heldout, longest, exact=False)


def rows_of(item: PromptSource) -> int:
    """Prompts of a source; a guess where they are not here yet."""
    rows = _count_rows(item.source)
    if rows is None:
        return item.limit or _ROWS_OF_UNKNOWN
    return min(rows, item.limit or rows)


def _count_rows(source: str) -> int | None:
    """Rows of a file, turns of a benchmark. None for a dataset that is not here yet, and for a file that cannot be read, which is an error later."""
    name = source.lower()
    if name in REQUESTS:
        return REQUESTS[name]
    try:
        if name.endswith(".parquet"):
            return int(pyarrow.parquet.read_metadata(source).num_rows)
        if name.endswith((".jsonl", ".jsonl.gz")):
            with gzip.open(source, "rb") if name.endswith(".gz") else Path(source).open("rb") as file:
                return sum(1 for _ in file)
    except (OSError, EOFError, zlib.error, pyarrow.ArrowException):
        pass
    return None
