"""Two evaluations, prompt by prompt."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from dflash_core.errors import InputError
from dflash_core.evaluation import Pair, compare, paired
from dflash_core.evaluation.compare import sign_flip_test
from tests.evaluation.test_plots import result, result_of


@pytest.mark.parametrize("count", [6, 12, 40])
def test_the_sign_flip_test_is_scipys(count: int) -> None:
    differences = np.random.default_rng(count).normal(0.25, 0.6, count)
    theirs = stats.permutation_test((differences,), np.mean, permutation_type="samples", n_resamples=20_000 if count > 12 else np.inf, rng=1).pvalue
    assert sign_flip_test(differences) == pytest.approx(theirs, abs=0.01 if count > 12 else 1e-12)
    assert sign_flip_test(-differences) == sign_flip_test(differences)


def test_five_prompts_are_never_enough_and_six_may_be() -> None:
    def of(count: int) -> list[Pair]:
        return [Pair(("heldout", str(n)), str(n), 1.5, 2.0) for n in range(count)]

    assert (paired(of(5)).significant, paired(of(6)).significant) == (False, True)
    assert (paired(of(5)).needed, paired(of(6)).needed) == (6, None)


def test_turns_of_a_conversation_are_one_witness() -> None:
    turns = [Pair(("chat", str(n // 2)), str(n), 1.5, 2.0) for n in range(10)]
    found = paired(turns)
    assert (found.prompts, found.conversations, found.better, found.significant) == (10, 5, 10, False)


def test_what_prompts_are_like_drops_out_of_the_difference() -> None:
    """One drafter is better by little on every prompt, and prompts differ by much."""
    easy = [[3, 3, 3, 2], [0, 0, 1, 0], [2, 2, 1, 2], [1, 0, 1, 1], [3, 2, 3, 3], [0, 1, 1, 0], [2, 1, 2, 2], [0, 0, 0, 1]]
    better = [[min(3, rounds[0] + 1), *rounds[1:]] if rounds[0] < 3 else [3, 3, 3, 3] for rounds in easy]
    first = result_of([("heldout", str(n), rounds, None) for n, rounds in enumerate(easy)])
    second = result_of([("heldout", str(n), rounds, None) for n, rounds in enumerate(better)])
    overall = compare(first, second).overall
    one, other = (found.trained.intervals for found in (first, second))
    assert one is not None
    assert other is not None
    assert one.acceptance_length.high > other.acceptance_length.low, "by themselves their intervals overlap"
    assert overall.significant
    assert overall.difference == pytest.approx(second.trained.acceptance.mean_of_requests - first.trained.acceptance.mean_of_requests)
    assert (overall.better, overall.worse) == (8, 0)


def test_every_set_is_compared_and_prompts_without_a_round_are_left_out() -> None:
    prompts = [("heldout", "a", [1, 1]), ("heldout", "b", []), ("chat", "c", [0]), ("chat", "c#2", [2])]
    found = compare(
        result_of([(*item, None) for item in prompts]), result_of([(*item[:2], [3] * len(item[2]), None) for item in prompts]), "old", "new"
    )
    assert (found.first_name, found.overall.prompts, found.sets["heldout"].prompts) == ("old", 3, 1)
    assert (found.sets["chat"].first, found.sets["chat"].second) == (2.0, 4.0)
    assert [(row.id, row.first, row.second) for row in found.rows] == [("a", 2.0, 4.0), ("c", 1.0, 4.0), ("c#2", 3.0, 4.0)]


def test_evaluations_of_other_prompts_or_settings_are_not_compared() -> None:
    one = result(untrained=False, rounds=[1])
    with pytest.raises(InputError, match=r"prompts_digest = 'q': first was measured with 'p'") as error:
        compare(one, one.model_copy(update={"prompts_digest": "q", "max_new_tokens": 99}))
    assert "max_new_tokens = 99: first was measured with 12" in str(error.value)
