"""The one tree of settings behind every YAML: strict, frozen, extra keys forbidden.

``load_config("configs/demo.yaml", ["training.max_steps=50"])`` returns a ``PipelineConfig`` or raises ``ConfigError``
with, for each problem, the field path, the value and what to do. Settings of the data are in ``config_data``, rules between
fields in ``config_rules``; rules that need the target's own configuration or the data (taps, mask token, length of the schedule)
are in ``dflash_core.checks``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from dflash_core.config_data import DataConfig as DataConfig
from dflash_core.config_data import DrawnConfig as DrawnConfig
from dflash_core.config_data import EndpointConfig as EndpointConfig
from dflash_core.config_data import FilterConfig as FilterConfig
from dflash_core.config_data import GenerationConfig as GenerationConfig
from dflash_core.config_data import PromptSource as PromptSource
from dflash_core.config_data import Redaction as Redaction
from dflash_core.config_placeholders import placeholder_problems
from dflash_core.config_read import parse_as as parse_as
from dflash_core.config_read import read_tree as read_tree
from dflash_core.config_rules import cross_field_problems
from dflash_core.config_section import COLDEST, Count, Decay, Fraction, LoosePath, NumberedSpreadDevice, SpreadDevice, Temperature, holds_password
from dflash_core.config_section import PositiveInt as PositiveInt
from dflash_core.config_section import Section as Section
from dflash_core.config_section import devices_of as devices_of
from dflash_core.config_section import digest_of as digest_of
from dflash_core.config_yaml import annotated_yaml as annotated_yaml


class RunConfig(Section):
    """Where a run lives and what makes it repeatable."""

    name: str = Field("drafter", pattern=r"^[a-zA-Z0-9][a-zA-Z0-9._-]*$", description="Name of the run: its folder and its MLflow run.")
    workspace: LoosePath = Field(Path("workspace"), description="Folder that holds every stage's results and the runs.")
    seed: int = Field(0, ge=0, description="Seed of every draw: initial weights, order of rows, anchors, sampling.")


class TargetConfig(Section):
    """The large language model that is served, frozen here."""

    model: str = Field(min_length=1, description="Hugging Face name, local folder, or the built-in 'smollm2-135m-instruct'.")
    revision: str | None = Field(None, description="Commit of the Hugging Face repository; pin it for anything that is kept.")
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="Precision in which the target generates and is tapped.")
    device: SpreadDevice = Field(
        "cpu", description="Device of the target: cpu, cuda or cuda:N; for one larger than a GPU several, 'cuda:0+cuda:1', that share its layers."
    )
    trust_remote_code: bool = Field(False, description="Run code that comes with the model's repository. Off unless you trust it.")


class RayConfig(Section):
    """Processes on a Ray cluster that make the shards, in place of this one. For flows; what runs without Prefect extracts by itself."""

    workers: Count = Field(0, description="Processes, each with as many GPUs as target.device names. 0: no Ray.")
    address: str | None = Field(
        None,
        min_length=1,
        description="The cluster: 'ray://head:10001', or 'auto' for the one that this machine is part of. Default: one on this machine alone.",
    )


class ExtractionConfig(Section):
    """How hidden states are written to shards."""

    samples_per_shard: PositiveInt = Field(256, description="Samples in one shard file: the unit of resuming.")
    batch_tokens: PositiveInt = Field(8192, description="Most tokens, padding included, in one forward pass of the target.")
    devices: Annotated[tuple[NumberedSpreadDevice, ...], Field(strict=False)] | None = Field(
        None,
        min_length=1,
        description="One copy of the target per entry: cpu, cuda:N, or several joined by +. Default: target.device. Changes no result.",
    )
    store: str | None = Field(
        None,
        pattern=r"^[a-z0-9+]+://.+[^/]$",
        description="Where machines share finished shards, such as s3://bucket/shards: taken from there if it has them, put there if not.",
    )
    ray: RayConfig = Field(default_factory=RayConfig, description="Several machines, through Ray.")
    feature_dtype: Literal["bfloat16", "float32", "fp8"] = Field(
        "bfloat16", description="Precision of the stored features. fp8: half the disk of bfloat16, with a scale for each token and layer."
    )
    teacher: Literal["none", "last_hidden", "topk"] = Field(
        "none",
        description="What else is stored, to learn the target's distribution: last_hidden, from which it follows, or its likeliest tokens (topk).",
    )
    teacher_tokens: PositiveInt = Field(32, description="Likeliest tokens that 'topk' keeps at each position.")
    trim: bool = Field(
        False,
        description="Store only what this drafter's training reads: no prompt beyond drafter.sliding_window, if all layers have it, and no ends.",
    )

    @field_validator("store")
    @classmethod
    def _without_password(cls, store: str | None) -> str | None:
        if store is not None and holds_password(store):
            raise ValueError("holds a password, and settings are written into logs and records: give it to the store by its environment variables")
        return store


class DrafterConfig(Section):
    """Shape of the drafter; everything not named here is inherited from the target."""

    spec: Literal["dflash"] = Field("dflash", description="Variant of the drafter.")
    num_layers: int = Field(5, ge=1, le=64, description="Draft layers.")
    block_size: int = Field(16, ge=2, le=128, description="Tokens of a block: one anchor and block_size - 1 drafted tokens.")
    mask_token_id: Count = Field(description="Token that stands for 'to be drafted'. A spare special token: not pad, not eos.")
    tap_layers: Annotated[tuple[int, ...], Field(strict=False)] | None = Field(
        None, description="0-based target layers whose output is tapped, ascending. Default: spread evenly over the target."
    )
    num_taps: PositiveInt | None = Field(None, description="Number of tapped layers when tap_layers is not given. Default: num_layers.")
    intermediate_size: PositiveInt | None = Field(None, description="Width of the drafter's MLP. Default: the target's.")
    sliding_window: PositiveInt | None = Field(
        None, description="Positions that a draft layer sees, its own included: bounds what long contexts cost. Default: all, with full attention."
    )
    full_attention_layers: Annotated[tuple[int, ...], Field(strict=False)] = Field(
        (), description="0-based draft layers that see everything although there is a sliding_window, ascending."
    )
    initial_weights: Literal["random", "target"] = Field("random", description="Start from random weights or from the target's own last layers.")
    initial_checkpoint: LoosePath | None = Field(None, description="Exported drafter folder to continue from; it goes before initial_weights.")

    @property
    def sliding_layers(self) -> tuple[int, ...]:
        """0-based draft layers with the sliding window."""
        return tuple(i for i in range(self.num_layers) if i not in self.full_attention_layers) if self.sliding_window else ()

    @property
    def farthest_seen(self) -> int:
        """The sliding window where all draft layers have it; 0 where one sees everything."""
        return self.sliding_window if self.sliding_window and not self.full_attention_layers else 0


class DistillationConfig(Section):
    """Learning the target's whole distribution, not its token alone. Needs extraction.teacher."""

    weight: Fraction = Field(0.0, description="Share of the divergence from the target's distribution in the loss; the rest is cross-entropy.")
    temperature: float = Field(1.0, ge=COLDEST, description="Temperature of both distributions in it; above 1 unlikely tokens count more.")


class ObjectiveConfig(Section):
    """What training minimises."""

    weighting: Literal["decay", "dpace", "uniform"] = Field("decay", description="Weight of a slot: exponential decay, D-PACE, or all equal.")
    gamma: float | None = Field(
        None, gt=0.0, description="Decay length of 'decay'. Default: 7, 5, 4 for blocks of 16, 10, 8, and block_size / 2.25 otherwise."
    )
    dpace_alpha: float = Field(0.5, ge=0.0, lt=1.0, description="Smoothing of D-PACE.")
    distillation: DistillationConfig = Field(default_factory=DistillationConfig, description="What the target would have said besides.")
    chunk_slots: PositiveInt = Field(1024, description="Slots whose logits are alive at one time.")


class TrainingEvaluationConfig(Section):
    """Held-out prompts that are decoded while training goes on, by a thread of its own with a copy of the weights.

    Precision and block size are those of ``evaluation``.
    """

    every_steps: Count = Field(0, description="Steps between two evaluations; the last step is one more. 0: none, and no target in memory.")
    prompts: PositiveInt = Field(8, description="Held-out prompts that are decoded each time.")
    max_new_tokens: PositiveInt = Field(64, description="Longest response, in tokens.")
    device: str | None = Field(
        None, pattern=r"^(cpu|cuda:\d+)$", description="Device of target and drafter copy. Default: that of the first replica."
    )


class TrainingConfig(Section):
    """The threaded training of the drafter."""

    devices: Annotated[tuple[Annotated[str, Field(pattern=r"^(cpu|cuda:\d+)$")], ...], Field(strict=False)] = Field(
        ("cpu", "cpu"), min_length=1, description="One replica and one thread per entry: cpu (repeatable) or cuda:N."
    )
    row_length: PositiveInt = Field(3072, description="Tokens in a packed row. Fixed: shapes never change.")
    num_anchors: PositiveInt = Field(512, description="Anchor slots of a row. Fixed; slots beyond a row's supervised positions stay empty.")
    rows_per_microstep: PositiveInt = Field(1, description="Rows in one forward and backward pass of one replica.")
    accumulation_steps: PositiveInt = Field(1, description="Passes whose gradients are added up before an optimiser step.")
    epochs: PositiveInt = Field(6, description="Passes over the training rows, at most.")
    max_steps: PositiveInt | None = Field(None, description="Optimiser steps. Default: as many as the epochs hold.")
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw", description="muon: Muon for matrices, AdamW for norms, at AdamW's learning rates. It adds a fixed time to each step: for large ones."
    )
    learning_rate: float = Field(6e-4, gt=0.0, description="Peak learning rate.")
    weight_decay: float = Field(0.0, ge=0.0, description="Decoupled weight decay of matrices; norms have none.")
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = Field((0.9, 0.95), description="AdamW moment decays.")
    max_grad_norm: float = Field(1.0, gt=0.0, description="Global gradient norm above which gradients are scaled down.")
    schedule: Literal["cosine", "wsd"] = Field("cosine", description="Learning rate after warm-up: cosine, or stable and then linear decay (wsd).")
    warmup_fraction: Fraction = Field(0.04, description="Share of the steps in which the learning rate rises.")
    decay_fraction: Fraction = Field(0.2, description="Share of the steps in which 'wsd' decays.")
    min_lr_fraction: Fraction = Field(0.0, description="Learning rate at the end, as a share of the peak.")
    precision: Literal["float32", "bfloat16", "fp8"] = Field(
        "bfloat16",
        description="Precision of the computation; masters are always float32. fp8: bfloat16, but layers and head multiply in fp8; needs CUDA.",
    )
    attention: Literal["auto", "fused", "flex"] = Field(
        "auto",
        description="Attention on CUDA: this project's fused kernels or torch's flex_attention; auto takes the kernels where they fit. Dense on CPU.",
    )
    activation_checkpointing: bool = Field(
        False, description="Keep only the input of each draft layer and run it again in the backward pass: less memory, a longer step."
    )
    compile: Literal["auto", "on", "off"] = Field("auto", description="torch.compile of the drafter; auto compiles on CUDA.")
    sync: Literal["all_reduce", "sharded"] = Field(
        "all_reduce",
        description="What replicas exchange: all_reduce sums all gradients everywhere; sharded gives each replica a part of masters and moments.",
    )
    cuda_graphs: Literal["auto"] | bool = Field(
        "auto",
        description="Launch each step as CUDA graphs: frees the processor, which GPUs of a process share; auto does so where the step is compiled.",
    )
    launcher: Literal["threads", "torchrun"] = Field(
        "threads", description="threads: all replicas in one process. torchrun: one process each, also on several hosts, started by torchrun."
    )
    feed: Literal["shards", "online"] = Field(
        "shards",
        description="Where rows come from. online: targets run beside the training, on target_devices, and nothing is extracted to disk.",
    )
    target_devices: Annotated[tuple[NumberedSpreadDevice, ...], Field(strict=False)] = Field(
        (),
        description="For 'online': one target thread per entry, cpu, cuda:N or several joined by +, also on GPUs that train. Default: target.device.",
    )
    queue_rows: PositiveInt = Field(16, description="Rows that the shared queue holds at most.")
    log_every: PositiveInt = Field(1, description="Steps between two records of metrics.")
    checkpoint_every: PositiveInt = Field(200, description="Steps between two checkpoints.")
    keep_checkpoints: PositiveInt = Field(2, description="Checkpoints kept; older ones are deleted.")
    compare_replicas_every: PositiveInt = Field(100, description="Steps between two comparisons of the replicas' weights.")
    max_nonfinite_steps: PositiveInt = Field(3, description="Steps in a row with non-finite gradients that are skipped before the run ends.")
    strict_memory: bool = Field(False, description="End the run if a GPU's reserved memory grows after the first step, instead of warning.")
    stall_timeout_s: float = Field(
        600.0, gt=0.0, description="Seconds without a finished step after which the run ends with what everyone waits for."
    )
    evaluation: TrainingEvaluationConfig = Field(
        default_factory=TrainingEvaluationConfig, description="How well drafts are accepted, as training goes on."
    )
    keep: Literal["best", "last"] = Field(
        "best",
        description="Weights to evaluate and export: those accepted best in training.evaluation (the last if it is off), or always the last.",
    )

    @property
    def evaluation_device(self) -> str:
        """Where evaluation during training takes place."""
        return self.evaluation.device or self.devices[0]

    def compiles(self, kind: str) -> bool:
        """Whether a replica on a device of this kind, 'cpu' or 'cuda', has its drafter compiled."""
        return self.compile == "on" or (self.compile == "auto" and kind == "cuda")

    def graphs(self, kind: str) -> bool:
        """Whether a replica on a device of this kind launches its steps as CUDA graphs."""
        return kind == "cuda" and (self.cuda_graphs is True or (self.cuda_graphs == "auto" and self.compiles(kind)))


class EvaluationSet(PromptSource):
    """A set of prompts to measure drafters on, never trained on."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", description="What its figures are called: metrics are eval/<name>/acceptance_length, …")
    source: str = Field(
        min_length=1,
        description="'builtin:humaneval', 'builtin:mtbench' (both turns), 'builtin:gsm8k', or a file or dataset as in data.sources.",
    )


class EvaluationConfig(Section):
    """Draft-and-verify decoding on held-out prompts and on sets."""

    num_prompts: PositiveInt = Field(32, description="Held-out prompts that are decoded.")
    sets: Annotated[tuple[EvaluationSet, ...], Field(strict=False)] = Field(
        (), description="Further prompts that are decoded; training prompts that occur in them are found."
    )
    max_new_tokens: PositiveInt = Field(128, description="Longest response, in tokens.")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Precision of decoding; losslessness is exact in float32.")
    served_dtype: Literal["auto", "float32", "bfloat16"] | None = Field(
        "auto",
        description="Precision of serving, in which speed is measured too where dtype is another; auto: target.dtype on CUDA. null: not measured.",
    )
    served_prompts: PositiveInt | None = Field(32, description="First prompts of each set that are decoded in served_dtype; null: all of them.")
    device: SpreadDevice = Field("cpu", description="Device of decoding; several joined by + share the target's layers.")
    block_size: int | None = Field(None, ge=2, description="Block size of decoding, at most the trained one. Default: the trained one.")
    batch_sizes: Annotated[tuple[PositiveInt, ...], Field(strict=False)] = Field(
        (1,), min_length=1, description="Requests that are decoded together; all combinations with temperatures and block_sizes are measured."
    )
    temperatures: Annotated[tuple[Temperature, ...], Field(strict=False)] = Field(
        (0.0,), min_length=1, description="Temperatures of decoding. Losslessness is always judged greedily, one request at a time."
    )
    block_sizes: Annotated[tuple[Annotated[int, Field(ge=2)], ...], Field(strict=False)] = Field(
        (), description="Further block sizes of decoding, to find the fastest; each takes as long as the evaluation itself."
    )
    cuda_graphs: Literal["auto"] | bool = Field("auto", description="Decode with CUDA graphs, with the drafter and without; auto does so on CUDA.")
    untrained_prompts: Count | None = Field(
        4, description="Prompts of each set on which the drafter is also measured before training; null: all of them."
    )


class TrackingConfig(Section):
    """Where metrics and artifacts go."""

    enabled: bool = Field(True, description="Record the run in MLflow.")
    uri: str | None = Field(None, description="MLflow tracking URI. Default: MLFLOW_TRACKING_URI, else SQLite in the workspace.")
    experiment: str = Field("dflash", min_length=1, description="MLflow experiment.")


class PipelineConfig(Section):
    """Everything one run needs."""

    run: RunConfig = Field(default_factory=RunConfig, description="Where the run lives.")
    target: TargetConfig = Field(description="The model to be made faster.")
    data: DataConfig = Field(description="Prompts and responses.")
    extraction: ExtractionConfig = Field(default_factory=ExtractionConfig, description="Hidden states.")
    drafter: DrafterConfig = Field(description="Shape of the drafter.")
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig, description="Loss.")
    training: TrainingConfig = Field(default_factory=TrainingConfig, description="Training.")
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig, description="Evaluation.")
    tracking: TrackingConfig = Field(default_factory=TrackingConfig, description="Tracking.")

    @model_validator(mode="after")
    def _rules_across_fields(self) -> PipelineConfig:
        problems = [*placeholder_problems(self), *cross_field_problems(self)]
        if problems:
            raise PydanticCustomError("cross_field", "{text}", {"text": "; ".join(map(str, problems)), "problems": problems})
        return self

    @property
    def digest(self) -> str:
        """sha256 (hex) of the canonical JSON of all settings."""
        return digest_of(self.model_dump(mode="json"))

    @property
    def rows_per_step(self) -> int:
        """Rows of one optimiser step over all replicas."""
        return len(self.training.devices) * self.training.accumulation_steps * self.training.rows_per_microstep

    @property
    def served_dtype(self) -> Literal["float32", "bfloat16"] | None:
        """The precision, other than its own, in which the evaluation measures speed as well; None where there is none."""
        evaluation, asked = self.evaluation, self.evaluation.served_dtype
        if asked == "auto":
            asked = None if "cpu" in devices_of(evaluation.device) else self.target.dtype
        return None if asked == evaluation.dtype else asked

    @property
    def target_devices(self) -> tuple[str, ...]:
        """Devices of the targets that feed an online training, one per thread; none where shards do."""
        if self.training.feed == "shards":
            return ()
        own = "cuda:0" if self.target.device == "cuda" else self.target.device
        return self.training.target_devices or (own,) * len(devices_of(own))  # a spread target is kept busy by as many threads


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> PipelineConfig:
    """Read a YAML file, apply overrides such as ``training.max_steps=50`` and check it.

    Raises:
        ConfigError: the file is missing, not YAML, or a setting is wrong; names file, field path, value and remedy.
    """
    return parse_config(read_tree(PipelineConfig, path, overrides), str(path))


def parse_config(tree: Mapping[str, Any], source: str = "config") -> PipelineConfig:
    """Check a nested mapping. Raises ``ConfigError`` as ``load_config`` does."""
    return parse_as(PipelineConfig, tree, source)
