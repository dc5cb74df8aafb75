"""Draft–verify decoding that keeps the target's output, its baseline that drafts nothing, and the statistics of acceptance."""

from dflash_core.decoding.decoder import Decoder, Generation
from dflash_core.decoding.drafting import BlockDrafter, Proposer
from dflash_core.decoding.generate import Room, autoregressive_generate, open_decoder, open_verifier, speculative_generate
from dflash_core.decoding.sampling import GREEDY, Sampling
from dflash_core.decoding.statistics import Acceptance, acceptance_length, full_rounds, measure_acceptance
from dflash_core.decoding.verifying import GrowingTarget, Verifier

__all__ = [
    "GREEDY",
    "Acceptance",
    "BlockDrafter",
    "Decoder",
    "Generation",
    "GrowingTarget",
    "Proposer",
    "Room",
    "Sampling",
    "Verifier",
    "acceptance_length",
    "autoregressive_generate",
    "full_rounds",
    "measure_acceptance",
    "open_decoder",
    "open_verifier",
    "speculative_generate",
]
