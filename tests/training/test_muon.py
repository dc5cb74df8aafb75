"""Muon: against torch's own, its orthogonal factor, skipped steps, and a resumed run."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflash_core.training import DrafterTrainer
from dflash_core.training.flat import FlatLayout
from dflash_core.training.muon import Muon, orthogonal
from dflash_core.training.optimizer import Moments
from tests.training.small import config, final_weights, losses, run, warm_up

SHAPES = {"tall": (48, 20), "wide": (16, 40), "norm": (8,)}
RATE, DECAY, MAX_NORM = 1e-2, 0.1, 0.5


def made() -> tuple[FlatLayout, Moments, Muon]:
    layout = FlatLayout(SHAPES)
    moments = Moments(layout, torch.float32, torch.device("cpu"), shard=layout.shard(0), muon=True)
    for name, view in layout.views(moments.masters_P).items():
        view.copy_(torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(len(name))))
    return layout, moments, Muon(layout, config(weight_decay=DECAY, max_grad_norm=MAX_NORM).training, moments)


def gradients(layout: FlatLayout, step: int) -> torch.Tensor:
    flat_P = torch.zeros(layout.size)
    for i, view in enumerate(layout.views(flat_P).values()):
        view.copy_(torch.randn(view.shape, generator=torch.Generator().manual_seed(10 * step + i)))
    return flat_P


def test_matrices_move_as_with_torchs_muon_and_vectors_as_with_torchs_adamw() -> None:
    layout, moments, muon = made()
    weights = {name: torch.nn.Parameter(view.clone()) for name, view in layout.views(moments.masters_P).items()}
    matrices = torch.optim.Muon([weights["tall"], weights["wide"]], lr=RATE, weight_decay=DECAY, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    vectors = torch.optim.AdamW([weights["norm"]], lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    for step in range(4):
        flat_P = gradients(layout, step)
        norm = muon.update([(0, flat_P.clone())], torch.tensor(2.0), torch.tensor(RATE))
        assert norm == pytest.approx(float(flat_P.norm()) / 2)
        for name, view in layout.views(flat_P / 2).items():
            weights[name].grad = view * MAX_NORM / norm
        matrices.step()
        vectors.step()
    for name, view in layout.views(moments.masters_P).items():
        moved, expected = view - before[name], weights[name].detach() - before[name]
        assert (moved - expected).norm() < (1e-5 if name == "norm" else 2e-2) * expected.norm()  # torch's orthogonal factor is bfloat16 everywhere
    assert int(muon.counters[0]) == 4


@pytest.mark.parametrize("shape", [(24, 24), (12, 60), (60, 12)])
def test_the_orthogonal_factor_has_singular_values_near_one_and_the_directions_of_the_matrix(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    factor = orthogonal(matrix, torch.float32)
    values = torch.linalg.svdvals(factor)
    assert 0.5 < values.min() < values.max() < 1.3
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    core = u.T @ factor @ v.T  # diagonal where the singular vectors are the same
    assert (core - core.diag().diag()).norm() < 1e-3 * core.norm()
    assert not orthogonal(torch.zeros(shape), torch.float32).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    layout, moments, muon = made()
    muon.update([(0, gradients(layout, 0))], torch.tensor(1.0), torch.tensor(RATE))
    before = [buffer.clone() for buffer in moments.buffers.values()]
    flat_P = gradients(layout, 1)
    flat_P[3] = bad
    assert not torch.isfinite(muon.update([(0, flat_P)], torch.tensor(1.0), torch.tensor(RATE)))
    assert all(torch.equal(buffer, other) for buffer, other in zip(moments.buffers.values(), before, strict=True))
    assert int(muon.counters[0]) == 1


def test_gradients_in_one_piece_in_two_and_by_parameter_are_the_same() -> None:
    results = []
    for pieces in range(3):
        layout, moments, muon = made()
        flat_P = gradients(layout, 0)
        cut, views = layout.num_decayed, layout.views(flat_P)
        parts = ([(0, flat_P)], [(0, flat_P[:cut]), (cut, flat_P[cut:])], [(start, views[name]) for name, start in layout.offsets.items()])[pieces]
        muon.update(parts, torch.tensor(1.0), torch.tensor(RATE))
        results.append(moments.masters_P)
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])


def test_a_run_with_muon_learns_and_resumes_to_the_same_bits(tmp_path: Path) -> None:
    settings = config(optimizer="muon", max_steps=8)
    run(settings, tmp_path / "calm")
    curve = losses(tmp_path / "calm")
    assert curve[-1] < curve[0] - 0.1
    stop = threading.Event()
    _, session = warm_up(settings, tmp_path / "stopped")
    assert not DrafterTrainer(session).run(lambda step, metrics: stop.set(), stop).finished
    checkpoint = max((tmp_path / "stopped" / "checkpoints").iterdir())
    second = [name for name in load_file(checkpoint / "optimizer.safetensors") if name.startswith("exp_avg_sq.")]
    assert second
    assert all("norm" in name for name in second)
    report, session = warm_up(settings, tmp_path / "stopped")
    assert 0 < report.resumed_step < 8
    DrafterTrainer(session).run()
    assert final_weights(tmp_path / "stopped") == final_weights(tmp_path / "calm")
