"""Which divergences count against a drafter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_core.decoding import GrowingTarget, autoregressive_generate
from dflash_core.evaluation import Divergence, find_divergence
from dflash_core.target import TargetModel
from tests.decoding.toys import MarkovTarget, Output

PROMPT = [257, 40, 41]


def own_text(target: TargetModel, new: int = 12) -> list[int]:
    return list(autoregressive_generate(target, PROMPT, max_new_tokens=new, stop_ids=()).tokens)


def test_the_same_text_has_no_divergence(target: TargetModel) -> None:
    own = own_text(target)
    assert find_divergence(GrowingTarget(target), PROMPT, own, own, 4) is None


def test_a_wrong_token_is_beyond_the_noise_and_has_the_targets_own_gap(target: TargetModel) -> None:
    own = own_text(target)
    wrong = [*own[:5], (own[5] + 1) % 256, *own[6:]]
    found = find_divergence(GrowingTarget(target), PROMPT, own, wrong, 4)
    assert found is not None
    logits = target.forward(torch.tensor([[*PROMPT, *own[:5]]]), target.new_cache()).logits[0, -1]
    assert found.position == 5
    assert found.gap == pytest.approx(float(logits[own[5]] - logits[wrong[5]]), abs=1e-3)
    assert 0 <= found.noise < 1e-3
    assert found.beyond_noise


@pytest.mark.parametrize("length", [6, 11])
def test_a_text_that_ends_early_is_a_divergence_that_no_noise_explains(target: TargetModel, length: int) -> None:
    own = own_text(target)
    found = find_divergence(GrowingTarget(target), PROMPT, own, own[:length], 4)
    assert found is not None
    assert (found.position, found.gap, found.beyond_noise) == (length, None, True)


class NoisyTarget(MarkovTarget):
    """Token 1 is ahead of token 2 by ``gap`` for a pass of one token, and both move by half of ``noise`` for a wider pass. Others are far behind."""

    def __init__(self, gap: float, noise: float):
        logits = torch.full((6, 6, 6), -9.0)
        logits[..., 1], logits[..., 2] = gap, 0.0
        super().__init__(logits)
        self.noise = noise

    def step(self, ids_RT: Tensor, start_R: Tensor, tap_layers: Any = None) -> Output:
        output = super().step(ids_RT, start_R, tap_layers)
        if ids_RT.shape[1] > 1:
            output.logits[..., 1] -= self.noise / 2
            output.logits[..., 2] += self.noise / 2
        return output


@pytest.mark.parametrize(("gap", "noise", "counts"), [(0.1, 0.2, False), (0.2, 0.1, True), (0.2, 0.0, True)])
def test_a_near_tie_within_the_targets_own_noise_does_not_count(gap: float, noise: float, counts: bool) -> None:
    found = find_divergence(NoisyTarget(gap, noise), [3, 3], [1] * 8, [1, 1, 1, 2, 1, 1, 1, 1], 4)  # type: ignore[arg-type]
    assert found is not None
    assert found.position == 3
    assert found.gap == pytest.approx(gap)
    assert found.noise == pytest.approx(noise, abs=1e-6)
    assert found.beyond_noise is counts


def test_a_token_that_was_never_close_counts_in_spite_of_noise() -> None:
    found = find_divergence(NoisyTarget(0.1, 0.2), [3, 3], [1] * 8, [1, 1, 5, 1, 1, 1, 1, 1], 4)  # type: ignore[arg-type]
    assert found == Divergence(2, pytest.approx(9.1), pytest.approx(0.2, abs=1e-6))
    assert found.beyond_noise
