"""Does the challenger become the champion? Both were measured on the same prompts, one after the other, and are compared prompt by prompt.

decision = decide(evaluation, margin=0.01, champion="3")
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from dflash_core.errors import DFlashError
from dflash_core.evaluation import EvaluationResult, Paired, compare_with_untrained
from dflash_core.words import counted

FEW = 6  # conversations, below which no paired test ever tells a difference from chance


class Decision(BaseModel):
    """Promote or not, and why, in sentences.

    champion, champion_length: version and acceptance length (mean of requests) of the champion, None if there was none
    challenger_length:         of the drafter that was trained
    comparison:                the champion first, the challenger second; None if there was none, or no block was drafted
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    promote: bool
    reasons: tuple[str, ...]
    champion: str | None
    champion_length: float | None
    challenger_length: float
    lossless: float
    prompts: int
    comparison: Paired | None = None


def decide(evaluation: EvaluationResult, *, margin: float, champion: str | None) -> Decision:
    """Judge the drafter of a retraining by its evaluation, in which ``untrained`` is the champion that it began from.

    It is promoted if it is lossless, better by the margin, and better by more than chance: zero is outside the 95 % interval of the
    difference, and the paired test agrees. Where there is no champion, ``untrained`` is the drafter before its training.

    Args:
        margin: how much longer the acceptance length must be, as a share of the champion's.
        champion: its version; None: there is none, and the drafter has to be better than it was before its training.

    Raises:
        DFlashError: the champion was not measured on the same prompts.
    """
    challenger, before = evaluation.trained, evaluation.untrained if champion is not None else None
    if champion is not None and (before is None or before.prompts != evaluation.prompts):
        measured = 0 if before is None else before.prompts
        raise DFlashError(f"The champion was measured on {measured} prompts and its challenger on {evaluation.prompts}: they cannot be compared.")
    lossless = evaluation.lossless == 1.0
    reasons = [
        f"It is lossless on all of {counted(evaluation.prompts, 'prompt')}."
        if lossless
        else f"It is not lossless: {evaluation.lossless:.1%} of {counted(evaluation.prompts, 'prompt')} have the target's own answer."
    ]
    length, comparison = challenger.acceptance.mean_of_requests, None
    if before is None:
        better, reason = _has_learnt(evaluation)
        reasons.append(f"There is no champion yet. Its acceptance length is {length:.3f}{reason}")
    else:
        champion_length = before.acceptance.mean_of_requests
        better = length >= champion_length * (1.0 + margin) and length > champion_length
        change = f"{length / champion_length - 1.0:+.2%}"
        wanted = f"at least {margin:+.2%} is asked for (retrain.margin)" if margin else "more is asked for"
        reasons.append(f"Its acceptance length is {length:.3f}, that of the champion (version {champion}) {champion_length:.3f}: {change}, {wanted}.")
        found = compare_with_untrained(evaluation, f"version {champion}", "challenger")
        if found is not None:
            comparison = found.overall
            reasons.append(_sure(comparison, better))
        better = better and comparison is not None and comparison.significant
    return Decision(
        promote=lossless and better,
        reasons=tuple(reasons),
        champion=champion,
        champion_length=None if before is None else before.acceptance.mean_of_requests,
        challenger_length=length,
        lossless=evaluation.lossless,
        prompts=evaluation.prompts,
        comparison=comparison,
    )


def _has_learnt(evaluation: EvaluationResult) -> tuple[bool, str]:
    """Whether training has made a first drafter better, beyond chance where there are prompts enough to tell: what learnt nothing serves nobody."""
    found = compare_with_untrained(evaluation, "before training", "challenger")
    if found is None:
        accepts = evaluation.trained.acceptance.mean_of_requests > 1.0
        return accepts, "." if accepts else ": no draft was ever accepted, so that it would only cost time."
    gain, before = found.overall, f", and was {found.overall.first:.3f} before its training"
    if gain.difference > 0.0 and (gain.significant or gain.conversations < FEW):
        return True, f"{before}."
    compared = f"by {gain.difference:+.3f} on {gain.prompts} prompts, paired test p = {gain.p_value:.2g}"
    return False, f"{before}: training has not made it better by more than chance ({compared}). Look at its labels, taps and rope."


def _sure(comparison: Paired, better: bool) -> str:
    """How far the difference is from chance."""
    if comparison.difference == 0.0:
        return "Prompt by prompt there is no difference in the mean."
    interval = comparison.interval
    within = f"95 % interval {interval.low:+.3f} to {interval.high:+.3f}, " if interval else ""
    found = f"Prompt by prompt the difference is {comparison.difference:+.3f} ({within}paired test p = {comparison.p_value:.2g})"
    if comparison.significant:
        return f"{found}: more than chance."
    prompts = f"{comparison.conversations} prompts were" if comparison.conversations > 1 else "one prompt was"
    few = f": too few prompts to tell it from chance. About {comparison.needed} of this kind would be needed, and {prompts} measured"
    return f"{found}{few if better else ', which may be chance'}."
