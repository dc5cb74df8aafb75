"""The stages of one run: what each depends on, where its results lie, and how it is run.

A stage's key is a digest of exactly what its result depends on: its own settings, the files it reads and the keys before
it. Its folder is named by the key, so a changed setting runs again what depends on it and nothing else, and going back to
the old setting finds the old results. ``run_stage`` returns at once when a verified result is there, and otherwise resumes
whatever partial work it finds.

    plan = Plan(load_config("configs/demo.yaml"))
    for name in STAGES:
        run_stage(plan, name)
"""

from __future__ import annotations

import functools
import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from dflash_core.checks import check_environment, check_schedule, check_target
from dflash_core.config import PipelineConfig, annotated_yaml, digest_of
from dflash_core.data import SampleTable, build_responses, write_samples
from dflash_core.drafter import DFlashConfig, DFlashDrafter, default_tap_layers, export_drafter
from dflash_core.errors import DFlashError, TargetError, TrainingError
from dflash_core.evaluation import EvaluationResult, evaluate_drafter
from dflash_core.feed import pack_rows
from dflash_core.shards import ShardDataset, expected_of, extract
from dflash_core.stages import (
    Manifest,
    MetricSink,
    Progress,
    Stopwatch,
    atomic_write,
    file_sha256,
    make_ready,
    no_metrics,
    no_progress,
    stage_lock,
    write_json_atomic,
)
from dflash_core.target import TargetInfo, TargetModel, TargetVocabulary, load_tokenizer, resolve_target
from dflash_core.target.fetch import is_path
from dflash_core.training import WarmUpReport, initial_drafter, train
from dflash_core.training import warm_up as warm_up_replicas

STAGES = ("target", "responses", "samples", "shards", "warm_up", "train", "evaluate", "export")

# Raised by hand when a stage gives another result for the same input; results of older versions are then made again.
CODE_VERSIONS = {"target": 1, "responses": 1, "samples": 1, "shards": 1, "train": 1, "evaluate": 1, "export": 1}

_TARGET = "target.json"

# Settings of training that change how it is run and watched, not what comes out.
_OPERATIONAL = {"queue_rows", "log_every", "checkpoint_every", "keep_checkpoints", "compare_replicas_every", "stall_timeout_s"}

# Files that a stage makes anew from the rest of its folder; where others are damaged, it begins from nothing.
_REPAIRABLE = {"shards": ("*",), "train": ("final/*", "training.json"), "evaluate": ("evaluation.json",)}
_NOT_A_RESULT = {"train": ("checkpoints/*",)}  # may be deleted to save space
_CHECKED_BY_READER = {"shards": ("shard-*.safetensors",)}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StagePlan:
    """Where a stage stands. ``key`` and ``folder`` are None while something they depend on is not known yet."""

    name: str
    key: str | None
    folder: Path | None
    manifest: Manifest | None
    why_not: str | None

    @property
    def cached(self) -> bool:
        return self.manifest is not None


@dataclass(frozen=True)
class StageResult:
    """A stage that is done: its manifest, and whether it was found done."""

    name: str
    folder: Path
    manifest: Manifest
    cached: bool
    seconds: float


class Plan:
    """The stages of one configuration, looked up afresh at every question. Also holds the target while stages share it."""

    def __init__(self, config: PipelineConfig, source: str = "config"):
        """Check what can be checked before any work.

        Raises:
            ConfigError: a file, a device or a setting does not fit; names field, value and remedy.
        """
        self.config = config
        self.source = source
        self.workspace = config.run.workspace
        check_environment(config, source)
        self._info = _target_on_this_machine(config)
        if self._info is not None:
            check_target(config, self._info, source)
        self._input_digests: dict[Path, str] = {}
        self._target: tuple[torch.dtype, str, TargetModel] | None = None

    @property
    def run_folder(self) -> Path:
        """Folder of the run: configuration, summary, report."""
        return self.workspace / "runs" / f"{self.config.run.name}-{self.config.digest[:8]}"

    @property
    def run_id(self) -> str:
        """Name of the run, with a digest of its settings."""
        return self.run_folder.name

    @property
    def info(self) -> TargetInfo:
        """What is known of the target. Raises ``TargetError`` before the stage 'target' has run."""
        if self._info is None:
            raise TargetError(f"The target {self.config.target.model} is not here yet. Run the stage 'target' first.")
        return self._info

    def learn_target(self, info: TargetInfo) -> None:
        """Take note of the target once it is here, and check the settings against it."""
        check_target(self.config, info, self.source)
        self._info = info

    def target_model(self, dtype: str, device: str) -> TargetModel:
        """The loaded target; one at a time, shared by the stages that want the same precision and device."""
        wanted = getattr(torch, dtype)
        if self._target is None or self._target[:2] != (wanted, device):
            self._target = None
            model = TargetModel.from_pretrained(self.info, dtype=wanted, device=device, trust_remote_code=self.config.target.trust_remote_code)
            self._target = (wanted, device, model)
        return self._target[2]

    def release_target(self) -> None:
        """Let go of the loaded target and its memory."""
        self._target = None

    def key(self, name: str) -> str | None:
        """Digest of everything the stage's result depends on; None while that is not known."""
        if name == "warm_up":
            return self.key("train")
        if name == "target":
            return digest_of(["target", CODE_VERSIONS["target"], self.config.target.model, self.config.target.revision])
        if self._info is None:
            return None
        depends_on: dict[str, Callable[[], dict[str, Any]]] = {
            "responses": self._responses_depends_on,
            "samples": self._samples_depends_on,
            "shards": self._shards_depends_on,
            "train": self._train_depends_on,
            "evaluate": self._evaluate_depends_on,
            "export": self._export_depends_on,
        }
        return digest_of([name, CODE_VERSIONS[name], depends_on[name]()])

    def stage(self, name: str) -> StagePlan:
        """Where a stage stands now, after looking at its files."""
        key = self.key(name)
        if key is None:
            return StagePlan(name, None, None, None, "the target has not been fetched")
        if name == "warm_up":
            reason = "not needed, training is done" if self.stage("train").cached else "runs in the process that trains, every time"
            return StagePlan(name, key, None, None, reason)
        folder = self._folder(name, key)
        manifest = Manifest.read(folder)
        if manifest is None:
            partial = folder.is_dir() and any(path.name != ".lock" for path in folder.iterdir())
            return StagePlan(name, key, folder, None, "begun, will be resumed" if partial else self._what_is_new(name, key))
        if manifest.key != key:
            return StagePlan(name, key, folder, None, "its manifest is of other settings")
        problem = manifest.problem(folder)
        if problem is None and name == "target":
            problem = self._problem_of_target(folder)
        return StagePlan(name, key, folder, None if problem else manifest, problem)

    @property
    def stages(self) -> dict[str, StagePlan]:
        """Every stage by name, in order."""
        return {name: self.stage(name) for name in STAGES}

    def folder(self, name: str) -> Path:
        """Folder of a stage. Raises ``DFlashError`` while its key is not known."""
        key = self.key(name)
        if key is None:
            raise DFlashError(f"The folder of the stage '{name}' is not known before the stage 'target' has run.")
        return self._folder(name, key)

    def _folder(self, name: str, key: str) -> Path:
        return self.workspace / "stages" / f"{name}-{key[:12]}"

    def _problem_of_target(self, folder: Path) -> str | None:
        if self._info is None:
            return "the target's files are gone"
        same = json.loads((folder / _TARGET).read_bytes()) == json.loads(json.dumps(self._info.to_dict()))
        return None if same else "the target's files have changed"

    def _what_is_new(self, name: str, key: str) -> str:
        others = sorted((self.workspace / "stages").glob(f"{name}-*")) if (self.workspace / "stages").is_dir() else []
        return f"no result for these settings (results for {len(others)} others are kept)" if others else "never run"

    def _digest_of_input(self, path: Path) -> str:
        if path not in self._input_digests:
            self._input_digests[path] = file_sha256(path)
        return self._input_digests[path]

    def _responses_depends_on(self) -> dict[str, Any]:
        data = self.config.data
        files = {item.source: self._digest_of_input(item.path) for item in data.sources if item.path is not None}
        depends: dict[str, Any] = {
            "sources": [item.model_dump(mode="json") for item in data.sources],
            "files": files,
            "system_prompt": data.system_prompt,
            "template_arguments": data.template_arguments,
            "regenerate": data.regenerate,
            "max_rejected_fraction": data.max_rejected_fraction,
            "target": self.info.digest,
            "tokenizer": [self.info.tokenizer_digest, self.info.template_digest],
        }
        if data.regenerate != "never":
            depends["generation"] = data.generation.model_dump(mode="json")
            depends["dtype"] = self.config.target.dtype
            depends["seed"] = self.config.run.seed if data.generation.temperature > 0 else None
            depends["room"] = [data.max_length, data.min_response_tokens]  # a prompt that leaves less for a response is rejected
        if data.regenerate == "auto" and data.response_cache is not None:
            depends["response_cache"] = self._digest_of_input(data.response_cache)
        return depends

    def _samples_depends_on(self) -> dict[str, Any]:
        data = self.config.data
        return {
            "responses": self.key("responses"),
            "max_length": data.max_length,
            "min_response_tokens": data.min_response_tokens,
            "heldout_fraction": data.heldout_fraction,
        }

    def _shards_depends_on(self) -> dict[str, Any]:
        return {
            "samples": self.key("samples"),
            "taps": list(self.tap_layers),
            "dtype": self.config.target.dtype,
            "extraction": self.config.extraction.model_dump(mode="json"),
        }

    def _train_depends_on(self) -> dict[str, Any]:
        start = self.config.drafter.initial_checkpoint
        return {
            "shards": self.key("shards"),
            "drafter": self.config.drafter.model_dump(mode="json"),
            "start": self._digest_of_input(start / "model.safetensors") if start else None,
            "objective": self.config.objective.model_dump(mode="json"),
            "training": self.config.training.model_dump(mode="json", exclude=_OPERATIONAL),
            "seed": self.config.run.seed,
        }

    def _evaluate_depends_on(self) -> dict[str, Any]:
        return {"train": self.key("train"), "evaluation": self.config.evaluation.model_dump(mode="json")}

    def _export_depends_on(self) -> dict[str, Any]:
        return {"evaluate": self.key("evaluate"), "target": [self.info.name, self.info.revision]}  # which its config.json and its card name

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """0-based target layers whose outputs are tapped."""
        return self.config.drafter.tap_layers or default_tap_layers(self.info.num_layers, self.config.num_taps)


def run_stage(
    plan: Plan,
    name: str,
    *,
    progress: Progress = no_progress,
    on_metrics: MetricSink = no_metrics,
    stop: threading.Event | None = None,
) -> StageResult:
    """Run one stage, or find it done; partial work of a killed process is resumed.

    Why it is run is told the log: as a warning where a finished stage was damaged since.
    Warm-up has no result on disk: it is ``warm_up`` below, and training calls it where it is missing.

    Raises:
        DFlashError: the stage cannot be done; the message says what to do. What is finished so far is kept.
    """
    if name == "warm_up":
        raise ValueError("warm_up leaves nothing on disk: call pipeline.warm_up")
    watch = Stopwatch()
    found = plan.stage(name)
    if found.manifest is not None and found.folder is not None:
        return StageResult(name, found.folder, found.manifest, True, watch.seconds)
    folder, key = plan.folder(name), plan.key(name)
    assert key is not None
    with stage_lock(folder):
        found = plan.stage(name)  # another process may have finished it while this one waited for nothing but the lock
        if found.manifest is not None:
            return StageResult(name, folder, found.manifest, True, watch.seconds)
        damaged = Manifest.read(folder) is not None
        logger.log(logging.WARNING if damaged else logging.INFO, "%s is run: %s", name, found.why_not)
        make_ready(folder, key, _REPAIRABLE.get(name, ()))
        counts = _RUNNERS[name](plan, folder, progress, on_metrics, stop)
        manifest = Manifest.write(
            folder, stage=name, key=key, counts=counts, seconds=watch.seconds, code_version=CODE_VERSIONS[name],
            leave_out=_NOT_A_RESULT.get(name, ()), checked_by_reader=_CHECKED_BY_READER.get(name, ()),
        )  # fmt: skip
    return StageResult(name, folder, manifest, False, watch.seconds)


def warm_up(plan: Plan) -> WarmUpReport | None:
    """Warm up the replicas of a plan for the training that follows in this process; None if training is done already.

    Raises:
        WarmUpError: not called on the main thread.
        DFlashError: the stage 'shards' has not run.
    """
    if plan.stage("train").cached:
        return None
    plan.release_target()
    planned_steps(plan)
    return warm_up_replicas(
        plan.config, run_id=plan.run_id, dataset=_shards(plan), info=plan.info, vocabulary=_vocabulary(plan), folder=plan.folder("train")
    )


def planned_steps(plan: Plan) -> int:
    """Optimiser steps of the training, from the lengths of the samples: known, and checked, before anything is extracted.

    Raises:
        ConfigError: the data cannot fill the steps that are asked for.
        DataError: the stage 'samples' has not run.
    """
    training = plan.config.training
    rows = _rows_of_an_epoch(plan.folder("samples") / "train.parquet", training.row_length)
    available = training.epochs * rows // plan.config.rows_per_step
    check_schedule(plan.config, available, plan.source)
    return training.max_steps or available


@functools.lru_cache(maxsize=16)
def _rows_of_an_epoch(samples: Path, row_length: int) -> int:
    return len(pack_rows(SampleTable.open(samples).lengths, row_length, seed=0, epoch=0))  # as many for every seed and epoch


def write_summary(plan: Plan, results: Mapping[str, StageResult], *, mlflow_run_id: str | None = None) -> Path:
    """Write ``summary.json`` and the resolved configuration into the run's folder; returns the path of the summary."""
    figures = evaluation_of(results["evaluate"].folder)
    trained = figures.trained
    summary = {
        "run": plan.run_id,
        "lossless": figures.lossless,
        "acceptance_length": {"mean_of_requests": trained.acceptance.mean_of_requests, "pooled": trained.acceptance.pooled},
        "acceptance_length_untrained": figures.untrained.acceptance.mean_of_requests if figures.untrained else None,
        "acceptance_per_position": list(trained.acceptance.per_position),
        "target_passes_saved_per_token": trained.target_passes_saved_per_token,
        "speedup": trained.speedup,
        "tokens_per_second": {
            "training": results["train"].manifest.counts["tokens_per_second"],
            "decoding": trained.tokens_per_second,
            "decoding_without_drafter": trained.baseline_tokens_per_second,
        },
        "stages": {name: {"seconds": round(result.seconds, 3), "cached": result.cached} for name, result in results.items()},
        "mlflow_run_id": mlflow_run_id,
        "export_path": str(drafter_folder(results["export"].folder).resolve()),
        "config_digest": plan.config.digest,
    }
    with atomic_write(plan.run_folder / "config.yaml") as temporary:
        temporary.write_text(annotated_yaml(plan.config), encoding="utf-8")
    write_json_atomic(plan.run_folder / "summary.json", summary)
    return plan.run_folder / "summary.json"


def evaluation_of(folder: Path) -> EvaluationResult:
    """The result that the stage 'evaluate' left in its folder."""
    return EvaluationResult.model_validate_json((folder / "evaluation.json").read_bytes())


def drafter_folder(folder: Path) -> Path:
    """The folder to serve, within the folder of the stage 'export'."""
    return folder / "drafter"


def _target_on_this_machine(config: PipelineConfig) -> TargetInfo | None:
    try:
        return resolve_target(config.target, download=False)
    except TargetError:
        if is_path(config.target.model) or Path(config.target.model).is_dir():
            raise  # nobody would fetch it: the path is wrong, or something is wrong with what is there
        return None


def _run_target(plan: Plan, folder: Path, progress: Progress, on_metrics: MetricSink, stop: threading.Event | None) -> dict[str, Any]:
    info = resolve_target(plan.config.target, progress=progress)
    plan.learn_target(info)
    write_json_atomic(folder / _TARGET, info.to_dict())
    return {"name": info.name, "revision": info.revision, "digest": info.digest, "layers": info.num_layers, "vocabulary": info.vocab_size}


def _run_responses(plan: Plan, folder: Path, progress: Progress, on_metrics: MetricSink, stop: threading.Event | None) -> dict[str, Any]:
    target = plan.config.target

    def generate(prompts: list[list[int]], generation: Any, /, *, seeds: list[int]) -> Any:
        return plan.target_model(target.dtype, target.device).generate(prompts, generation, seeds=seeds)  # loaded when it is first needed

    tokenizer = load_tokenizer(plan.info.path, target.trust_remote_code)
    return dict(build_responses(plan.config, tokenizer, generate, folder, target_digest=plan.info.digest, progress=progress))


def _run_samples(plan: Plan, folder: Path, progress: Progress, on_metrics: MetricSink, stop: threading.Event | None) -> dict[str, Any]:
    tokenizer = load_tokenizer(plan.info.path, plan.config.target.trust_remote_code)
    counts = write_samples(
        plan.config,
        tokenizer,
        plan.folder("responses"),
        folder,
        tokenizer_digest=plan.info.tokenizer_digest,
        template_digest=plan.info.template_digest,
        progress=progress,
    )
    return dict(counts)


def _run_shards(plan: Plan, folder: Path, progress: Progress, on_metrics: MetricSink, stop: threading.Event | None) -> dict[str, Any]:
    target, taps = plan.config.target, plan.tap_layers
    planned_steps(plan)
    model = plan.target_model(target.dtype, target.device)
    return extract(
        plan.config.extraction,
        plan.info,
        lambda ids_BT, mask_BT: model.hidden_states(ids_BT, mask_BT, taps),
        SampleTable.open(plan.folder("samples") / "train.parquet"),
        folder,
        tap_layers=taps,
        target_dtype=target.dtype,
        code_version=CODE_VERSIONS["shards"],
        progress=progress,
    )


def _run_train(plan: Plan, folder: Path, progress: Progress, on_metrics: MetricSink, stop: threading.Event | None) -> dict[str, Any]:
    plan.release_target()
    total = planned_steps(plan)

    def on_step(step: int, metrics: Mapping[str, float]) -> None:
        on_metrics(step, metrics)
        progress(step, total, "steps")

    result = train(
        plan.config,
        run_id=plan.run_id,
        dataset=_shards(plan),
        info=plan.info,
        vocabulary=_vocabulary(plan),
        folder=folder,
        on_metrics=on_step,
        stop=stop,
    )
    if not result.finished:
        raise TrainingError(f"Training was stopped after step {result.steps} of {result.total_steps}. The same command goes on from there.")
    return {
        "steps": result.steps,
        "skipped_steps": result.skipped_steps,
        "training_seconds": result.seconds,
        "tokens_per_second": round(result.steps * plan.config.rows_per_step * plan.config.training.row_length / result.seconds, 1),
        **{f"final_{name}": result.metrics[name] for name in ("loss", "token_accuracy") if name in result.metrics},
    }


def _run_evaluate(plan: Plan, folder: Path, progress: Progress, on_metrics: MetricSink, stop: threading.Event | None) -> dict[str, Any]:
    evaluation = plan.config.evaluation
    untrained = initial_drafter(plan.config, _drafter_config(plan), plan.info) if evaluation.untrained_prompts else None
    result = evaluate_drafter(
        plan.config,
        plan.target_model(evaluation.dtype, evaluation.device),
        _trained_drafter(plan),
        SampleTable.open(plan.folder("samples") / "heldout.parquet"),
        folder,
        untrained=untrained,
        progress=progress,
    )
    return result.headline()


def _run_export(plan: Plan, folder: Path, progress: Progress, on_metrics: MetricSink, stop: threading.Event | None) -> dict[str, Any]:
    destination = drafter_folder(folder)
    export_drafter(_trained_drafter(plan), plan.info, destination, facts=_card_facts(plan))  # verifies what it has written
    return {"weights": _drafter_config(plan).num_parameters(), "bytes": (destination / "model.safetensors").stat().st_size}


def _shards(plan: Plan) -> ShardDataset:
    return ShardDataset(plan.folder("shards"), expect=expected_of(plan.info, plan.tap_layers))


def _vocabulary(plan: Plan) -> TargetVocabulary:
    return TargetVocabulary.from_pretrained(plan.info, dtype=getattr(torch, plan.config.target.dtype))


def _drafter_config(plan: Plan) -> DFlashConfig:
    return DFlashConfig.from_target(plan.info, plan.config.drafter)


def _trained_drafter(plan: Plan) -> DFlashDrafter:
    """The trained drafter as it is served: its float32 masters, rounded to bfloat16."""
    drafter = DFlashDrafter(_drafter_config(plan))
    drafter.load_state_dict(load_file(plan.folder("train") / "final" / "model.safetensors"))
    return drafter.to(torch.bfloat16)


def _card_facts(plan: Plan) -> dict[str, object]:
    config, samples = plan.config, plan.stage("samples").manifest
    figures = evaluation_of(plan.folder("evaluate"))
    trained = figures.trained
    return {
        "training data": f"{samples.counts['train']} conversations, {samples.counts['train_supervised']:,} response tokens" if samples else "",
        "digest of the data": f"`{plan.key('samples')}`",
        "training": f"{config.objective.weighting} weighting, learning rate {config.training.learning_rate:g}, {config.training.schedule}",
        "evaluated on": f"{figures.prompts} held-out prompts, greedy, {figures.max_new_tokens} new tokens at most, {figures.dtype}, {figures.device}",
        "lossless": f"{figures.lossless:.1%} of the prompts",
        "acceptance length": f"{trained.acceptance.mean_of_requests:.2f} (mean of requests), {trained.acceptance.pooled:.2f} (pooled)",
        "speed": f"{trained.speedup:.2f} times the target alone, same code and caches",
    }


_RUNNERS = {
    "target": _run_target,
    "responses": _run_responses,
    "samples": _run_samples,
    "shards": _run_shards,
    "train": _run_train,
    "evaluate": _run_evaluate,
    "export": _run_export,
}
