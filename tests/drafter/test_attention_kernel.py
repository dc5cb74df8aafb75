"""The attention kernels: equal to dense attention under the dense mask, in values and all gradients, and walking only what they must."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dflash_core.drafter import attention, dflash_dense_mask, interval_mask
from dflash_core.drafter.attention import TILINGS, Tiling, Tilings, _tiles, launch_backward, launch_forward
from tests.drafter.small import random_layout
from tests.forks import Forks

SMALL = Tilings(forward=Tiling(32, 16, 4, 1), own=Tiling(16, 16, 4, 1), by_key=Tiling(16, 32, 4, 1), by_query=Tiling(32, 16, 4, 1))


def layouts(B: int, T: int, N: int, seed: int) -> tuple[Tensor, Tensor]:
    pairs = [random_layout(seed + b, T, N) for b in range(B)]
    return torch.stack([anchors for _, anchors in pairs]), torch.stack([documents for documents, _ in pairs])


@pytest.mark.parametrize("ascending", [True, False])
@pytest.mark.parametrize(("T", "S", "window"), [(96, 8, 0), (83, 16, 0), (40, 4, 0), (96, 8, 8), (83, 16, 40), (40, 4, 7)])
def test_ranges_hold_every_visible_tile_and_call_full_only_what_is(T: int, S: int, window: int, ascending: bool) -> None:
    N = 21
    for seed in range(15):
        anchors, documents = layouts(2, T, N, seed)
        if not ascending:
            anchors = anchors[:, torch.randperm(N, generator=torch.Generator().manual_seed(seed))]
        mask = interval_mask(anchors, documents, S, SMALL, window)
        seen = dflash_dense_mask(anchors, documents, S, window)[:, 0, :, :T]
        for tiling, ranges, by_key in ((SMALL.forward, mask.forward, False), (SMALL.by_key, mask.by_key, True)):
            padded = functional.pad(seen, (0, -T % tiling.keys, 0, -N * S % tiling.queries))
            tiles = padded.unflatten(1, (-1, tiling.queries)).unflatten(3, (-1, tiling.keys))
            some, all_ = tiles.any(dim=4).any(dim=2), tiles.all(dim=4).all(dim=2)
            if by_key:
                some, all_ = some.mT, all_.mT
            column = torch.arange(some.shape[-1])
            lo, full_lo, full_hi, hi = (x[..., None] for x in ranges.unbind(-1))
            assert ((lo <= full_lo) & (full_lo <= full_hi) & (full_hi <= hi)).all()
            assert not (some & ((column < lo) | (column >= hi))).any()
            edge = torch.zeros_like(all_)
            if not by_key:
                edge[:, -1] = N * S % tiling.queries > 0  # a tile over the edge may be called full: the kernels never write beyond it
            else:
                edge[..., -1] = N * S % tiling.queries > 0
            assert not (~all_ & ~edge & (column >= full_lo) & (column < full_hi)).any()
            if ascending and len(documents.unique()) <= 2:
                assert torch.equal(lo == hi, ~some.any(dim=-1, keepdim=True)), "nothing is walked where nothing is seen"


def test_full_tiles_of_one_document_and_sorted_anchors_are_walked_without_a_mask() -> None:
    T, N, S = 128, 32, 4
    anchors = torch.arange(4, 4 + 3 * N, 3)[None]
    touched, filled = _tiles(torch.zeros_like(anchors).int(), anchors.int(), T, S, 32, 16, window=0)
    mask = interval_mask(anchors, torch.zeros(1, T, dtype=torch.int32), S, SMALL)
    lo, full_lo, full_hi, hi = mask.forward.unbind(-1)
    assert torch.equal(full_hi - full_lo, filled.sum(-1).int())
    assert torch.equal(hi - lo, touched.sum(-1).int())


def test_a_window_leaves_a_walk_of_its_own_length_in_both_directions() -> None:
    T, N, S, window = 512, 128, 4, 60
    anchors = torch.arange(0, 4 * N, 4)[None]
    mask = interval_mask(anchors, torch.zeros(1, T, dtype=torch.int32), S, SMALL, window)
    for ranges in (mask.forward, mask.by_key):  # 8 anchors see 88 of 512 keys, in tiles of 16; 32 keys are seen by 23 of 128 anchors, in tiles of 4
        lo, full_lo, full_hi, hi = ranges.unbind(-1)
        assert int((hi - lo).max()) <= 7
        assert int((full_hi - full_lo).max()) >= 1


@contextmanager
def memory_of_nan() -> Iterator[None]:
    """``torch.empty`` gives NaN: what reads memory that nobody has written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def errors_against_dense(
    device: str, dtype: torch.dtype, shape: tuple[int, ...], window: int, seed: int, tilings: Tilings, at_a_time: int
) -> dict[str, float]:  # fmt: skip
    """Largest distance of each result from dense attention in float32, relative to the result's size.

    Args:
        shape: B, T, N, S, A, G and D.
        at_a_time: bytes for the gradient of the scores: with 1 the backward pass takes each head for itself.
    """
    B, T, N, S, A, G, D = shape
    anchors, documents = (x.to(device) for x in layouts(B, T, N, seed))
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (B, N * S, A, D), "kc": (B, T, G, D), "vc": (B, T, G, D), "kb": (B, N * S, G, D), "vb": (B, N * S, G, D)}
    inputs = {name: torch.randn(shape, generator=generator).to(device, dtype) for name, shape in shapes.items()}
    dout = torch.randn(shapes["q"], generator=generator).to(device, dtype)
    mask = interval_mask(anchors, documents, S, tilings, window)
    with memory_of_nan(), mock.patch.object(attention, "SCORE_GRADIENT_BYTES", at_a_time):
        out, lse = launch_forward(*inputs.values(), mask, tilings)
        dq, dkc, dvc, dkb, dvb = launch_backward(*inputs.values(), out, lse, dout, mask, tilings)
    group = A // G
    found = {"out": out, "q": dq, "kc": dkc.unflatten(2, (-1, group)).sum(3), "vc": dvc.unflatten(2, (-1, group)).sum(3), "kb": dkb, "vb": dvb}

    exact = {name: x.float().requires_grad_() for name, x in inputs.items()}
    k, v = (torch.cat([exact[c], exact[b]], 1).transpose(1, 2) for c, b in (("kc", "kb"), ("vc", "vb")))
    seen = dflash_dense_mask(anchors, documents, S, window)
    want_out = functional.scaled_dot_product_attention(exact["q"].transpose(1, 2), k, v, attn_mask=seen, enable_gqa=True).transpose(1, 2)
    want = dict(zip(exact, torch.autograd.grad(want_out, list(exact.values()), dout.float()), strict=True)) | {"out": want_out.detach()}
    return {name: float((found[name].float() - want[name]).abs().max() / want[name].abs().max().clamp(min=1e-6)) for name in found}


CASES = """
import torch
from tests.drafter.test_attention_kernel import SMALL, errors_against_dense
for *case, window in ((2, 64, 6, 8, 2, 1, 16, 0), (1, 83, 3, 16, 1, 1, 16, 0), (1, 83, 6, 8, 2, 1, 16, 8), (1, 100, 4, 4, 1, 1, 16, 45)):
    for at_a_time in (1, 2**30) if case[0] == 2 else (2**30,):
        errors = errors_against_dense("cpu", torch.float32, case, window, 1, SMALL, at_a_time)
        assert all(error < 1e-4 for error in errors.values()), (case, at_a_time, errors)  # NaN is not, either
"""


def test_in_the_interpreter_values_and_gradients_equal_dense_attention(interpreter: Forks) -> None:
    interpreter.run(CASES)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("window", [0, 16, 77, 1024])
@pytest.mark.parametrize("case", [(2, 640, 96, 16, 8, 2, 128), (1, 2048, 512, 16, 4, 1, 128), (1, 520, 50, 8, 9, 3, 64), (2, 300, 37, 4, 6, 2, 64)])
def test_on_the_gpu_values_and_gradients_equal_dense_attention(case: tuple[int, ...], window: int) -> None:
    for seed, at_a_time in ((0, 2**31), (1, 1)):
        errors = errors_against_dense("cuda", torch.bfloat16, case, window, seed, TILINGS, at_a_time)
        assert all(error < 2e-2 for error in errors.values()), errors


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_making_the_mask_never_waits_for_the_gpu() -> None:
    anchors, documents = (x.cuda() for x in layouts(1, 2048, 512, 0))
    interval_mask(anchors, documents, 16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        interval_mask(anchors, documents, 16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
