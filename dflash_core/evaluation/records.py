"""One line of JSON per finished prompt, so that a killed evaluation goes on where it was.

A line is on disk before the next prompt begins. A kill while it is written leaves a torn last line, which is cut off at the next start.
Lines carry the key of what they measured; lines of another drafter or other settings are passed over, never mixed in.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from dflash_core.decoding import Generation
from dflash_core.evaluation.lossless import Divergence


class PromptRecord(BaseModel):
    """What was measured on one prompt.

    key:        digest of target, drafters, prompt and settings
    set, id, conversation: of the ``EvaluationPrompt``
    baseline:   the target alone, one token a pass
    trained:    the same with the drafter
    untrained:  the same with the drafter as it was before training, on the first prompts only
    divergence: where the drafter's text is not the target's own
    lossless:   False if such a divergence counts against the drafter
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    key: str
    set: str
    id: str
    conversation: str
    prompt_tokens: int
    baseline: Generation
    trained: Generation
    untrained: Generation | None
    divergence: Divergence | None
    lossless: bool


def append_record(path: Path, record: PromptRecord) -> None:
    """Add a line and wait until it is on disk."""
    with path.open("ab") as file:
        file.write(record.model_dump_json().encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_records(path: Path, keys: Collection[str]) -> list[PromptRecord]:
    """The records of these keys, in order. A torn last line is cut off, so that the next one starts on a line of its own."""
    if not path.is_file():
        return []
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
    records = []
    for line in content[:whole].splitlines():
        try:
            record = PromptRecord.model_validate_json(line)
        except ValidationError:
            continue  # of another version of this code, or damaged: its prompt is simply measured again
        if record.key in keys:
            records.append(record)
    return records
