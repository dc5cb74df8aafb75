"""How far a figure may be off because other prompts might have been asked: 95 % intervals by bootstrap over conversations.

Every figure here is a function of sums over prompts (a mean is a sum over a count), so that resampling is one product of a matrix of
multinomial counts with the sums of each conversation. Conversations are drawn, not their turns, which resemble each other; and within
their set, since how many prompts of each set there are is no accident. The interval is bias-corrected and accelerated (BCa; Efron, "Better
bootstrap confidence intervals", JASA 82, 1987, eq. 3.4–3.6 and 6.6), with a fixed seed.

Shapes: N prompts, K conversations, C summed columns, R resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

CONFIDENCE = 0.95
RESAMPLES = 2000
_AT_A_TIME = 100  # resamples whose counts are in memory together

Floats = npt.NDArray[np.float64]
Place = tuple[str, str]
"""(set, conversation) of a prompt"""


class Interval(BaseModel):
    """Bounds of a 95 % confidence interval."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    low: float
    high: float


def bootstrap(columns_NC: npt.ArrayLike, places: Sequence[Place], statistic: Callable[[Floats], Floats]) -> Interval | None:
    """Interval of ``statistic`` of the sums of ``columns_NC``; None for less than two conversations.

    Args:
        statistic: from sums [..., C] to figures [...].
    """
    sums_KC, sets = sums_of_conversations(columns_NC, places)
    if len(sums_KC) < 2:
        return None
    generator = np.random.default_rng(0)
    drawn_R = statistic(np.concatenate([_counts(generator, sets) @ sums_KC for _ in range(RESAMPLES // _AT_A_TIME)]))
    total_C = sums_KC.sum(0)
    low, high = np.quantile(drawn_R, _corrected(drawn_R, float(statistic(total_C)), statistic(total_C - sums_KC)))
    return Interval(low=float(low), high=float(high))


def sums_of_conversations(columns_NC: npt.ArrayLike, places: Sequence[Place]) -> tuple[Floats, list[str]]:
    """Sums [K, C] over the prompts of each conversation, sorted by set; and the set of each."""
    distinct = sorted(set(places))
    index_of = {place: index for index, place in enumerate(distinct)}
    columns = np.asarray(columns_NC, dtype=np.float64)
    sums_KC = np.zeros((len(distinct), columns.shape[1]))
    np.add.at(sums_KC, [index_of[place] for place in places], columns)
    return sums_KC, [name for name, _ in distinct]


def ratio(numerators: Floats, denominators: Floats) -> Floats:
    """Quotients, 1.0 where nothing was counted, as in ``measure_acceptance``."""
    counted = denominators > 0
    return np.where(counted, numerators / np.where(counted, denominators, 1.0), 1.0)


def _counts(generator: np.random.Generator, sets: list[str]) -> npt.NDArray[np.int64]:
    """How often each conversation is drawn [resamples, K]: as many of each set as there are."""
    sizes = [sets.count(name) for name in dict.fromkeys(sets)]
    return np.concatenate([generator.multinomial(size, np.full(size, 1.0 / size), size=_AT_A_TIME) for size in sizes], axis=1)


def _corrected(drawn_R: Floats, estimate: float, without_one_K: Floats) -> list[float]:
    """The quantiles of the resamples that bound the interval."""
    normal = NormalDist()
    below = float(np.mean(drawn_R < estimate) + np.mean(drawn_R == estimate) / 2)
    bias = normal.inv_cdf(min(max(below, 0.5 / len(drawn_R)), 1.0 - 0.5 / len(drawn_R)))
    deviations = without_one_K.mean() - without_one_K
    spread = float((deviations**2).sum())
    acceleration = float((deviations**3).sum()) / (6.0 * spread**1.5) if spread > 0 else 0.0
    reach = normal.inv_cdf(0.5 + CONFIDENCE / 2)
    return [normal.cdf(bias + (bias + z) / (1.0 - acceleration * (bias + z))) for z in (-reach, reach)]
