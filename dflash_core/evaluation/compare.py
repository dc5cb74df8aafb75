"""Two drafters prompt by prompt: is the difference in acceptance length more than chance?

    comparison = compare(first, second)                     # two EvaluationResults on the same prompts
    comparison.difference, comparison.interval, comparison.p_value

Both drafted for the same prompts of the same target, so that what a prompt is like drops out of each difference. The interval of the mean
difference is a bootstrap over conversations. The p-value is of a sign-flip permutation test: if neither drafter were better, each
conversation's difference would have the other sign just as well (Fisher, "The Design of Experiments", 1935, ch. 21). It is exact with few
conversations, where the bootstrap is too sure of itself: five cannot bring it below 0.06.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import BaseModel, ConfigDict

from dflash_core.errors import InputError, Problem
from dflash_core.evaluation.intervals import Floats, Interval, Place, bootstrap, sums_of_conversations
from dflash_core.evaluation.result import EvaluationResult

SIGNIFICANCE = 0.05
_EXACT = 14  # conversations up to which all sign flips are tried
_FLIPS = 10_000
_SAME = ("target", "target_digest", "prompts_digest", "dtype", "block_size", "max_new_tokens", "temperature")


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True)
class Pair:
    """Acceptance lengths of two drafters on one prompt; None where an answer has no round."""

    place: Place
    id: str
    first: float | None
    second: float | None


class Paired(_Frozen):
    """The second drafter against the first, on prompts on which both have drafted.

    first, second: acceptance length, mean of requests
    difference:    second - first
    interval:      of the difference, 95 %; None for fewer than two conversations
    p_value:       two-sided, of the difference being none
    better, worse: prompts on which the second accepts more, or less
    needed:        conversations of this kind from which on a difference like this would show, about; None where it does, or there is none
    """

    prompts: int
    conversations: int
    first: float
    second: float
    difference: float
    interval: Interval | None
    p_value: float
    better: int
    worse: int
    needed: int | None

    @property
    def change(self) -> float:
        """The difference as a share of the first."""
        return self.second / self.first - 1.0

    @property
    def significant(self) -> bool:
        """Zero is outside the interval, and chance alone would do as much in less than one case of twenty."""
        clear = self.interval is not None and (self.interval.low > 0.0 or self.interval.high < 0.0)
        return clear and self.p_value < SIGNIFICANCE


class ComparedPrompt(_Frozen):
    """One prompt in a table."""

    set: str
    id: str
    first: float
    second: float


class Comparison(_Frozen):
    """Two evaluations side by side.

    first_name, second_name: what they are called in tables
    first_lossless, …:       share of prompts whose text is the target's own; None where it was not asked
    first_speedup, …:        over the target alone, each measured in its own evaluation, in the precision ``speed_dtype``
    overall, sets:           on all prompts, and on each set
    """

    first_name: str
    second_name: str
    first_lossless: float | None
    second_lossless: float
    first_speedup: float
    second_speedup: float
    speed_dtype: str
    overall: Paired
    sets: dict[str, Paired]
    rows: tuple[ComparedPrompt, ...]


def compare(first: EvaluationResult, second: EvaluationResult, first_name: str = "first", second_name: str = "second") -> Comparison:
    """Compare two evaluations of the same prompts. Speed is that of serving where both were measured in the same precision of serving.

    Raises:
        InputError: they differ in the target, the prompts or the settings, which the message names; or no prompt has a round.
    """
    differing = [(name, getattr(first, name), getattr(second, name)) for name in _SAME if getattr(first, name) != getattr(second, name)]
    if differing:
        remedy = "Evaluate both with the same configuration"
        problems = [Problem(name, theirs, f"{first_name} was measured with {ours!r}", remedy) for name, ours, theirs in differing]
        raise InputError(f"comparison with {second_name}", problems)
    pairs = [
        Pair((one.set, one.conversation), one.id, one.acceptance_length, other.acceptance_length)
        for one, other in zip(first.rows, second.rows, strict=True)
    ]
    if not _drafted(pairs):
        message = "on none of its prompts a block was drafted"
        raise InputError("comparison", [Problem("evaluation.max_new_tokens", first.max_new_tokens, message, "Raise it")])
    one, other = first.as_served, second.as_served
    if one.dtype != other.dtype:  # one of them is of before speed was measured as it is served
        one, other = first, second
    speedups = (one.trained.speedup, other.trained.speedup)
    return _comparison(pairs, first_name, second_name, (first.lossless, second.lossless), speedups, one.dtype)


def compare_with_untrained(evaluation: EvaluationResult, first_name: str, second_name: str) -> Comparison | None:
    """The drafter before training, first, and the trained one of the same evaluation, on the prompts that both have drafted for; None without any."""
    pairs = [Pair((row.set, row.conversation), row.id, row.acceptance_length_untrained, row.acceptance_length) for row in evaluation.rows]
    if evaluation.untrained is None or not _drafted(pairs):
        return None
    speedups = (evaluation.untrained.speedup, evaluation.trained.speedup)
    return _comparison(pairs, first_name, second_name, (None, evaluation.lossless), speedups, evaluation.dtype)


def _comparison(
    pairs: Sequence[Pair], first_name: str, second_name: str, lossless: tuple[float | None, float], speedups: tuple[float, float], speed_dtype: str
) -> Comparison:
    usable = _drafted(pairs)
    names = dict.fromkeys(pair.place[0] for pair, _, _ in usable)
    return Comparison(
        first_name=first_name,
        second_name=second_name,
        first_lossless=lossless[0],
        second_lossless=lossless[1],
        first_speedup=speedups[0],
        second_speedup=speedups[1],
        speed_dtype=speed_dtype,
        overall=paired(pairs),
        sets={name: paired([pair for pair in pairs if pair.place[0] == name]) for name in names},
        rows=tuple(ComparedPrompt(set=pair.place[0], id=pair.id, first=one, second=other) for pair, one, other in usable),
    )


def paired(pairs: Sequence[Pair]) -> Paired:
    """What the pairs say; at least one must have been drafted for by both."""
    usable = _drafted(pairs)
    places = [pair.place for pair, _, _ in usable]
    differences = np.array([other - one for _, one, other in usable])
    columns = np.stack([differences, np.ones(len(usable))], axis=1)
    sums_KC, _ = sums_of_conversations(columns, places)
    interval, difference = bootstrap(columns, places, lambda sums: sums[..., 0] / sums[..., 1]), float(differences.mean())
    p_value = sign_flip_test(sums_KC[:, 0])
    found = Paired(
        prompts=len(usable),
        conversations=len(sums_KC),
        first=float(np.mean([one for _, one, _ in usable])),
        second=float(np.mean([other for _, _, other in usable])),
        difference=difference,
        interval=interval,
        p_value=p_value,
        better=int((differences > 0).sum()),
        worse=int((differences < 0).sum()),
        needed=None,
    )
    return found if found.significant or difference == 0.0 else found.model_copy(update={"needed": _needed(found)})


def sign_flip_test(differences_K: Floats) -> float:
    """Share of sign flips of independent differences whose sum is at least as far from zero; all flips, or as many as are enough."""
    count = len(differences_K)
    if count <= _EXACT:
        signs = 1.0 - 2.0 * ((np.arange(2**count)[:, None] >> np.arange(count)) & 1)
        extra = 0
    else:
        signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(_FLIPS, count))
        extra = 1  # the signs that were found are one of the flips
    observed = abs(differences_K.sum()) - 1e-9 * np.abs(differences_K).sum()
    return (int((np.abs(signs @ differences_K) >= observed).sum()) + extra) / (len(signs) + extra)


def _needed(found: Paired) -> int:
    """From which number on half the interval's width, which shrinks with the root of it, is below the difference; six for the test's sake."""
    width = (found.interval.high - found.interval.low) / 2 if found.interval else 0.0
    return max(6, found.conversations + 1, math.ceil(found.conversations * (width / found.difference) ** 2))


def _drafted(pairs: Sequence[Pair]) -> list[tuple[Pair, float, float]]:
    return [(pair, pair.first, pair.second) for pair in pairs if pair.first is not None and pair.second is not None]
