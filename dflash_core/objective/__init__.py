"""What training minimises: cross-entropy through the frozen head, alone or with what the target would have said, and the weight of each slot."""

from dflash_core.objective.cross_entropy import SlotLosses, linear_cross_entropy
from dflash_core.objective.distillation import DistilledLosses, TopK, distilled_cross_entropy
from dflash_core.objective.weights import decay_weights, default_gamma, dpace_weights, slot_weights

__all__ = [
    "DistilledLosses",
    "SlotLosses",
    "TopK",
    "decay_weights",
    "default_gamma",
    "distilled_cross_entropy",
    "dpace_weights",
    "linear_cross_entropy",
    "slot_weights",
]
