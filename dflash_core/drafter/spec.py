"""What one drafter variant is: the only place that says which slot predicts which token, and what else sets it apart.

A new variant is a new entry of ``SPECS``; trainer, shards and feed ask the spec and never the variant's name.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DrafterSpec:
    """One variant of the drafter.

    name:               key in the configuration and in the checkpoint
    sample_from_anchor: False: slot k of the block at anchor a predicts token a+k and slot 0 predicts nothing (DFlash, arXiv 2602.06036);
                        True: the anchor slot predicts too, slot k predicts token a+k+1
    extra_tensors:      names of tensors beyond the common body
    weightings:         loss weightings the variant can be trained with
    """

    name: str
    sample_from_anchor: bool
    extra_tensors: tuple[str, ...]
    weightings: tuple[str, ...]

    @property
    def first_predicting_slot(self) -> int:
        """The first slot of a block that has a label."""
        return 0 if self.sample_from_anchor else 1

    @property
    def label_offset(self) -> int:
        """Slot k is trained on the token at anchor + k + label_offset."""
        return 1 - self.first_predicting_slot


DFLASH = DrafterSpec(
    name="dflash",
    sample_from_anchor=False,
    extra_tensors=(),
    weightings=("decay", "dpace", "uniform"),
)

SPECS: dict[str, DrafterSpec] = {spec.name: spec for spec in (DFLASH,)}
