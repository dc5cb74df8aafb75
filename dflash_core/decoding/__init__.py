"""Draft–verify decoding that keeps the target's output, its baseline that drafts nothing, and the statistics of acceptance."""

from dflash_core.decoding.generate import Generation, Proposer, autoregressive_generate, speculative_generate
from dflash_core.decoding.statistics import Acceptance, acceptance_length, full_rounds, measure_acceptance

__all__ = [
    "Acceptance",
    "Generation",
    "Proposer",
    "acceptance_length",
    "autoregressive_generate",
    "full_rounds",
    "measure_acceptance",
    "speculative_generate",
]
