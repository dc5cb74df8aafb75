"""What each stage does: a function of the plan and the stage's folder, whose result is the counts of its manifest.

Most of it is what it takes to make the parts of a run (target, vocabulary, features, judge, drafter) from the plan.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from dflash_core.checks import check_schedule
from dflash_core.claims import card_facts
from dflash_core.data import SampleTable, build_responses, write_samples
from dflash_core.data.driver import Generate
from dflash_core.data.endpoint import EndpointClient
from dflash_core.drafter import DFlashConfig, DFlashDrafter, export_drafter
from dflash_core.errors import StoppedError
from dflash_core.evaluation import (
    EvaluationPrompt,
    EvaluationResult,
    HeldoutJudge,
    evaluate_drafter,
    heldout_prompts,
    measure_served,
    set_prompts,
)
from dflash_core.feed import LiveSamples, pack_rows
from dflash_core.plan import CODE_VERSIONS, TARGET, Plan
from dflash_core.shards import ShardCard, ShardDataset, expected_of, extract
from dflash_core.shards.columns import card_of
from dflash_core.shards.extract import counts_of, is_to_do, target_threads
from dflash_core.shards.job import ShardJob
from dflash_core.shards.store import holds, pull, push, put_beside
from dflash_core.shards.trim import count_used
from dflash_core.stages import MetricSink, Progress, no_progress, write_json_atomic
from dflash_core.target import TargetModel, TargetVocabulary, load_tokenizer, resolve_target
from dflash_core.target.requests import drawn_requests, generation_by
from dflash_core.training import RecentMetrics, initial_drafter, read_metrics, train
from dflash_core.training.checkpoints import kept_weights


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


def used_tokens(plan: Plan) -> dict[str, int]:
    """How many tokens of the training data are read as context, and for what the target says at them, by ``extraction.trim``'s names for them.

    Raises:
        DataError: the stage 'samples' has not run.
    """
    return dict(_used_tokens(plan.folder("samples") / "train.parquet", plan.config.drafter.farthest_seen))


@functools.lru_cache(maxsize=16)
def _used_tokens(samples: Path, window: int) -> dict[str, int]:
    return count_used(SampleTable.open(samples), window)


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


def measure_drafter(
    plan: Plan, drafter: DFlashDrafter, folder: Path, *, untrained: DFlashDrafter | None = None, progress: Progress = no_progress
) -> EvaluationResult:
    """Decode the prompts of a plan with a drafter, as it is served and then as it is proven lossless, with one target at a time in memory."""
    config, evaluation, prompts, served = plan.config, plan.config.evaluation, evaluation_prompts(plan, progress), None
    if precision := config.served_dtype:
        served = measure_served(config, plan.target_model(precision, evaluation.device), drafter, prompts, folder, progress=progress)
    target = plan.target_model(evaluation.dtype, evaluation.device)
    return evaluate_drafter(config, target, drafter, prompts, folder, untrained=untrained, served=served, progress=progress)


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
    if in_store(plan, folder):
        pull(_address(plan, folder), folder, progress)
        ShardCard.read(folder).require(expected_of(plan.info, plan.tap_layers), folder)
        return counts_of(folder)
    counts = make_missing_shards(plan, folder, progress)
    if plan.config.extraction.store:
        push(folder, _address(plan, folder), progress)
    return counts


def in_store(plan: Plan, folder: Path) -> bool:
    """Whether the stage 'shards' finds its dataset finished in the store, and takes it from there."""
    return bool(plan.config.extraction.store) and holds(_address(plan, folder))


def _address(plan: Plan, folder: Path) -> str:
    return f"{plan.config.extraction.store}/{folder.name}"


def make_missing_shards(plan: Plan, folder: Path, progress: Progress) -> dict[str, Any]:
    """Make what is missing of the shards, with a target only where something is; returns the counts."""
    target, extraction, taps = plan.config.target, plan.config.extraction, plan.tap_layers
    samples, shared = SampleTable.open(plan.folder("samples") / "train.parquet"), _address(plan, folder) if extraction.store else None
    card = card_of(extraction, plan.info, samples, taps, target.dtype, CODE_VERSIONS["shards"], plan.config.drafter.farthest_seen)
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
        window=plan.config.drafter.farthest_seen,
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
    if not plan.extracts or plan.stage("shards").cached or in_store(plan, folder):
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
        window=plan.config.drafter.farthest_seen,
    )


def run_train(plan: Plan, folder: Path, progress: Progress, on_metrics: MetricSink) -> dict[str, Any]:
    """Train, or go on from the last checkpoint; returns the counts. Raises ``StoppedError`` where another process was told to stop."""
    planned_steps(plan)  # refuses what the data cannot fill, and names the file, which training does not know
    result = train(
        plan.config,
        run_id=plan.run_id,
        dataset=features_of(plan),
        info=plan.info,
        vocabulary=vocabulary_of(plan),
        folder=folder,
        judge=judge_of(plan),
        on_metrics=on_metrics,
        progress=progress,
    )
    if not result.finished:  # whoever is told to stop here is interrupted; this came from a vote
        raise StoppedError(f"Another process was told to stop, so all have stopped after step {result.steps:,} of {result.total_steps:,}.")
    best = {"best_step": result.best.step, "best_acceptance_length": result.best.acceptance_length} if result.best else {}
    return {
        **best,
        "steps": result.steps,
        "skipped_steps": result.skipped_steps,
        "training_seconds": result.seconds,
        "tokens_per_second": round(result.steps * plan.config.rows_per_step * plan.config.training.row_length / result.seconds, 1),
        **{f"final_{name}": value for name, value in RecentMetrics.of(read_metrics(folder / "metrics.jsonl")).means().items()},
    }


def _run_evaluate(plan: Plan, folder: Path, progress: Progress, on_metrics: MetricSink) -> dict[str, Any]:
    compares = plan.config.evaluation.untrained_prompts != 0
    untrained = initial_drafter(plan.config, drafter_config_of(plan), plan.info) if compares else None
    return measure_drafter(plan, trained_drafter(plan), folder, untrained=untrained, progress=progress).metrics()


def _run_export(plan: Plan, folder: Path, progress: Progress, on_metrics: MetricSink) -> dict[str, Any]:
    destination = drafter_folder(folder)
    export_drafter(
        trained_drafter(plan), plan.info, destination, facts=card_facts(plan, evaluation_of(plan.folder("evaluate")))
    )  # verifies what it has written
    return {"weights": drafter_config_of(plan).num_parameters(), "bytes": (destination / "model.safetensors").stat().st_size}


def judge_of(plan: Plan) -> Callable[[], HeldoutJudge] | None:
    """Makes who evaluates during training, with the target beside the replicas; None where nobody is asked to."""
    config, during = plan.config, plan.config.training.evaluation
    if not during.every_steps:
        return None

    def load() -> HeldoutJudge:
        prompts = heldout_prompts(SampleTable.open(plan.folder("samples") / "heldout.parquet"), during.prompts)
        return HeldoutJudge(config, plan.target_model(config.evaluation.dtype, config.training.evaluation_device), prompts)

    return load


def features_of(plan: Plan) -> ShardDataset | LiveSamples:
    """What training gets hidden states from. The target that earlier stages had loaded is let go of, once it is taken over where it is needed."""
    if plan.extracts:
        plan.release_target()
        return ShardDataset(plan.folder("shards"), expect=expected_of(plan.info, plan.tap_layers))

    def load(devices: Sequence[str]) -> list[TargetModel]:
        models = plan.target_models(plan.config.target.dtype, devices)
        plan.release_target()
        return models

    return LiveSamples(SampleTable.open(plan.folder("samples") / "train.parquet"), load)


def vocabulary_of(plan: Plan) -> TargetVocabulary:
    """The target's embedding and head alone, on the host."""
    return TargetVocabulary.from_pretrained(plan.info, dtype=getattr(torch, plan.config.target.dtype))


def drafter_config_of(plan: Plan) -> DFlashConfig:
    """The shape of the drafter, of which the target's is a part."""
    return DFlashConfig.from_target(plan.info, plan.config.drafter)


def trained_drafter(plan: Plan) -> DFlashDrafter:
    """The trained drafter as it is served: the weights that training keeps, rounded to bfloat16."""
    folder, drafter = plan.folder("train"), DFlashDrafter(drafter_config_of(plan))
    facts = json.loads((folder / "training.json").read_bytes())
    drafter.load_state_dict(load_file(folder / kept_weights(plan.config.training.keep, has_best=bool(facts.get("best")))))
    return drafter.to(torch.bfloat16)


RUNNERS = {
    "target": _run_target,
    "responses": _run_responses,
    "samples": _run_samples,
    "shards": _run_shards,
    "train": run_train,
    "evaluate": _run_evaluate,
    "export": _run_export,
}
