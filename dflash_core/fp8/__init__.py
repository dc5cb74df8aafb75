"""Products in fp8: casts with a scale a tensor, the drafter's linears and the frozen head."""

from dflash_core.fp8.cast import E4M3, E5M2, Cast, cast, product
from dflash_core.fp8.head import SOFTMAX_SCALE, Fp8Head
from dflash_core.fp8.linear import fp8_linears

__all__ = ["E4M3", "E5M2", "SOFTMAX_SCALE", "Cast", "Fp8Head", "cast", "fp8_linears", "product"]
