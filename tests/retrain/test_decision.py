"""When a challenger is promoted: lossless, better by the margin, and by more than chance."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_core.errors import DFlashError
from dflash_core.evaluation import EvaluationResult
from dflash_core.retrain.decision import decide
from tests.evaluation.test_plots import result, result_of


def measured(champion: float, challenger: float, prompts: int, *, lossless: bool = True, noise: int | None = None) -> EvaluationResult:
    """Prompts on which the two drafters have these acceptance lengths, from 2 to 3; with ``noise``, a seed, only as expectations."""

    def rounds(length: float, prompt: int, drafter: int) -> list[int]:
        if noise is None:
            more = round(100 * (length - 2.0))
            return [2] * more + [1] * (100 - more)
        return np.random.default_rng([noise, prompt, drafter]).binomial(3, (length - 1.0) / 3.0, size=12).tolist()

    return result_of([("heldout", f"p{n}", rounds(challenger, n, 1), rounds(champion, n, 0)) for n in range(prompts)], lossless=lossless)


@pytest.mark.parametrize(
    ("challenger", "champion", "lossless", "margin", "promote"),
    [
        (2.10, 2.0, True, 0.05, True),
        (2.09, 2.0, True, 0.05, False),
        (2.50, 2.0, False, 0.05, False),
        (2.00, 2.1, True, 0.00, False),
        (2.00, 2.0, True, 0.00, False),
        (2.01, 2.0, True, 0.00, True),
    ],
)
def test_it_is_promoted_if_lossless_and_longer_by_the_margin(
    challenger: float, champion: float, lossless: bool, margin: float, promote: bool
) -> None:
    decision = decide(measured(champion, challenger, 8, lossless=lossless), margin=margin, champion="3")
    assert decision.promote is promote
    assert decision.champion == "3"
    assert (decision.champion_length, decision.challenger_length) == (pytest.approx(champion), pytest.approx(challenger))
    assert ("not lossless" in decision.reasons[0]) is not lossless
    assert f"{challenger:.3f}, that of the champion (version 3) {champion:.3f}: {challenger / champion - 1:+.2%}" in decision.reasons[1]


def test_equal_drafters_are_not_promoted() -> None:
    decision = decide(measured(2.0, 2.0, 60), margin=0.0, champion="1")
    assert not decision.promote
    assert decision.comparison is not None
    assert (decision.comparison.difference, decision.comparison.p_value) == (0.0, 1.0)


def test_drafters_that_differ_by_noise_alone_are_hardly_ever_promoted() -> None:
    """Two drafters of the same length on 20 prompts, one of them better by chance in half of the cases."""
    decisions = [decide(measured(2.0, 2.0, 20, noise=seed), margin=0.0, champion="1") for seed in range(60)]
    assert 20 < sum(decision.challenger_length > (decision.champion_length or 0.0) for decision in decisions) < 40
    assert sum(decision.promote for decision in decisions) <= 4


def test_one_that_is_better_by_chance_on_few_prompts_is_told_that_they_are_too_few() -> None:
    decision = decide(measured(2.0, 2.2, 5), margin=0.01, champion="1")
    assert not decision.promote
    assert "too few prompts to tell it from chance. About 6 of this kind would be needed, and 5 prompts were measured." in decision.reasons[2]
    noisy = next(found for seed in range(50) if (found := decide(measured(2.0, 2.1, 12, noise=seed), margin=0.01, champion="1")).reasons
                 and found.comparison and found.comparison.difference > 0.03 and not found.comparison.significant)  # fmt: skip
    assert not noisy.promote
    assert noisy.comparison is not None
    assert noisy.comparison.needed is not None
    assert noisy.comparison.needed > 12
    assert f"About {noisy.comparison.needed} of this kind would be needed, and 12 prompts were measured" in noisy.reasons[2]


def test_one_that_is_clearly_better_is_promoted() -> None:
    decision = decide(measured(1.8, 2.3, 40, noise=1), margin=0.01, champion="1")
    assert decision.promote
    assert decision.comparison is not None
    assert decision.comparison.interval is not None
    assert decision.comparison.interval.low > 0.2
    assert decision.comparison.p_value < 0.001
    assert decision.comparison.better > 30
    assert "more than chance" in decision.reasons[2]


def test_one_that_is_clearly_better_and_not_lossless_is_refused() -> None:
    decision = decide(measured(1.8, 2.3, 40, noise=1, lossless=False), margin=0.01, champion="1")
    assert not decision.promote
    assert decision.reasons[0] == "It is not lossless: 97.5% of 40 prompts have the target's own answer."
    assert decision.comparison is not None
    assert decision.comparison.significant


@pytest.mark.parametrize(
    ("before", "after", "prompts", "lossless", "promote"),
    [(2.0, 2.2, 8, True, True), (2.0, 2.2, 8, False, False), (2.0, 2.01, 3, True, True), (2.0, 2.0, 8, True, False), (2.1, 2.0, 3, True, False)],
)
def test_the_first_one_has_to_be_lossless_and_better_than_before_its_training(
    before: float, after: float, prompts: int, lossless: bool, promote: bool
) -> None:
    decision = decide(measured(before, after, prompts, lossless=lossless), margin=0.5, champion=None)
    assert decision.promote is promote
    assert decision.champion_length is decision.comparison is None
    assert f"There is no champion yet. Its acceptance length is {after:.3f}, and was {before:.3f} before its training" in decision.reasons[1]
    assert ("has not made it better by more than chance" in decision.reasons[1]) is (after <= before)


def test_the_first_one_is_not_promoted_for_a_gain_that_may_be_chance_or_if_it_accepts_nothing() -> None:
    found = (decide(measured(2.0, 2.05, 12, noise=seed), margin=0.0, champion=None) for seed in range(50))
    lucky = next(decision for decision in found if decision.challenger_length > 2.05 and "paired test p" in decision.reasons[1])
    assert not lucky.promote
    for rounds, promote in (([0, 0], False), ([0, 1], True)):
        decision = decide(result(untrained=False, rounds=rounds), margin=0.0, champion=None)
        assert (decision.promote, "no draft was ever accepted" in decision.reasons[1]) == (promote, not promote)


def test_figures_of_other_prompts_are_not_compared() -> None:
    evaluation = result(untrained=False, rounds=[1])
    with pytest.raises(DFlashError, match="measured on 0 prompts and its challenger on 3"):
        decide(evaluation, margin=0.0, champion="1")
