"""The kernel that draws without sorting: the very tokens of its plain twin, ties included."""

from __future__ import annotations

import pytest
import torch

from dflash_core.config import GenerationConfig
from dflash_core.target.sampling import draw_plain, launch_draw
from tests.forks import Forks

CASES = [(1.0, 1.0, 0), (0.7, 0.9, 0), (1.5, 1.0, 7), (0.8, 0.6, 20), (2.0, 0.999, 3), (0.3, 0.05, 0)]


def differing(case: tuple[float, float, int], device: str, dtype: torch.dtype, rows: int, vocabulary: int) -> list[int]:
    """Rows whose tokens differ. Logits of bfloat16 and coarse ones have many ties; some tokens are impossible."""
    temperature, top_p, top_k = case
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn((rows, vocabulary), generator=generator) * 3).to(dtype)
    logits[::2] = (logits[::2] * 2).round() / 2
    logits[:, 5:9] = -torch.inf
    uniforms = torch.rand(rows, generator=generator, dtype=torch.float64)
    settings = GenerationConfig(temperature=temperature, top_p=top_p, top_k=top_k)
    got = launch_draw(logits.to(device), settings, uniforms.to(device)).cpu()
    return [int(row) for row in (got != draw_plain(logits, settings, uniforms)).nonzero()]


INTERPRETED = """
import torch
from tests.target.test_sampling_kernel import CASES, differing
for number, case in enumerate(CASES):
    for dtype in (torch.bfloat16, torch.float32) if number in (1, 3) else (torch.bfloat16,):  # float32 takes twice the passes
        assert differing(case, "cpu", dtype, 2, 100) == [], (case, dtype)
"""


def test_in_the_interpreter_the_kernel_draws_what_its_twin_draws(interpreter: Forks) -> None:
    interpreter.run(INTERPRETED)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_the_gpu_the_kernel_draws_what_its_twin_draws(dtype: torch.dtype) -> None:
    for case in CASES:
        assert len(differing(case, "cuda", dtype, 400, 49_152)) <= 4, case  # sums in float32: a number on the edge of two tokens may fall to either
