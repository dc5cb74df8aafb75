"""How well drafts are accepted while the drafter is still being trained: a few held-out prompts, decoded as they will be in use.

    judge = HeldoutJudge(config, target, heldout_prompts(table, 8))
    judge.measure(drafter, go_on=lambda: True)           # {"acceptance_length": 1.83, "accepted_slot_1": 0.52, …}

Only acceptance is measured. Speed would be that of a machine that trains at the same time, and losslessness does not depend on the weights.

Prompts are decoded in batches, the same ones each time, in buffers and, on CUDA, with graphs that the first measurement makes: later ones find
every shape as it was, and hardly need Python's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

from dflash_core.config import PipelineConfig, digest_of
from dflash_core.decoding import Decoder, Generation, Room, measure_acceptance, open_decoder, open_verifier
from dflash_core.drafter import DFlashConfig, DFlashDrafter
from dflash_core.errors import DataError, Problem
from dflash_core.evaluation.fit import fits
from dflash_core.evaluation.prompts import EvaluationPrompt
from dflash_core.target import TargetModel

ROWS = 8  # prompts of a batch


class HeldoutJudge:
    """Decodes the same prompts greedily, time after time. What it computes with must not be used by others at the same time."""

    def __init__(self, config: PipelineConfig, target: TargetModel, prompts: Sequence[EvaluationPrompt]):
        """
        Args:
            target: decodes in its own precision on its own device, where the drafters are, too

        Raises:
            DataError: there is no prompt.
            InputError: the prompts do not fit into the memory of the target's device.
            TargetError: the target has no cache that can be shortened.
        """
        if not prompts:
            remedy = "Raise data.heldout_fraction, give more prompts, or set training.evaluation.every_steps to 0"
            problem = Problem("data.heldout_fraction", config.data.heldout_fraction, "left no prompt to evaluate on during training", remedy)
            raise DataError("training.evaluation", [problem])
        during, block_size = config.training.evaluation, config.evaluation.block_size or config.drafter.block_size
        self.device, self.dtype = target.device, target.dtype
        self.key = digest_of([target.info.digest, str(target.dtype), block_size, during.max_new_tokens, [asdict(prompt) for prompt in prompts]])
        self._target, self._prompts = target, [prompt.tokens for prompt in prompts]
        self._room = Room(min(ROWS, len(prompts)), max(map(len, self._prompts)), during.max_new_tokens, block_size)
        drafter = DFlashConfig.from_target(target.info, config.drafter)
        with fits(target, self._room, drafter, "training.evaluation.prompts", during.prompts):
            self._verifier = open_verifier(target, self._room, graphs=config.evaluation.cuda_graphs is not False)
        self._drafter: DFlashDrafter | None = None
        self._decoder: Decoder | None = None

    def measure(self, drafter: DFlashDrafter, go_on: Callable[[], bool]) -> dict[str, float] | None:
        """Acceptance length (mean of requests, and pooled) and the share of rounds in which each slot was accepted.

        Args:
            drafter: on the target's device, in its precision. One that has other weights since the last time costs nothing, another one new buffers
            go_on:   asked before every batch; None is returned once it says no
        """
        if self._decoder is None or self._drafter is not drafter:
            self._drafter, stops = drafter, self._target.info.eos_token_ids
            self._decoder = open_decoder(self._target, drafter, self._verifier, self._room, stop_ids=stops)
        generations: list[Generation] = []
        for start in range(0, len(self._prompts), self._room.rows):
            if not go_on():
                return None
            generations += self._decoder.generate(self._prompts[start : start + self._room.rows])
        acceptance = measure_acceptance(generations, self._room.block_size)
        return {
            "acceptance_length": acceptance.mean_of_requests,
            "acceptance_length_pooled": acceptance.pooled,
            **{f"accepted_slot_{slot}": share for slot, share in enumerate(acceptance.per_position, start=1)},
        }
