"""What a micro-step is worth: the drafter's hidden states against the labels and, in a run that distils, against what the target says.

M slots that predict, of all blocks   H hidden
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from dflash_core.config import ObjectiveConfig
from dflash_core.drafter import DFlashConfig, teacher_states
from dflash_core.feed import Batch
from dflash_core.fp8 import Fp8Head
from dflash_core.objective import TopK, distilled_cross_entropy, linear_cross_entropy


class Vocabulary(Protocol):
    """The target's frozen embedding and head on one device; replicas of the device share it."""

    @property
    def head_weight(self) -> Tensor: ...

    @property
    def logit_softcap(self) -> float | None: ...

    @property
    def logit_scale(self) -> float: ...

    def embed(self, ids: Tensor) -> Tensor: ...


class SlotLosses:
    """The losses of an objective, with the target's frozen head. Making one of ``fp8`` converts the head."""

    def __init__(self, objective: ObjectiveConfig, drafter: DFlashConfig, vocabulary: Vocabulary, *, fp8: bool, fixed_shapes: bool):
        """``fixed_shapes`` takes room for a label in every slot, as CUDA graphs want it; without, nothing is computed for slots that have none."""
        self._objective, self._drafter, self._vocabulary = objective, drafter, vocabulary
        self._head: Tensor | Fp8Head = Fp8Head(vocabulary.head_weight) if fp8 else vocabulary.head_weight
        self._fixed_shapes = fixed_shapes

    def __call__(self, hidden_MH: Tensor, labels_M: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, probability of the label and hit of each slot that predicts, [M] each."""
        if self._vocabulary.logit_scale != 1.0:
            hidden_MH = hidden_MH * self._vocabulary.logit_scale
        distillation = self._objective.distillation
        chunk_slots, softcap = self._objective.chunk_slots, self._vocabulary.logit_softcap
        max_labelled = len(labels_M) if self._fixed_shapes else None
        if distillation.weight == 0:
            return linear_cross_entropy(hidden_MH, self._head, labels_M, chunk_slots=chunk_slots, softcap=softcap, max_labelled=max_labelled)
        losses = distilled_cross_entropy(
            hidden_MH, self._head, labels_M, self._teacher(batch), share=distillation.weight, temperature=distillation.temperature,
            chunk_slots=chunk_slots, softcap=softcap, max_labelled=max_labelled,
        )  # fmt: skip
        return losses.loss, losses.probability, losses.hit

    def _teacher(self, batch: Batch) -> Tensor | TopK:
        """What the target says of each slot that predicts, [M, …]."""
        where = batch.anchors, self._drafter.block_size, self._drafter.spec
        if batch.topk_ids is not None and batch.topk_logprobs is not None:
            return TopK(*(teacher_states(values, *where).flatten(0, 2) for values in (batch.topk_ids, batch.topk_logprobs)))
        assert batch.last_hidden is not None, "the rows of a run that distils hold the one or the other"
        teacher_MH = teacher_states(batch.last_hidden, *where).flatten(0, 2)
        return teacher_MH if self._vocabulary.logit_scale == 1.0 else teacher_MH * self._vocabulary.logit_scale
