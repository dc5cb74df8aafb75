"""When a challenger is promoted."""

from __future__ import annotations

import dataclasses

import pytest

from dflash_core.errors import DFlashError
from dflash_core.evaluation import EvaluationResult, Figures
from dflash_core.retrain.decision import decide
from tests.evaluation.test_plots import result


def measured(challenger: float, champion: float, *, lossless: float = 1.0) -> EvaluationResult:
    """An evaluation with these acceptance lengths (means of requests)."""
    evaluation = result(untrained=True, rounds=[3, 0, 1])
    assert evaluation.untrained is not None

    def with_length(figures: Figures, length: float) -> Figures:
        return figures.model_copy(update={"acceptance": dataclasses.replace(figures.acceptance, mean_of_requests=length)})

    update = {"trained": with_length(evaluation.trained, challenger), "untrained": with_length(evaluation.untrained, champion), "lossless": lossless}
    return evaluation.model_copy(update=update)


@pytest.mark.parametrize(
    ("challenger", "champion", "lossless", "margin", "promote"),
    [
        (2.10, 2.0, 1.0, 0.05, True),
        (2.09, 2.0, 1.0, 0.05, False),
        (2.50, 2.0, 0.99, 0.05, False),
        (1.90, 2.0, 1.0, 0.00, False),
        (2.00, 2.0, 1.0, 0.00, False),
        (2.01, 2.0, 1.0, 0.00, True),
    ],
)
def test_it_is_promoted_if_lossless_and_longer_by_the_margin(
    challenger: float, champion: float, lossless: float, margin: float, promote: bool
) -> None:
    decision = decide(measured(challenger, champion, lossless=lossless), margin=margin, champion="3")
    assert decision.promote is promote
    assert (decision.champion, decision.champion_length, decision.challenger_length) == ("3", champion, challenger)
    assert ("not lossless" in decision.reasons[0]) is (lossless < 1)
    assert f"{challenger:.3f}, that of the champion (version 3) {champion:.3f}: {challenger / champion - 1:+.2%}" in decision.reasons[1]


@pytest.mark.parametrize(("lossless", "promote"), [(1.0, True), (0.5, False)])
def test_the_first_one_has_only_to_be_lossless(lossless: float, promote: bool) -> None:
    decision = decide(measured(1.0, 2.0, lossless=lossless), margin=0.5, champion=None)
    assert decision.promote is promote
    assert decision.champion_length is None
    assert "There is no champion yet" in decision.reasons[1]


def test_figures_of_other_prompts_are_not_compared() -> None:
    evaluation = result(untrained=False, rounds=[1])
    with pytest.raises(DFlashError, match="measured on 0 prompts and its challenger on 3"):
        decide(evaluation, margin=0.0, champion="1")
