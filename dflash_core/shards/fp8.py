"""Features in half the space: fp8 (e4m3: 3 bits of fraction, largest value 448) with one scale per token and tapped layer.

A scale is the power of two that brings the largest value of its layer between 224 and 448. So it shifts exponents and rounds
nothing: what is lost is lost to the 3 bits, at most 1/16 of a value, and what comes back is exact in bfloat16 (above 1e-30). A value below a
200,000th of the largest beside it comes back as zero.

Shapes: K tap layers, H hidden size, F = K·H.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
import torch

LARGEST = 448.0
_TOO_LARGE = 248.0 * 2.0**120  # from here on values are rounded to 2**128, which is none in bfloat16
SCALES = "feature_scales"


def to_fp8(features: torch.Tensor, taps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features [..., F] as float8_e4m3fn [..., F] and scales, float32 [..., K]. A scale is not finite where a feature is not, or not once back."""
    values = features.float().unflatten(-1, (taps, -1))
    largest = values.abs().amax(-1)
    exponents = torch.frexp(largest / LARGEST).exponent.clamp(min=-126)
    scales = torch.ldexp(torch.ones_like(largest), exponents)
    scales = torch.where(largest < _TOO_LARGE, torch.where(largest > 0, scales, 1.0), largest * torch.inf)
    return (values / scales[..., None]).flatten(-2).to(torch.float8_e4m3fn), scales


def from_fp8(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Features [..., F] in bfloat16, from what ``to_fp8`` made, on the device where they are; exact."""
    wide = values.to(torch.bfloat16) if values.is_cuda else _widened(values)
    return wide.unflatten(-1, (scales.shape[-1], -1)).mul_(scales.to(torch.bfloat16)[..., None]).flatten(-2)


def _widened(values: torch.Tensor) -> torch.Tensor:
    # torch's cast takes eight times as long on a CPU as a table of all pairs of values, which is as fast as a copy.
    pairs = values.contiguous().view(torch.uint8).numpy().reshape(-1).view(np.uint16)
    return torch.from_numpy(_pairs()[pairs].view(np.int16)).view(torch.bfloat16).view(values.shape)


@functools.cache
def _pairs() -> npt.NDArray[np.uint32]:
    """Two values in bfloat16 for each two in fp8, by their bits, uint32 [65536]."""
    singles = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.bfloat16).view(torch.int16).numpy()
    return np.ascontiguousarray(singles[np.arange(65536, dtype=np.uint16).view(np.uint8).reshape(-1, 2)]).view(np.uint32).reshape(-1)
