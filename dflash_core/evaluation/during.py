"""How well drafts are accepted while the drafter is still being trained: a few held-out prompts, decoded as they will be in use.

    judge = HeldoutJudge(config, target, heldout_prompts(table, 8))
    judge.measure(drafter, go_on=lambda: True)           # {"acceptance_length": 1.83, "accepted_slot_1": 0.52, …}

Only acceptance is measured. Speed would be that of a machine that trains at the same time, and losslessness does not depend on the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

from dflash_core.config import PipelineConfig, digest_of
from dflash_core.decoding import Generation, measure_acceptance, speculative_generate
from dflash_core.drafter import DFlashDrafter
from dflash_core.errors import DataError, Problem
from dflash_core.evaluation.prompts import EvaluationPrompt
from dflash_core.target import TargetModel


class HeldoutJudge:
    """Decodes the same prompts greedily for every drafter it is given. What it computes with must not be used by others at the same time."""

    def __init__(self, config: PipelineConfig, target: TargetModel, prompts: Sequence[EvaluationPrompt]):
        """
        Args:
            target: decodes in its own precision on its own device, where the drafters are, too

        Raises:
            DataError: there is no prompt.
        """
        if not prompts:
            remedy = "Raise data.heldout_fraction, give more prompts, or set training.evaluation.every_steps to 0"
            problem = Problem("data.heldout_fraction", config.data.heldout_fraction, "left no prompt to evaluate on during training", remedy)
            raise DataError("training.evaluation", [problem])
        self._target, self._prompts = target, prompts
        self._max_new_tokens = config.training.evaluation.max_new_tokens
        self._block_size = config.evaluation.block_size or config.drafter.block_size
        self.device, self.dtype = target.device, target.dtype
        measured = [target.info.digest, str(target.dtype), self._block_size, self._max_new_tokens, [asdict(prompt) for prompt in prompts]]
        self.key = digest_of(measured)

    def measure(self, drafter: DFlashDrafter, go_on: Callable[[], bool]) -> dict[str, float] | None:
        """Acceptance length (mean of requests, and pooled) and the share of rounds in which each slot was accepted.

        Args:
            drafter: on the target's device, in its precision
            go_on:   asked before every prompt; None is returned once it says no
        """
        generations = []
        for prompt in self._prompts:
            if not go_on():
                return None
            generations.append(self._decode(drafter, prompt))
        acceptance = measure_acceptance(generations, self._block_size)
        return {
            "acceptance_length": acceptance.mean_of_requests,
            "acceptance_length_pooled": acceptance.pooled,
            **{f"accepted_slot_{slot}": share for slot, share in enumerate(acceptance.per_position, start=1)},
        }

    def _decode(self, drafter: DFlashDrafter, prompt: EvaluationPrompt) -> Generation:
        return speculative_generate(
            self._target,
            drafter,
            prompt.tokens,
            max_new_tokens=self._max_new_tokens,
            block_size=self._block_size,
            stop_ids=self._target.info.eos_token_ids,
        )
