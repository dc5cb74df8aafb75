"""The stages of one run, and how each is run. What they depend on and where they stand is in ``plan.py``.

``run_stage`` returns at once when a verified result is there, and otherwise resumes whatever partial work it finds.

    plan = Plan(load_config("configs/demo.yaml"))
    for name in STAGES:
        run_stage(plan, name)                       # but 'warm_up', and 'shards' where plan.extracts is False
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from dflash_core.checks import check_schedule
from dflash_core.config import annotated_yaml
from dflash_core.data import SampleTable, build_responses, write_samples
from dflash_core.data.driver import Generate
from dflash_core.data.endpoint import EndpointClient
from dflash_core.drafter import DFlashConfig, DFlashDrafter, export_drafter
from dflash_core.errors import ConfigError, Problem
from dflash_core.evaluation import EvaluationPrompt, EvaluationResult, HeldoutJudge, evaluate_drafter, heldout_prompts, set_prompts, sets_table
from dflash_core.feed import LiveSamples, pack_rows
from dflash_core.plan import CODE_VERSIONS, TARGET, Plan
from dflash_core.shards import ShardCard, ShardDataset, expected_of, extract
from dflash_core.shards.extract import card_of, counts_of, is_to_do, target_threads
from dflash_core.shards.job import ShardJob
from dflash_core.shards.store import holds, pull, push, put_beside
from dflash_core.stages import (
    Manifest,
    MetricSink,
    Progress,
    StageBusyError,
    Stopwatch,
    atomic_write,
    make_ready,
    no_metrics,
    no_progress,
    stage_lock,
    write_json_atomic,
)
from dflash_core.target import TargetModel, TargetVocabulary, load_tokenizer, resolve_target
from dflash_core.target.requests import drawn_requests, generation_by
from dflash_core.training import WarmUpReport, initial_drafter, train
from dflash_core.training import warm_up as warm_up_replicas
from dflash_core.training.checkpoints import BEST

# Files that a stage makes anew from the rest of its folder; where others are damaged, it begins from nothing.
_REPAIRABLE = {"shards": ("*",), "train": ("final/*", "training.json"), "evaluate": ("evaluation.json",)}
_LOOK_AGAIN_S = 0.5  # whether another process has finished its stage
_NOT_A_RESULT = {"train": ("checkpoints/*",)}  # may be deleted to save space
_CHECKED_BY_READER = {"shards": ("shard-*.safetensors",)}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StageResult:
    """A stage that is done: its manifest, and whether it was found done."""

    name: str
    folder: Path
    manifest: Manifest
    cached: bool
    seconds: float


def run_stage(
    plan: Plan,
    name: str,
    *,
    progress: Progress = no_progress,
    on_metrics: MetricSink = no_metrics,
    share: bool = False,
) -> StageResult:
    """Run one stage, or find it done; partial work of a killed process is resumed.

    ``share``: where another process runs the stage 'shards', help it.

    Why it is run is told the log: as a warning where a finished stage was damaged since.
    Warm-up has no result on disk: it is ``warm_up`` below, and training calls it where it is missing.

    Raises:
        DFlashError: the stage cannot be done; the message says what to do. What is finished so far is kept.
    """
    if name == "warm_up":
        raise ValueError("warm_up leaves nothing on disk: call pipeline.warm_up")
    if name == "shards" and not plan.extracts:
        raise ConfigError(plan.source, [Problem("training.feed", "online", "there is nothing to extract", "Set training.feed to shards")])
    watch = Stopwatch()
    found = plan.stage(name)
    if found.manifest is not None and found.folder is not None:
        return StageResult(name, found.folder, found.manifest, True, watch.seconds)
    folder, key = plan.folder(name), plan.key(name)
    assert key is not None
    if share and name == "shards" and _is_busy(folder):
        return _help_with_shards(plan, folder, progress, watch)
    with stage_lock(folder):
        found = plan.stage(name)  # another process may have finished it while this one waited for nothing but the lock
        if found.manifest is not None:
            return StageResult(name, folder, found.manifest, True, watch.seconds)
        damaged = Manifest.read(folder) is not None
        logger.log(logging.WARNING if damaged else logging.INFO, "%s is run: %s", name, found.why_not)
        make_ready(folder, key, _REPAIRABLE.get(name, ()), sweep=name != "shards")  # their writer sweeps before each shard that it claims
        counts = _RUNNERS[name](plan, folder, progress, on_metrics)
        manifest = Manifest.write(
            folder, stage=name, key=key, counts=counts, seconds=watch.seconds, code_version=CODE_VERSIONS[name],
            leave_out=_NOT_A_RESULT.get(name, ()), checked_by_reader=_CHECKED_BY_READER.get(name, ()),
        )  # fmt: skip
    return StageResult(name, folder, manifest, False, watch.seconds)


def _is_busy(folder: Path) -> bool:
    try:
        with stage_lock(folder):
            return False
    except StageBusyError:
        return True


def _help_with_shards(plan: Plan, folder: Path, progress: Progress, watch: Stopwatch) -> StageResult:
    """Extract beside the process that holds the stage, until it says that the stage is done. Takes its place should it die.

    What has to do with the store is for the other one to do.
    """
    if not _in_store(plan, folder):
        _extract(plan, folder, progress)
    while (found := plan.stage("shards").manifest) is None:
        if not _is_busy(folder):
            return run_stage(plan, "shards", progress=progress)
        time.sleep(_LOOK_AGAIN_S)
    return StageResult("shards", folder, found, False, watch.seconds)


def warm_up(plan: Plan) -> WarmUpReport | None:
    """Warm up the replicas of a plan for the training that follows in this process; None if training is done already.

    Raises:
        WarmUpError: not called on the main thread.
        DFlashError: the stage 'shards' has not run.
    """
    if plan.stage("train").cached:
        return None
    planned_steps(plan)
    return warm_up_replicas(
        plan.config, run_id=plan.run_id, dataset=_features(plan), info=plan.info, vocabulary=_vocabulary(plan), folder=plan.folder("train"),
        judge=_judge(plan),
    )  # fmt: skip


def train_beside(plan: Plan) -> None:
    """The part of a rank other than 0 in the stage 'train' of a run under torchrun. Rank 0 runs the stage, and writes all there is to write.

    Raises:
        DFlashError: as ``run_stage`` does, or because another process has gone.
    """
    if not plan.knows_target:
        plan.learn_target(resolve_target(plan.config.target))
    _run_train(plan, plan.folder("train"), no_progress, no_metrics)


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
        "intervals": trained.intervals.model_dump(mode="json") if trained.intervals else None,
        "sets": {name: found.headline() for name, found in figures.sets.items()},
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


def evaluation_prompts(plan: Plan, progress: Progress = no_progress) -> list[EvaluationPrompt]:
    """What drafters are measured on: held-out prompts, then every set. A set's answers between its turns are the target's, and are kept.

    Raises:
        DataError: the stage 'samples' has not run, or a set cannot be used.
    """
    config, evaluation = plan.config, plan.config.evaluation
    prompts = heldout_prompts(SampleTable.open(plan.folder("samples") / "heldout.parquet"), evaluation.num_prompts)
    if evaluation.sets:
        tokenizer, folder = load_tokenizer(plan.info.path, config.target.trust_remote_code), plan.workspace / "evaluation-sets"
        for item in evaluation.sets:
            prompts += set_prompts(
                config, item, plan.info, tokenizer, lambda: plan.target_model(evaluation.dtype, evaluation.device), folder, progress
            )
    return prompts


def drafter_folder(folder: Path) -> Path:
    """The folder to serve, within the folder of the stage 'export'."""
    return folder / "drafter"


def _run_target(plan: Plan, folder: Path, progress: Progress, on_metrics: MetricSink) -> dict[str, Any]:
    info = resolve_target(plan.config.target, progress=progress)
    plan.learn_target(info)
    write_json_atomic(folder / TARGET, info.to_dict())
    return {"name": info.name, "revision": info.revision, "digest": info.digest, "layers": info.num_layers, "vocabulary": info.vocab_size}


def _run_responses(plan: Plan, folder: Path, progress: Progress, on_metrics: MetricSink) -> dict[str, Any]:
    config, target, info = plan.config, plan.config.target, plan.info
    data, tokenizer = config.data, load_tokenizer(info.path, target.trust_remote_code)
    generate = generation_by(info, lambda: plan.target_model(target.dtype, target.device))
    drawn = drawn_requests(config, info, tokenizer, generate, progress)
    config = drawn.as_source_of(config) if drawn else config
    with contextlib.ExitStack() as stack:
        source: Generate | EndpointClient = generate
        if data.generation.endpoints and data.regenerate != "never":
            source = stack.enter_context(EndpointClient(data.generation, target.model, data.template_arguments))
        answers = drawn.answers if drawn else None
        counts = build_responses(config, tokenizer, source, folder, target_digest=info.digest, answers=answers, progress=progress)
    return {**counts, **(drawn.counts if drawn else {})}


def _run_samples(plan: Plan, folder: Path, progress: Progress, on_metrics: MetricSink) -> dict[str, Any]:
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


def _run_shards(plan: Plan, folder: Path, progress: Progress, on_metrics: MetricSink) -> dict[str, Any]:
    planned_steps(plan)
    if _in_store(plan, folder):
        pull(_address(plan, folder), folder, progress)
        ShardCard.read(folder).require(expected_of(plan.info, plan.tap_layers), folder)
        return counts_of(folder)
    counts = _extract(plan, folder, progress)
    if plan.config.extraction.store:
        push(folder, _address(plan, folder), progress)
    return counts


def _in_store(plan: Plan, folder: Path) -> bool:
    return bool(plan.config.extraction.store) and holds(_address(plan, folder))


def _address(plan: Plan, folder: Path) -> str:
    return f"{plan.config.extraction.store}/{folder.name}"


def _extract(plan: Plan, folder: Path, progress: Progress) -> dict[str, Any]:
    target, extraction, taps = plan.config.target, plan.config.extraction, plan.tap_layers
    samples, shared = SampleTable.open(plan.folder("samples") / "train.parquet"), _address(plan, folder) if extraction.store else None
    card = card_of(extraction, plan.info, samples, taps, target.dtype, CODE_VERSIONS["shards"])
    models = plan.target_models(target.dtype, extraction.devices or (target.device,)) if is_to_do(folder, card, shared) else []
    targets, heads = target_threads(models, extraction, taps)
    return extract(
        extraction,
        plan.info,
        targets,
        samples,
        folder,
        tap_layers=taps,
        target_dtype=target.dtype,
        code_version=CODE_VERSIONS["shards"],
        heads=heads,
        shared=shared,
        progress=progress,
    )


def shard_job(plan: Plan) -> ShardJob | None:
    """What processes elsewhere need to know to help with the stage 'shards'; None where there is nothing to help with.

    Where machines share a store, the samples are put there too.

    Raises:
        DFlashError: the stage 'samples' has not run, or the store cannot be used.
    """
    folder, store, name = plan.folder("shards"), plan.config.extraction.store, plan.folder("samples").name
    if not plan.extracts or plan.stage("shards").cached or _in_store(plan, folder):
        return None
    planned_steps(plan)
    samples = plan.folder("samples") / "train.parquet"
    return ShardJob(
        target=plan.config.target,
        target_digest=plan.info.digest,
        extraction=plan.config.extraction,
        tap_layers=plan.tap_layers,
        samples=put_beside(samples, f"{store}/{name}.parquet") if store else str(samples.resolve()),
        folder=folder.resolve(),
        shared=_address(plan, folder) if store else None,
        code_version=CODE_VERSIONS["shards"],
    )


def _run_train(plan: Plan, folder: Path, progress: Progress, on_metrics: MetricSink) -> dict[str, Any]:
    planned_steps(plan)  # refuses what the data cannot fill, and names the file, which training does not know
    result = train(
        plan.config,
        run_id=plan.run_id,
        dataset=_features(plan),
        info=plan.info,
        vocabulary=_vocabulary(plan),
        folder=folder,
        judge=_judge(plan),
        on_metrics=on_metrics,
        progress=progress,
    )
    best = {"best_step": result.best.step, "best_acceptance_length": result.best.acceptance_length} if result.best else {}
    return {
        **best,
        "steps": result.steps,
        "skipped_steps": result.skipped_steps,
        "training_seconds": result.seconds,
        "tokens_per_second": round(result.steps * plan.config.rows_per_step * plan.config.training.row_length / result.seconds, 1),
        **{f"final_{name}": result.metrics[name] for name in ("loss", "token_accuracy") if name in result.metrics},
    }


def _run_evaluate(plan: Plan, folder: Path, progress: Progress, on_metrics: MetricSink) -> dict[str, Any]:
    evaluation = plan.config.evaluation
    untrained = initial_drafter(plan.config, _drafter_config(plan), plan.info) if evaluation.untrained_prompts != 0 else None
    result = evaluate_drafter(
        plan.config,
        plan.target_model(evaluation.dtype, evaluation.device),
        _trained_drafter(plan),
        evaluation_prompts(plan, progress),
        folder,
        untrained=untrained,
        progress=progress,
    )
    return result.metrics()


def _run_export(plan: Plan, folder: Path, progress: Progress, on_metrics: MetricSink) -> dict[str, Any]:
    destination = drafter_folder(folder)
    export_drafter(_trained_drafter(plan), plan.info, destination, facts=_card_facts(plan))  # verifies what it has written
    return {"weights": _drafter_config(plan).num_parameters(), "bytes": (destination / "model.safetensors").stat().st_size}


def _judge(plan: Plan) -> Callable[[], HeldoutJudge] | None:
    """Makes who evaluates during training, with the target beside the replicas; None where nobody is asked to."""
    config, during = plan.config, plan.config.training.evaluation
    if not during.every_steps:
        return None

    def load() -> HeldoutJudge:
        prompts = heldout_prompts(SampleTable.open(plan.folder("samples") / "heldout.parquet"), during.prompts)
        return HeldoutJudge(config, plan.target_model(config.evaluation.dtype, config.training.evaluation_device), prompts)

    return load


def _features(plan: Plan) -> ShardDataset | LiveSamples:
    """What training gets hidden states from. The target that earlier stages had loaded is let go of, once it is taken over where it is needed."""
    if plan.extracts:
        plan.release_target()
        return ShardDataset(plan.folder("shards"), expect=expected_of(plan.info, plan.tap_layers))

    def load(devices: Sequence[str]) -> list[TargetModel]:
        models = plan.target_models(plan.config.target.dtype, devices)
        plan.release_target()
        return models

    return LiveSamples(SampleTable.open(plan.folder("samples") / "train.parquet"), load)


def _vocabulary(plan: Plan) -> TargetVocabulary:
    return TargetVocabulary.from_pretrained(plan.info, dtype=getattr(torch, plan.config.target.dtype))


def _drafter_config(plan: Plan) -> DFlashConfig:
    return DFlashConfig.from_target(plan.info, plan.config.drafter)


def _trained_drafter(plan: Plan) -> DFlashDrafter:
    """The trained drafter as it is served: the weights that training keeps, rounded to bfloat16."""
    folder, drafter = plan.folder("train"), DFlashDrafter(_drafter_config(plan))
    facts = json.loads((folder / "training.json").read_bytes())
    kept = BEST if plan.config.training.keep == "best" and facts.get("best") else facts["weights"]
    drafter.load_state_dict(load_file(folder / kept))
    return drafter.to(torch.bfloat16)


def _card_facts(plan: Plan) -> dict[str, object]:
    config, samples = plan.config, plan.stage("samples").manifest
    figures = evaluation_of(plan.folder("evaluate"))
    trained = figures.trained
    return {
        "training data": f"{samples.counts['train']} conversations, {samples.counts['train_supervised']:,} response tokens" if samples else "",
        "digest of the data": f"`{plan.key('samples')}`",
        "training": f"{config.objective.weighting} weighting, learning rate {config.training.learning_rate:g}, {config.training.schedule}",
        "evaluated on": f"{figures.prompts} prompts, greedy, {figures.max_new_tokens} new tokens at most, {figures.dtype}, {figures.device}",
        "lossless": f"{figures.lossless:.1%} of the prompts",
        "acceptance length": f"{trained.acceptance.mean_of_requests:.2f} (mean of requests), {trained.acceptance.pooled:.2f} (pooled)",
        "speed": f"{trained.speedup:.2f} times the target alone, same code and caches",
        **{f"on {row['set']}": f"acceptance length {row['acceptance length']}, speed {row['speed-up']}" for row in sets_table(figures)},
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
