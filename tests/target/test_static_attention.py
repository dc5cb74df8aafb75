"""The kernels of the static cache: equal to their twins in plain PyTorch, and reading no slot that was not filled."""

from __future__ import annotations

import pytest
import torch

from dflash_core.target.static_attention import attend_plain, launch_attend, launch_store, store_plain
from tests.forks import Forks

ATTENTION_CASES = [  # R, A, G, S, C, D, window, softcap, sinks, splits
    (3, 4, 2, 1, 90, 8, None, None, True, 2),
    (2, 6, 2, 3, 70, 24, None, 5.0, False, 1),
    (2, 10, 1, 8, 140, 16, 70, None, True, 3),
]


def kernel_error(case: tuple[object, ...], device: str, dtype: torch.dtype) -> float:
    """Largest distance of the kernels' result from the twin's in float32, on rows that hold from nothing to all they can, the rest being NaN."""
    R, A, G, S, C, D, window, softcap, sinks, splits = case
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator) for shape in ((R, S, A, D), (R, S, G, D), (R, S, G, D)))
    keys, values = torch.randn((2, R, G, C, D), generator=generator)
    start = torch.tensor([0, C - S - 1, C // 2][:R])
    for buffer in (keys, values):
        buffer[torch.arange(C)[None, None, :, None].expand(buffer.shape) >= start[:, None, None, None]] = 0.0
    settings = {"scale": D**-0.5, "window": window, "softcap": softcap, "sinks_A": torch.randn(A, generator=generator) if sinks else None}
    q, k, v, keys, values = (x.to(dtype) for x in (q, k, v, keys, values))
    exact = [x.float() for x in (q.transpose(1, 2), keys, values)]
    store_plain(k.float().transpose(1, 2), v.float().transpose(1, 2), exact[1], exact[2], start)
    want = attend_plain(*exact, start, **settings)
    q, k, v, keys, values, start = (x.to(device) for x in (q, k, v, keys, values, start))
    for buffer in (keys, values):
        buffer[torch.arange(C, device=device)[None, None, :, None].expand(buffer.shape) >= start[:, None, None, None]] = torch.nan
    launch_store(k.transpose(1, 2), v.transpose(1, 2), keys, values, start)
    settings["sinks_A"] = settings["sinks_A"].to(device) if sinks else None
    got = launch_attend(q.transpose(1, 2), keys, values, start, **settings, splits=splits)
    return float((got.float().cpu() - want).abs().max())


INTERPRETED = """
import torch
from tests.target.test_static_attention import ATTENTION_CASES, kernel_error
for case in ATTENTION_CASES:
    error = kernel_error(case, "cpu", torch.float32)
    assert error < 2e-5, (case, error)
"""


def test_in_the_interpreter_the_kernels_equal_their_twins_and_read_no_slot_that_was_not_filled(interpreter: Forks) -> None:
    interpreter.run(INTERPRETED)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("start", "S"), [(0, 1), (5, 1), (5, 4), (11, 1), (9, 3), (10, 4)])  # of 12 slots the last takes what has no room
def test_one_row_alone_is_stored_and_attended_as_in_company(start: int, S: int, window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, S, 8, generator=generator) for heads in (6, 2, 2))
    start_R = torch.tensor([3, start])

    def attended(rows: slice) -> tuple[torch.Tensor, ...]:
        keys, values = torch.ones(2, len(start_R[rows]), 2, 12, 8)
        store_plain(k[rows], v[rows], keys, values, start_R[rows])
        return keys[-1], values[-1], attend_plain(q[rows], keys, values, start_R[rows], scale=0.3, window=window)[-1]

    inside = min(S, 11 - start)  # what lies beyond the room means nothing
    for alone, together in zip(attended(slice(1, 2)), attended(slice(0, 2)), strict=True):
        parts = (
            (alone[:inside], together[:inside])
            if alone.shape[0] == S and alone.dim() == 3 and alone.shape[1] == 6
            else (alone[:, :11], together[:, :11])
        )
        torch.testing.assert_close(*parts)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_the_gpu_the_kernels_equal_their_twins(dtype: torch.dtype) -> None:
    large = [
        (3, 9, 3, 1, 700, 64, None, None, False, None),
        (2, 32, 8, 16, 1500, 128, 300, 30.0, True, None),
        (3, 8, 4, 16, 300, 256, 100, None, False, 2),
    ]
    for case in ATTENTION_CASES + large:
        error = kernel_error(case, "cuda", dtype)
        assert error < (1e-4 if dtype == torch.float32 else 3e-2), (case, error)
