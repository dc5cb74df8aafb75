"""What each stage of a run takes: rows, bytes on disk, memory of each device, time.

Time is operations and bytes over the rates of the idle device, and how much of them a stage reaches; expect a factor of two either way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dflash_core.config import PipelineConfig, devices_of
from dflash_core.data.drawn import draws
from dflash_core.estimate.amounts import Amounts, amounts_of, rows_of
from dflash_core.estimate.memory import Sizes
from dflash_core.estimate.rates import Rates, measure_rates
from dflash_core.evaluation.ways import further_ways
from dflash_core.plan import Plan
from dflash_core.runners import planned_steps, used_tokens
from dflash_core.shards.columns import all_columns, trimmed_bytes
from dflash_core.shards.format import TOKENS
from dflash_core.training.replica import compute_dtype
from dflash_core.words import counted

# Share of the rate of a matrix product that a stage reaches, and seconds that a layer takes whatever it computes: on two cores from runs of the demo,
# on an H200 from benchmarks/RESULTS.md (of the ceiling 0.71 in extraction and 0.73 in training with an 8B target, 0.26 and 0.45 with one of 135M).
_EFFICIENCY = {"cpu": {"decoding": 0.15, "shards": 0.55, "train": 0.5}, "cuda": {"decoding": 0.6, "shards": 0.6, "train": 0.6}}
_SECONDS_OF_A_LAYER = {"cpu": 1e-3, "cuda": 2e-5}
_FP8_SPEEDUP = 1.4
_REQUEST = 40  # tokens of one that the target writes
_LOADING_S = 5.0
_COMPILING_S = 50.0
_ACCEPTANCE_LENGTH = 2.0  # of a drafter that nobody has measured yet


@dataclass(frozen=True)
class Estimate:
    """Of one stage; None where there is nothing to say. ``rows`` counts what the stage makes; ``memory`` is bytes of each device.

    trimmable_bytes: of the shards: what ``extraction.trim`` leaves out, or would
    """

    rows: str
    disk_bytes: int | None = None
    memory: Mapping[str, int] | None = None
    seconds: float | None = None
    trimmable_bytes: int | None = None

    @property
    def memory_bytes(self) -> int | None:
        """Of the device that needs most."""
        return max(self.memory.values()) if self.memory else None


@dataclass(frozen=True)
class Forecast:
    """All stages, by name, and how fast this machine is."""

    stages: Mapping[str, Estimate]
    rates: Rates


def estimate(plan: Plan) -> Forecast:
    """Estimate every stage of a plan.

    Raises:
        TargetError: the target is not on this machine yet.
        ConfigError: the samples are there and do not last for the steps that are asked for.
    """
    config, info = plan.config, plan.info
    rates = measure_rates(devices_of(config.target.device)[0], getattr(torch, config.target.dtype))
    work = _Work(plan, amounts_of(plan), Sizes(config, info), rates)
    stages = {
        "target": Estimate(counted(info.num_layers, "layer")),
        "responses": work.responses(),
        "samples": work.samples(),
        "shards": work.shards(),
        "warm_up": work.warm_up(),
        "train": work.train(),
        "evaluate": work.evaluate(),
        "export": Estimate(f"{work.weights:,} weights", work.weights * 2, None, 2.0),
    }
    return Forecast(stages, rates)


class _Work:
    """The stages of one plan."""

    def __init__(self, plan: Plan, amounts: Amounts, sizes: Sizes, rates: Rates):
        self._plan, self._amounts, self._sizes, self._rates = plan, amounts, sizes, rates
        self._config: PipelineConfig = plan.config
        self._about = "" if amounts.exact else "about "
        self._kind = "cpu" if "cpu" in devices_of(plan.config.target.device) else "cuda"
        info = plan.info
        self._layer = info.hidden_size * (2 * info.num_heads + 2 * info.num_kv_heads) * info.head_dim + 3 * info.hidden_size * info.intermediate_size
        self._head = info.hidden_size * info.vocab_size
        self.weights = sizes.drafter.num_parameters()
        guess = max(1, self._config.training.epochs * math.ceil(amounts.tokens / self._config.training.row_length) // self._config.rows_per_step)
        self._steps = planned_steps(plan) if amounts.exact else self._config.training.max_steps or guess
        self._training = sizes.training(amounts.longest_prompt, self._steps * self._config.rows_per_step).needed()

    def responses(self) -> Estimate:
        data, amounts = self._config.data, self._amounts
        rows, disk = self._about + counted(amounts.conversations, "conversation"), amounts.conversations * 600
        if data.regenerate == "never" or (data.regenerate == "auto" and data.response_cache is not None):
            return Estimate(rows, disk, None, 0.0)
        if data.generation.endpoints:
            return Estimate(rows, disk)  # how fast servers are is not known here
        info, together = self._plan.info, min(data.generation.batch_size, amounts.conversations)
        positions = together * (100 + data.generation.max_new_tokens // 2)
        cached = 2 * info.num_layers * info.num_kv_heads * info.head_dim * compute_dtype(self._config.target.dtype).itemsize * positions
        tokens = amounts.response_tokens * amounts.conversations // amounts.samples
        tokens += draws(self._config) * min(_REQUEST, data.drawn.max_new_tokens)
        seconds = tokens / together * (self._pass(together, self._config.target.dtype) + cached / self._rates.vector) + _LOADING_S
        return Estimate(rows, disk, self._sizes.responses(amounts.longest_prompt).needed(), seconds)

    def samples(self) -> Estimate:
        tokens = self._amounts.tokens
        return Estimate(self._about + counted(tokens, "token"), tokens * 5, None, tokens / 200_000)

    def shards(self) -> Estimate:
        if not self._plan.extracts:
            return Estimate("nothing")
        extraction, taps, tokens = self._config.extraction, len(self._plan.tap_layers), self._amounts.tokens
        whole, trimmed = (all_columns(extraction.model_copy(update={"trim": trim}), taps, self._plan.info.hidden_size) for trim in (False, True))
        disk, trimmable = tokens * sum(column.token_bytes for column in whole), None
        if self._amounts.exact:
            trimmable = trimmed_bytes(trimmed, {TOKENS: tokens, **used_tokens(self._plan)})
            disk -= trimmable if extraction.trim else 0
        devices = extraction.devices or (self._config.target.device,)
        at_once = sum(len(devices_of(device)) for device in devices) if self._kind == "cuda" else 1
        return Estimate(
            counted(math.ceil(self._amounts.samples / extraction.samples_per_shard), "shard"), disk, self._sizes.shards().needed(),
            self._prefill(tokens) / at_once + _LOADING_S, trimmable,
        )  # fmt: skip

    def warm_up(self) -> Estimate:
        training, targets = self._config.training, len(self._config.target_devices)
        return Estimate(
            counted(len(training.devices), "replica") + (f", {counted(targets, 'target')}" if targets else ""), None, self._training,
            (_COMPILING_S if training.compiles(torch.device(training.devices[0]).type) else 0.0) + _LOADING_S * (len(training.devices) + targets),
        )  # fmt: skip

    def train(self) -> Estimate:
        config, training = self._config, self._config.training
        during = -(-self._steps // training.evaluation.every_steps) if training.evaluation.every_steps else 0  # of the last step, too
        element = compute_dtype(training.precision).itemsize
        moments = 1 if training.optimizer == "muon" else 2  # muon keeps no second one of matrices
        disk = self.weights * (4 * (1 + (1 + moments) * training.keep_checkpoints) + (element if during else 0))
        on_cpu, rows = training.devices[0] == "cpu", self._steps * config.rows_per_step
        reached = self._rates.product * _EFFICIENCY["cpu" if on_cpu else "cuda"]["train"] * (_FP8_SPEEDUP if training.precision == "fp8" else 1.0)
        seconds = rows * self._operations_of_a_row() / (reached * (1 if on_cpu else len(training.devices)))
        if targets := config.target_devices:  # whichever side is slower, where each has devices of its own; on one CPU they share it
            feed = self._prefill(rows * training.row_length) / (1 if on_cpu else len(targets))
            apart = not on_cpu and not {part for device in targets for part in devices_of(device)} & set(training.devices)
            seconds = max(seconds, feed) if apart else seconds + feed
        made = f"{counted(self._steps, 'step')} of {counted(config.rows_per_step, 'row')}" + (f", {counted(during, 'evaluation')}" if during else "")
        return Estimate(made, disk, self._training, seconds)

    def evaluate(self) -> Estimate:
        settings, served = self._config.evaluation, self._config.served_dtype
        sizes = [min(settings.num_prompts, self._amounts.heldout), *(rows_of(item) for item in settings.sets)]
        prompts = sum(sizes)
        compared, in_served = (
            sum(size if most is None else min(most, size) for size in sizes) for most in (settings.untrained_prompts, settings.served_prompts)
        )
        block = settings.block_size or self._config.drafter.block_size
        ways = further_ways(settings, block)
        seconds = prompts * self._decoded(1, block, settings.dtype) + compared * self._pass(block, settings.dtype)
        made = counted(prompts, "prompt")
        if served:  # where most texts part from the target's own, which is then scored again
            seconds += in_served * (self._decoded(1, block, served) + self._pass(1, served))
            made += f", {in_served} in {served}"
        seconds += sum(
            (in_served if served else prompts) / way.batch_size * self._decoded(way.batch_size, way.block_size, served or settings.dtype)
            for way in ways
        )
        return Estimate(
            made + (f", {1 + len(ways)} ways of decoding" if ways else ""), 10**6,
            self._sizes.evaluation(self._amounts.longest_prompt).needed(),
            seconds * min(settings.max_new_tokens, self._config.data.max_length) + _LOADING_S * (2 if served else 1),
        )  # fmt: skip

    def _decoded(self, rows: int, block: int, dtype: str) -> float:
        """Seconds for a token of so many requests: by the target alone, and with the drafter in fewer passes over more tokens."""
        return self._pass(rows, dtype) + self._pass(rows * block, dtype) / _ACCEPTANCE_LENGTH

    def _pass(self, tokens: int, dtype: str) -> float:
        """Seconds of a pass of the target that decodes so many tokens."""
        compute = 2 * (self._plan.info.num_layers * self._layer + self._head) * tokens / (self._rates.product * _EFFICIENCY[self._kind]["decoding"])
        return max(compute, self._sizes.target(dtype) / self._rates.vector) + _SECONDS_OF_A_LAYER[self._kind] * self._plan.info.num_layers

    def _prefill(self, tokens: int) -> float:
        """Seconds of the target's tapped layers over so many tokens of samples, on one device."""
        deepest = max(self._plan.tap_layers) + 1 if self._config.extraction.teacher == "none" else self._plan.info.num_layers
        return 2 * deepest * self._layer * tokens / (self._rates.product * _EFFICIENCY[self._kind]["shards"])

    def _operations_of_a_row(self) -> int:
        """Of the products of a training row, forward and backward: the drafter's three times, those with the vocabulary twice."""
        config, drafter = self._config, self._sizes.drafter
        H, T, S = drafter.hidden_size, config.training.row_length, drafter.block_size
        Q, q, kv = config.training.num_anchors * S, drafter.num_heads * drafter.head_dim, drafter.num_kv_heads * drafter.head_dim
        layer = Q * H * (2 * q + 3 * drafter.intermediate_size) + (T + Q) * H * 2 * kv
        again = 4 if config.training.activation_checkpointing else 3
        distils = config.objective.distillation.weight > 0 and config.extraction.teacher == "last_hidden"
        labelled = config.training.num_anchors * (S - drafter.spec.first_predicting_slot)
        return 2 * (3 * T * drafter.feature_size * H + again * drafter.num_layers * layer + (3 if distils else 2) * labelled * self._head)
