"""What the model card of a run states: on which prompts its drafter was trained and how, and what was measured of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_core.config import PipelineConfig, PromptSource
from dflash_core.data.builtin import licence_of
from dflash_core.evaluation import sets_table
from dflash_core.evaluation.result import EvaluationResult, InPrecision

if TYPE_CHECKING:
    from dflash_core.plan import Plan


def card_facts(plan: Plan, figures: EvaluationResult) -> dict[str, object]:
    """Label to value, in the order of the card. ``figures`` are those of the plan's own evaluation."""
    config, samples = plan.config, plan.stage("samples").manifest
    trained, served = figures.trained, figures.as_served
    return {
        "training prompts": ", ".join(map(_named, config.data.sources)),
        "training data": f"{samples.counts['train']} conversations, {samples.counts['train_supervised']:,} response tokens" if samples else "",
        "digest of the data": f"`{plan.key('samples')}`",
        "training": _recipe(plan),
        "digest of the training's settings": f"`{plan.key('train')}`",
        "evaluated on": f"{figures.prompts} prompts, greedy, {figures.max_new_tokens} new tokens at most, {figures.dtype}, {figures.device}",
        "lossless": f"{figures.lossless:.1%} of the prompts",
        "acceptance length": f"{trained.acceptance.mean_of_requests:.2f} (mean of requests), {trained.acceptance.pooled:.2f} (pooled)",
        **({f"in {served.dtype}": _as_served(served)} if figures.served else {}),
        "speed": f"{served.trained.speedup:.2f} times the target alone in {served.dtype}, same code and caches",
        **{
            f"on {row['set']}": f"acceptance length {row['acceptance length']}, speed {row[f'speed-up, {served.dtype}']}"
            for row in sets_table(figures)
        },
    }


def _named(source: PromptSource) -> str:
    """A source and its terms. Of a file the name alone: where it lies is nobody's business."""
    name = source.path.name if source.path is not None else source.source
    return f"{name} ({licence_of(source.source) or 'terms not known here'})"


def _recipe(plan: Plan) -> str:
    config = plan.config
    training, objective, trained = config.training, config.objective, plan.stage("train").manifest
    steps = f"{trained.counts['steps']:,} steps of " if trained else ""
    share = objective.distillation.weight
    return ", ".join(
        [
            f"{steps}{config.rows_per_step} rows of {training.row_length} tokens with {training.num_anchors} anchors",
            f"{objective.weighting} weighting" + (f" and {share:g} of distillation" if share else ""),
            f"learning rate {training.learning_rate:g}, {training.schedule}, {training.optimizer}",
            f"{training.precision}, begun from {_start(config)}, seed {config.run.seed}",
        ]
    )


def _start(config: PipelineConfig) -> str:
    if config.drafter.initial_checkpoint is not None:
        return "an earlier drafter"
    return "the target's last layers" if config.drafter.initial_weights == "target" else "random weights"


def _as_served(served: InPrecision) -> str:
    parted = f"{served.diverged} of {served.prompts} texts part from the target's own, {served.diverged_beyond_noise} beyond the noise of rounding"
    return f"acceptance length {served.trained.acceptance.mean_of_requests:.2f}, {parted}"
