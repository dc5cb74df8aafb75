"""A target of 64 hidden and 256 tokens, rows in which the next tokens can be read off the features, and a run of the trainer on both."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_core.config import ExtractionConfig, PipelineConfig, parse_config
from dflash_core.drafter import default_tap_layers, sample_anchors
from dflash_core.feed import Row, loaders_of
from dflash_core.shards import ShardDataset, extract
from dflash_core.shards.fp8 import from_fp8, to_fp8
from dflash_core.target import TargetInfo, TargetVocabulary
from dflash_core.training import DrafterTrainer, TrainingResult, TrainingSession, trainer
from dflash_core.training.course import config_settings
from dflash_core.training.replica import Replica
from dflash_core.training.warming import WarmUpReport, warm_up_source

H, V, TAPS, ROW_LENGTH = 64, 256, 2, 48

INFO = TargetInfo(
    name="small", path="/nowhere", revision=None, digest="d" * 64, tokenizer_digest="t" * 64, template_digest=None, model_type="llama",
    num_layers=6, hidden_size=H, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=V, rms_norm_eps=1e-5,
    attention_bias=False, rope_theta=10000.0, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, max_position_embeddings=512,
    tie_word_embeddings=True, eos_token_ids=(2,),
    pad_token_id=0, bos_token_id=1, embedding_scale=1.0, logit_softcap=None, logit_scale=1.0,
)  # fmt: skip


def vocabulary() -> TargetVocabulary:
    weight = torch.randn(V, H, generator=torch.Generator().manual_seed(1))
    return TargetVocabulary(weight, weight, INFO)


DISTILLED: dict[str, Any] = {"extraction": {"teacher": "last_hidden"}, "objective": {"distillation": {"weight": 0.5, "temperature": 2.0}}}
"""Settings of a training on ``RowsOfATeacher``."""


class SmallRows:
    """Row ``ordinal``: two documents and some padding; features hold the embeddings of the next tokens, so a drafter can learn to copy."""

    def __init__(self, rows: int = 64, num_anchors: int = 6):
        self.rows = rows
        self.num_anchors = num_anchors
        self.taken: list[int] = []
        self._embeddings = vocabulary().embedding_weight

    def rows_per_epoch(self, epoch: int) -> int:
        return self.rows

    def row(self, ordinal: int) -> Row:
        generator = torch.Generator().manual_seed(1000 + ordinal)
        tokens = torch.randint(8, 40, (ROW_LENGTH,), generator=generator)
        first, second = 20, 20
        ids = torch.tensor([0] * first + [1] * second + [-1] * (ROW_LENGTH - first - second), dtype=torch.int32)
        positions = torch.cat([torch.arange(first), torch.arange(second), torch.zeros(ROW_LENGTH - first - second, dtype=torch.int64)])
        mask = (positions >= 4) & (ids >= 0)
        features = torch.cat([self._embeddings[tokens.roll(-1)], self._embeddings[tokens.roll(-2)]], dim=-1)
        anchors = sample_anchors(mask, ids, self.num_anchors, generator)
        return Row(
            ordinal=ordinal, epoch=0, features=features, tokens=tokens, document_ids=ids, positions=positions, loss_mask=mask, anchors=anchors,
            sample_ids=(f"row {ordinal}",),
        )  # fmt: skip


class RowsOfATeacher(SmallRows):
    """Rows with last hidden states: of a target that is nearly sure of the next token."""

    def row(self, ordinal: int) -> Row:
        row = super().row(ordinal)
        return replace(row, last_hidden=2 * self._embeddings[row.tokens.roll(-1)])


class RowsInFp8(SmallRows):
    """Rows as shards in fp8 give them, or ``widened``, as they are read."""

    def __init__(self, *, widened: bool):
        super().__init__()
        self._widened = widened

    def row(self, ordinal: int) -> Row:
        row = super().row(ordinal)
        features, scales = to_fp8(row.features, TAPS)
        return replace(row, features=from_fp8(features, scales)) if self._widened else replace(row, features=features, feature_scales=scales)


class SmallSamples:
    """The sample table of a dataset of shards."""

    def __init__(self, count: int = 40):
        draws = np.random.default_rng(3)
        self.lengths = draws.integers(12, ROW_LENGTH, size=count)
        self.digest = f"small-{count}"

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, i: int) -> np.ndarray:
        return np.random.default_rng([4, i]).integers(8, 40, size=self.lengths[i]).astype(np.int32)

    def loss_mask(self, i: int) -> np.ndarray:
        return np.arange(self.lengths[i]) >= 4

    def id(self, i: int) -> str:
        return f"sample-{i}"


def make_shards(folder: Path, info: TargetInfo = INFO) -> ShardDataset:
    """Shards whose features are, as in ``SmallRows``, the embeddings of the next two tokens."""
    embeddings = vocabulary().embedding_weight

    def hidden_states(documents: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([torch.cat([embeddings[ids.roll(-1)], embeddings[ids.roll(-2)]], dim=-1) for ids in documents])

    settings = ExtractionConfig(samples_per_shard=16, batch_tokens=256, feature_dtype="bfloat16")
    taps = default_tap_layers(info.num_layers, TAPS)
    samples: Any = SmallSamples()
    extract(settings, info, [hidden_states], samples, folder, tap_layers=taps, target_dtype="float32", code_version=1)
    return ShardDataset(folder)


def config(replicas: int = 2, **training: Any) -> PipelineConfig:
    settings: dict[str, Any] = {
        "devices": ["cpu"] * replicas, "row_length": ROW_LENGTH, "num_anchors": 6, "max_steps": 6, "learning_rate": 3e-3, "precision": "float32",
        "checkpoint_every": 2, "compare_replicas_every": 2, "stall_timeout_s": 300.0, "queue_rows": 8, "weight_decay": 0.01,
    }  # fmt: skip
    objective, drafter, extraction = (training.pop(section, {}) for section in ("objective", "drafter", "extraction"))
    return parse_config(
        {
            "target": {"model": "small"},
            "data": {"sources": [{"source": "prompts.jsonl"}], "max_length": ROW_LENGTH},
            "drafter": {"num_layers": 2, "num_taps": TAPS, "block_size": 4, "mask_token_id": 5, **drafter},
            "extraction": extraction,
            "objective": {"chunk_slots": 16, **objective},
            "training": {**settings, **training},
        }
    )


def warm_up(config: PipelineConfig, folder: Path, source: SmallRows | None = None) -> tuple[WarmUpReport, TrainingSession]:
    report = warm_up_source(
        config,
        run_id="run",
        loaders=loaders_of(source or SmallRows()),
        settings=config_settings(config),
        info=INFO,
        vocabulary=vocabulary(),
        folder=folder,
    )
    session = TrainingSession.get("run", config)
    assert session is not None
    return report, session


def run(config: PipelineConfig, folder: Path, source: SmallRows | None = None) -> TrainingResult:
    """Warm up and train."""
    _, session = warm_up(config, folder, source)
    return DrafterTrainer(session).run()


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def final_weights(folder: Path) -> bytes:
    return (folder / "final" / "model.safetensors").read_bytes()


def plant(monkeypatch: pytest.MonkeyPatch, replica: int, step: int, fault: Callable[[Replica], None]) -> None:
    """Let ``fault`` happen in a micro-step (0-based) of a replica, after warm-up."""
    original, calls = Replica.micro_step, {"count": 0}

    def micro_step(self: Replica, batch: Any) -> None:
        if self.index == replica and threading.current_thread() is not threading.main_thread():
            calls["count"] += 1
            if calls["count"] == step + 1:
                fault(self)
        original(self, batch)

    monkeypatch.setattr(Replica, "micro_step", micro_step)


def stall_once(monkeypatch: pytest.MonkeyPatch, stuck: Callable[[str], object]) -> None:
    """Shorten the patience of the trainer to 0.2 s once ``stuck`` says so of "who waits for what": before, a slow machine is no stall."""
    original = trainer._Supervisor._check_progress

    def check(self: trainer._Supervisor) -> None:
        if stuck(self._who_waits_for_what()):
            self._stall_timeout_s = 0.2
        original(self)

    monkeypatch.setattr(trainer._Supervisor, "_check_progress", check)
    monkeypatch.setattr(trainer, "_ABORT_GRACE_S", 0.5)  # who is stuck does not end
