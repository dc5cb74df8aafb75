"""What the benchmarks of the engine share: rows as packing makes them, and runs of the product's own trainer on them.

    with TrainingRun(SHAPES["1x2048"], ["cuda:0", "cuda:1"], steps=50) as run:      # warmed up, once
        result = run.train()
        run.records                                                                # of this training, one a step
        run.train(steps=20, replicas=1)                                            # again, with the first replica alone
        run.drop_graphs()                                                          # from now on without CUDA graphs, if there were any

Whatever a run comes to is thrown away, so no weights are gathered and written: at the size of a Qwen3-8B drafter that takes longer than the steps.

T row length, F features of a token
"""

from __future__ import annotations

import dataclasses
import gc
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from unittest import mock

import numpy as np
import torch

from benchmarks.common import Shape
from dflash_core.config import PipelineConfig, parse_config
from dflash_core.drafter import DFlashConfig
from dflash_core.feed import Batch, Loader, Row, build_row, collate, loaders_of, pack_rows
from dflash_core.feed.source import row_generator
from dflash_core.shards.reader import ShardSample
from dflash_core.target import TargetInfo, TargetVocabulary
from dflash_core.training import DrafterTrainer, GradientSync, Judge, TrainingResult, TrainingSession, TrainingState, WarmUpReport, read_metrics
from dflash_core.training.course import config_settings
from dflash_core.training.meeting import Meeting
from dflash_core.training.warming import rehearse, warm_up_source

SEED = 0


def chat_lengths(longest: int, samples: int = 4000) -> np.ndarray:
    """Tokens of the samples of a chat mix: log-normal, of median 600 and with a long tail that is cut at ``longest``."""
    draws = np.random.default_rng(SEED).lognormal(np.log(600), 0.9, samples)
    return np.clip(draws, 32, longest).astype(np.int64)


class PackedRows:
    """Random samples of the lengths of a chat mix, packed into rows and laid out by the product; features are slices of one random tensor."""

    def __init__(self, shape: Shape, feature_size: int):
        self._shape = shape
        self._lengths = chat_lengths(shape.T)
        self._pool_TF = torch.randn(2 * shape.T, feature_size, dtype=torch.bfloat16)
        self._rows = pack_rows(self._lengths, shape.T, seed=SEED, epoch=0)

    def rows_per_epoch(self, epoch: int) -> int:
        """Rows of an epoch."""
        return len(self._rows)

    def row(self, ordinal: int) -> Row:
        """Row ``ordinal``; every epoch has the same order, and anchors of its own."""
        epoch, index = divmod(ordinal, len(self._rows))
        shape = self._shape
        samples = [self._sample(sample) for sample in self._rows[index]]
        generator = row_generator(SEED, epoch, index)
        return build_row(samples, ordinal=ordinal, epoch=epoch, row_length=shape.T, num_anchors=shape.N, generator=generator)

    def _sample(self, index: int) -> ShardSample:
        draws, length = np.random.default_rng([SEED, index]), int(self._lengths[index])
        start = int(draws.integers(0, len(self._pool_TF) - length + 1))
        columns = {
            "features": self._pool_TF[start : start + length],
            "tokens": torch.from_numpy(draws.integers(0, self._shape.V, length).astype(np.int32)),
            "loss_mask": torch.arange(length) >= length // 4,  # prompt, then response
        }
        return ShardSample.of(f"sample {index}", columns)


class StaggeredRows(PackedRows):
    """The first row of each replica comes ``pause_s`` after that of the replica before, so that the threads start one after the other."""

    def __init__(self, shape: Shape, feature_size: int, pause_s: float):
        super().__init__(shape, feature_size)
        self._pause_s = pause_s
        self._started: float | None = None
        self.replicas = 0

    def row(self, ordinal: int) -> Row:
        """See ``PackedRows``."""
        if ordinal < self.replicas and threading.current_thread() is not threading.main_thread():
            self._started = self._started or time.monotonic()
            time.sleep(max(0.0, self._started + self._pause_s * ordinal - time.monotonic()))
        return super().row(ordinal)


class TrainingRun:
    """The product's warm-up and training on packed rows, for ``steps`` steps, in a folder that does not stay.

    ``loaders`` make other rows; ``judge`` evaluates as ``evaluation`` in the training's settings says.
    """

    def __init__(
        self, shape: Shape, devices: list[str], steps: int, *, source: PackedRows | None = None, loaders: list[Loader] | None = None,
        judge: Callable[[PipelineConfig], Judge] | None = None, **training: Any,
    ):  # fmt: skip
        self.shape, self.devices, self._steps, self._training = shape, devices, steps, training
        info = target_info(shape)
        self.config = training_config(shape, devices, steps, **training)
        feature_size = DFlashConfig.from_target(info, self.config.drafter).feature_size
        self._source = source or PackedRows(shape, feature_size)
        if isinstance(self._source, StaggeredRows):
            self._source.replicas = len(devices)
        self._temporary = tempfile.TemporaryDirectory()
        self.folder = Path(self._temporary.name)
        with mock.patch("dflash_core.training.warming.initial_drafter", _RandomDrafter):
            self.report: WarmUpReport = warm_up_source(
                self.config, run_id="benchmark", loaders=loaders or loaders_of(self._source), settings=config_settings(self.config), info=info,
                vocabulary=_vocabulary(shape, info, torch.device(devices[0])), folder=self.folder,
                judge=None if judge is None else lambda: judge(self.config),
            )  # fmt: skip
        session = TrainingSession.get("benchmark", self.config)
        assert session is not None
        self.session: TrainingSession = session
        self._trained = 0

    def train(
        self, steps: int | None = None, replicas: int | None = None, loaders: list[Loader] | None = None, *, evaluate: bool = True
    ) -> TrainingResult:
        """From the first row on, all steps by default, with all replicas or the first ones, on the rows of some loaders or those of warm-up.

        Raises what the trainer raises.

        The first replica alone still packs its gradients as it does among others: 1 ms of a step of 120.
        """
        number, some = self._trained, replicas or len(self.devices)
        self._trained += 1
        syncs = self.session.syncs if some == len(self.devices) else [GradientSync(0, 1, Meeting(1), None)]
        session = dataclasses.replace(
            self.session, config=training_config(self.shape, self.devices[:some], self._steps, **self._training),
            folder=self.folder / f"training-{number}", state=TrainingState(), total_steps=steps or self._steps,
            replicas=self.session.replicas[:some], syncs=syncs, spent=False, loaders=loaders or self.session.loaders,
            evaluator=self.session.evaluator if evaluate else None,
        )  # fmt: skip
        self.records_path = session.folder / "metrics.jsonl"
        with mock.patch("dflash_core.training.worker.gather", lambda replica, sync: ({}, {}, {}) if sync.rank == 0 else None):
            return DrafterTrainer(session).run()

    def drop_graphs(self) -> None:
        """Let all replicas launch their steps kernel by kernel from now on. They were captured in warm-up, as they are in the product."""
        for replica in self.session.replicas:
            replica._graphs = None
        gc.collect()
        torch.cuda.empty_cache()  # the graphs' own memory, which steps outside of them cannot use
        rehearse(self.session.replicas, self.session.syncs)  # what comparing needs is there again before the first step, as after warm-up

    def make_equal(self) -> None:
        """Give all replicas the weights of the first, and no moments."""
        first = self.session.replicas[0]
        with first.on_device():
            weights = {name: weight.clone() for name, weight in first.moments.by_name(first.shards)[0].items()}
        if first.device.type == "cuda":
            torch.cuda.synchronize(first.device)  # the others read them on streams of their own
        for replica in self.session.replicas:
            with replica.on_device():
                replica.load(weights)
            if replica.device.type == "cuda":
                torch.cuda.synchronize(replica.device)
        del weights
        torch.cuda.empty_cache()

    def batch(self, number: int) -> Batch:
        """The ``number``-th batch of the source, on the CPU."""
        return collate([self._source.row(number * self.shape.B + row) for row in range(self.shape.B)])

    @property
    def records(self) -> list[dict[str, float]]:
        """Metrics of every step of the last training."""
        return read_metrics(self.records_path)

    def seconds_of_a_step(self, skip: int = 5) -> float:
        """Median over the steps after the first ``skip``."""
        return float(np.median([record["step_seconds"] for record in self.records[skip:]]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        del self.session
        TrainingSession._sessions.clear()
        self._temporary.cleanup()
        gc.collect()
        if self.devices[0] != "cpu":
            torch.cuda.empty_cache()


def training_config(shape: Shape, devices: list[str], steps: int, **training: Any) -> PipelineConfig:
    """Settings of a run that writes no checkpoint before its end and records every step."""
    settings = {
        "devices": devices, "row_length": shape.T, "num_anchors": shape.N, "rows_per_microstep": shape.B, "queue_rows": 4 * shape.B * len(devices),
        "max_steps": steps, "epochs": 100_000, "checkpoint_every": 10**9, "compare_replicas_every": 100, "log_every": 1, "stall_timeout_s": 120.0,
        "precision": "bfloat16" if devices[0] != "cpu" else "float32", "compile": "on", "cuda_graphs": False, **training,
    }  # fmt: skip
    return parse_config(
        {
            "target": {"model": shape.name},
            "data": {"sources": [{"source": "none.jsonl"}], "max_length": shape.T},
            "drafter": {
                "num_layers": shape.layers, "tap_layers": list(range(1, 1 + shape.layers)), "block_size": shape.S, "mask_token_id": shape.V - 1,
            },
            "objective": {"chunk_slots": shape.chunk},
            "training": settings,
        }
    )  # fmt: skip


def target_info(shape: Shape) -> TargetInfo:
    """A made-up target of the shape's dimensions."""
    return TargetInfo(
        name=shape.name, path="none", revision=None, digest="0" * 64, tokenizer_digest="0" * 64, template_digest=None, model_type="qwen3",
        num_layers=36, hidden_size=shape.H, intermediate_size=shape.I, num_heads=shape.heads, num_kv_heads=shape.kv_heads, head_dim=shape.head_dim,
        vocab_size=shape.V, rms_norm_eps=1e-6, attention_bias=False, rope_theta=1e6, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        max_position_embeddings=40_960, tie_word_embeddings=False, eos_token_ids=(1,), pad_token_id=0, bos_token_id=None, embedding_scale=1.0,
        logit_softcap=None, logit_scale=1.0,
    )  # fmt: skip


def _vocabulary(shape: Shape, info: TargetInfo, device: torch.device) -> TargetVocabulary:
    generator = torch.Generator(device).manual_seed(SEED)
    embedding, head = (torch.empty(shape.V, shape.H, dtype=torch.bfloat16, device=device).normal_(std=0.02, generator=generator) for _ in range(2))
    return TargetVocabulary(embedding, head, info)


class _RandomDrafter:
    """Stands in for the product's initial weights, which take longer to draw on one CPU core than a section takes to measure."""

    def __init__(self, config: PipelineConfig, drafter_config: DFlashConfig, info: TargetInfo):
        device = config.training.devices[0]
        generator = torch.Generator(device).manual_seed(SEED)
        self._weights = {
            name: torch.ones(shape, device=device) if len(shape) == 1 else torch.empty(shape, device=device).normal_(std=0.02, generator=generator)
            for name, shape in drafter_config.tensor_shapes().items()
        }

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._weights
