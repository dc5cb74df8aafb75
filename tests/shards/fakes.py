"""A sample table and a target small enough to write shards in milliseconds; both are functions of their arguments alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_core.config import ExtractionConfig
from dflash_core.shards import extract

HIDDEN = 8
TAPS = (1, 4)
CONFIG = ExtractionConfig(samples_per_shard=4, batch_tokens=64, feature_dtype="bfloat16")


@dataclass(frozen=True)
class FakeInfo:
    name: str = "tiny"
    revision: str | None = "abc"
    digest: str = "d" * 64
    tokenizer_digest: str = "t" * 64
    template_digest: str | None = "c" * 64
    hidden_size: int = HIDDEN


class FakeSamples:
    """Samples of random lengths; every third token of a sample is a prompt token."""

    def __init__(self, count: int = 14, seed: int = 0, lengths: list[int] | None = None):
        draws = np.random.default_rng(seed)
        self.lengths = np.array(lengths) if lengths else draws.integers(3, 40, size=count)
        self._tokens = [draws.integers(0, 1000, size=n).astype(np.int32) for n in self.lengths]
        self.digest = f"samples-{seed}-{len(self.lengths)}"

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, i: int) -> np.ndarray:
        return self._tokens[i]

    def loss_mask(self, i: int) -> np.ndarray:
        return np.arange(self.lengths[i]) >= self.lengths[i] // 3

    def id(self, i: int) -> str:
        return f"sample-{i:03d}"


def hidden_states(documents: Sequence[torch.Tensor]) -> torch.Tensor:
    """Features that depend on every token up to their own, and on the size of the batch, as those of a real target may in the last bits."""
    assert {ids.dtype for ids in documents} == {torch.int32}
    past_T = torch.cat([ids.cumsum(0) for ids in documents]).float()
    return torch.sin(past_T[:, None] * torch.arange(1, HIDDEN * len(TAPS) + 1)) + len(past_T) / 64


def run(folder: Path, samples: Any = None, target: Any = hidden_states, info: Any = None, devices: int = 1, **changes: Any) -> dict[str, Any]:
    """Extract with the fakes, on so many devices."""
    arguments = {"tap_layers": TAPS, "target_dtype": "float32", "code_version": 1} | changes
    config = arguments.pop("config", CONFIG)
    return extract(config, info or FakeInfo(), [target] * devices, FakeSamples() if samples is None else samples, folder, **arguments)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder by its relative path."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
