"""What an evaluation found, in figures that are recomputed from the records of the prompts and from nothing else.

Losslessness is proven in float32, in which nobody serves, and speed there may be far from what users see: on a GPU true-float32 products of a few
rows are slow. So speed is measured in the precision of serving as well, ``served``, and ``as_served`` has the figures that stand for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from dflash_core.decoding import Acceptance, Generation, acceptance_length, measure_acceptance
from dflash_core.decoding.statistics import full_rounds
from dflash_core.evaluation.intervals import Floats, Interval, Place, bootstrap, ratio
from dflash_core.evaluation.records import PromptRecord

_SPEEDS = ("speedup", "speedup_low", "speedup_high", "tokens_per_second", "baseline_tokens_per_second")
_OF_BOTH = ("diverged", "diverged_beyond_noise", "acceptance_length", "acceptance_length_pooled")


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StageSeconds(_Frozen):
    """Wall time by stage, summed over the prompts; ``other`` is bookkeeping between the passes."""

    prefill: float
    draft: float
    verify: float
    other: float
    total: float


class Intervals(_Frozen):
    """95 % confidence intervals of figures, by bootstrap over conversations (``intervals.py``)."""

    acceptance_length: Interval
    acceptance_length_pooled: Interval
    speedup: Interval


class Figures(_Frozen):
    """A drafter on a set of prompts, beside the target alone on the same prompts.

    acceptance:                    see ``Acceptance``
    target_passes:                 passes of the target, prefill included
    target_passes_saved_per_token: passes that the baseline took more, per new token: 0 saves nothing, 1 would be all
    tokens_per_second:             new tokens per second of the whole request, prefill included
    speedup:                       tokens_per_second / baseline_tokens_per_second
    intervals:                     None where there are fewer than two conversations
    """

    prompts: int
    tokens: int
    acceptance: Acceptance
    target_passes: int
    draft_passes: int
    target_passes_saved_per_token: float
    tokens_per_second: float
    baseline_tokens_per_second: float
    speedup: float
    intervals: Intervals | None
    seconds: StageSeconds
    baseline_seconds: StageSeconds


class PromptFigures(_Frozen):
    """One prompt in a table. ``acceptance_length`` is None if the answer has no round, that of the untrained drafter also if it was not asked."""

    set: str
    id: str
    conversation: str
    prompt_tokens: int
    new_tokens: int
    acceptance_length: float | None
    acceptance_length_untrained: float | None
    target_passes: int
    speedup: float
    lossless: bool


class Measured(_Frozen):
    """A drafter on a set of prompts, or on all of them.

    lossless:               share of the prompts whose text is the target's own, up to divergences that rounding explains (none in float32)
    diverged:               prompts whose text differs from the target's own at all
    diverged_beyond_noise:  those where the target's logit gap exceeds the noise of scoring its own text again
    """

    prompts: int
    lossless: float
    diverged: int
    diverged_beyond_noise: int
    trained: Figures
    untrained: Figures | None

    def headline(self) -> dict[str, float]:
        """The figures a summary or a tracker wants, flat."""
        trained = self.trained
        figures = {
            "lossless": self.lossless,
            "diverged": self.diverged,
            "diverged_beyond_noise": self.diverged_beyond_noise,
            "acceptance_length": trained.acceptance.mean_of_requests,
            "acceptance_length_pooled": trained.acceptance.pooled,
            "target_passes_saved_per_token": trained.target_passes_saved_per_token,
            "speedup": trained.speedup,
            "tokens_per_second": trained.tokens_per_second,
            "baseline_tokens_per_second": trained.baseline_tokens_per_second,
        }
        if trained.intervals is not None:
            for name, interval in trained.intervals:
                figures |= {f"{name}_low": interval.low, f"{name}_high": interval.high}
        figures |= {f"accepted_slot_{slot}": share for slot, share in enumerate(trained.acceptance.per_position, start=1)}
        if self.untrained is not None:
            figures["acceptance_length_untrained"] = self.untrained.acceptance.mean_of_requests
        return figures


class Way(_Frozen):
    """How prompts were decoded: so many together, at a temperature, with blocks of a size."""

    batch_size: int
    temperature: float
    block_size: int


class WayFigures(_Frozen):
    """A drafter on all prompts, beside the target alone, decoded in another way.

    diverged: prompts whose text differs from that of the target alone in the same way; None where tokens are drawn
    """

    way: Way
    diverged: int | None
    figures: Figures


class InPrecision(Measured):
    """A drafter in one precision. Greedy decoding, one request at a time.

    The figures of all prompts are its own; those of the held-out prompts and of each set are in ``sets``, those of other ways of
    decoding, on all prompts, in ``ways``.
    """

    dtype: str
    sets: dict[str, Measured]
    ways: tuple[WayFigures, ...] = ()
    rows: tuple[PromptFigures, ...]


class EvaluationResult(InPrecision):
    """A drafter as it will be used, and how it was measured.

    served: figures in the precision of serving, on the first prompts of each set, if that is another and was asked for; other ways of decoding
            are then measured there alone
    """

    target: str
    target_digest: str
    drafter_digest: str
    prompts_digest: str
    device: str
    threads: int
    block_size: int
    max_new_tokens: int
    temperature: float
    served: InPrecision | None = None

    @property
    def as_served(self) -> InPrecision:
        """The figures that speak for the drafter's speed: those in the precision of serving, or these where there are no others."""
        return self.served or self

    def headline(self) -> dict[str, float]:
        """As of ``Measured``, with the speed as it is served; of both precisions what else differs, as ``speedup_float32``, ``diverged_bfloat16``."""
        return self._beside_served(super().headline(), self.served)

    def headline_of(self, name: str) -> dict[str, float]:
        """The same of one set."""
        return self._beside_served(self.sets[name].headline(), self.served and self.served.sets[name])

    def _beside_served(self, own: dict[str, float], measured: Measured | None) -> dict[str, float]:
        if self.served is None or measured is None:
            return own
        theirs = measured.headline()
        return {
            **{name: value for name, value in own.items() if name not in _SPEEDS},
            **{name: theirs[name] for name in _SPEEDS if name in theirs},
            **{f"{name}_{self.dtype}": own[name] for name in _SPEEDS if name in own},
            **{f"{name}_{self.served.dtype}": theirs[name] for name in _OF_BOTH},
        }

    def metrics(self) -> dict[str, float]:
        """The headline figures of all prompts, of each set as ``eval/<set>/<name>``, and of each way as ``eval/batch-1_t-0.0_block-8/<name>``."""
        of_sets = {f"eval/{name}/{figure}": value for name in self.sets for figure, value in self.headline_of(name).items()}
        of_ways = {
            f"eval/batch-{found.way.batch_size}_t-{found.way.temperature}_block-{found.way.block_size}/{figure}": value
            for found in self.as_served.ways
            for figure, value in (
                ("speedup", found.figures.speedup),
                ("tokens_per_second", found.figures.tokens_per_second),
                ("baseline_tokens_per_second", found.figures.baseline_tokens_per_second),
                ("acceptance_length", found.figures.acceptance.mean_of_requests),
            )
        }
        return self.headline() | of_sets | of_ways


def in_precision(records: Sequence[PromptRecord], block_size: int, dtype: str, ways: tuple[WayFigures, ...] = ()) -> InPrecision:
    """The figures of these prompts, at least one, of all and set by set."""
    sets = dict.fromkeys(record.set for record in records)
    return InPrecision(
        **dict(measured(records, block_size)),
        dtype=dtype,
        sets={name: measured([record for record in records if record.set == name], block_size) for name in sets},
        ways=ways,
        rows=tuple(prompt_figures(record, block_size) for record in records),
    )


def measured(records: Sequence[PromptRecord], block_size: int) -> Measured:
    """The figures of these prompts, at least one."""
    compared = [record for record in records if record.untrained is not None]
    return Measured(
        prompts=len(records),
        lossless=sum(record.lossless for record in records) / len(records),
        diverged=sum(record.divergence is not None for record in records),
        diverged_beyond_noise=sum(record.divergence is not None and record.divergence.beyond_noise for record in records),
        trained=_figures_of(records, [record.trained for record in records], block_size),
        untrained=_figures_of(compared, [record.untrained for record in compared if record.untrained], block_size) if compared else None,
    )


def _figures_of(records: Sequence[PromptRecord], generations: Sequence[Generation], block_size: int) -> Figures:
    places = [(record.set, record.conversation) for record in records]
    return figures(generations, [record.baseline for record in records], block_size, places)


def figures(generations: Sequence[Generation], baselines: Sequence[Generation], block_size: int, places: Sequence[Place] = ()) -> Figures:
    """Sum up a drafter's answers and the target's own to the same prompts. Without ``places`` there are no intervals."""
    tokens = sum(len(generation.tokens) for generation in generations)
    passes = sum(generation.target_passes for generation in generations)
    seconds, baseline_seconds = _seconds(generations), _seconds(baselines)
    own_tokens = sum(len(baseline.tokens) for baseline in baselines)
    speed, own_speed = tokens / seconds.total, own_tokens / baseline_seconds.total
    return Figures(
        prompts=len(generations),
        tokens=tokens,
        acceptance=measure_acceptance(generations, block_size),
        target_passes=passes,
        draft_passes=sum(generation.draft_passes for generation in generations),
        target_passes_saved_per_token=(tokens - passes) / tokens,
        tokens_per_second=speed,
        baseline_tokens_per_second=own_speed,
        speedup=speed / own_speed,
        intervals=_intervals(generations, baselines, block_size, places) if places else None,
        seconds=seconds,
        baseline_seconds=baseline_seconds,
    )


def _intervals(generations: Sequence[Generation], baselines: Sequence[Generation], block_size: int, places: Sequence[Place]) -> Intervals | None:
    columns = []
    for generation, baseline in zip(generations, baselines, strict=True):
        rounds, length = full_rounds(generation, block_size), acceptance_length(generation, block_size)
        spent = [len(generation.tokens), generation.seconds, len(baseline.tokens), baseline.seconds]
        columns.append([length or 0.0, length is not None, len(rounds) + sum(rounds), len(rounds), *spent])

    def speedup(sums: Floats) -> Floats:
        tokens, seconds, own_tokens, own_seconds = sums[..., 4], sums[..., 5], sums[..., 6], sums[..., 7]
        return (tokens / seconds) / (own_tokens / own_seconds)

    mean = bootstrap(columns, places, lambda sums: ratio(sums[..., 0], sums[..., 1]))
    pooled = bootstrap(columns, places, lambda sums: ratio(sums[..., 2], sums[..., 3]))
    faster = bootstrap(columns, places, speedup)
    return Intervals(acceptance_length=mean, acceptance_length_pooled=pooled, speedup=faster) if mean and pooled and faster else None


def prompt_figures(record: PromptRecord, block_size: int) -> PromptFigures:
    """The row of one prompt."""
    one = figures([record.trained], [record.baseline], block_size)
    return PromptFigures(
        set=record.set,
        id=record.id,
        conversation=record.conversation,
        prompt_tokens=record.prompt_tokens,
        new_tokens=one.tokens,
        acceptance_length=acceptance_length(record.trained, block_size),
        acceptance_length_untrained=acceptance_length(record.untrained, block_size) if record.untrained is not None else None,
        target_passes=one.target_passes,
        speedup=one.speedup,
        lossless=record.lossless,
    )


def _seconds(generations: Sequence[Generation]) -> StageSeconds:
    prefill = sum(generation.prefill_seconds for generation in generations)
    draft = sum(generation.draft_seconds for generation in generations)
    verify = sum(generation.verify_seconds for generation in generations)
    total = sum(generation.seconds for generation in generations)
    return StageSeconds(prefill=prefill, draft=draft, verify=verify, other=total - prefill - draft - verify, total=total)
