"""The static cache: the logits of the growing one, for rows of different lengths that go back and start again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dflash_core.errors import TargetError
from dflash_core.target import StaticTarget, TargetModel
from tests.target.tiny import save_tiny_target

LENGTHS = (5, 17, 11)
TAPS = (0, 2)


def ids_of(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))


def prompts(width: int = 17, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Ids right-padded with whatever, and lengths."""
    return ids_of(len(LENGTHS), width, seed=seed), torch.tensor(LENGTHS)


def assert_as_with_a_growing_cache(static: StaticTarget, rows: Tensor, seed: int, steps: tuple[int, ...] = (1, 8, 1)) -> None:
    """Prefill ``rows``, go on in steps of so many tokens, and compare logits and features with one row at a time in a growing cache."""
    target = static.target
    ids_PT, lengths_P = prompts(seed=seed)
    caches = [target.new_cache() for _ in rows]
    want = [target.forward(ids[None, :length], cache, tap_layers=TAPS) for ids, length, cache in zip(ids_PT, lengths_P, caches, strict=True)]
    got = static.prefill(ids_PT, lengths_P, rows, TAPS)
    torch.testing.assert_close(got.logits[:, 0], torch.cat([output.logits[:, -1] for output in want]), rtol=1e-4, atol=1e-4)
    for p, output in enumerate(want):
        torch.testing.assert_close(got.features[p, : LENGTHS[p]], output.features[0], rtol=1e-4, atol=1e-4)
    start_R = torch.zeros(static.rows, dtype=torch.int64)
    start_R[rows] = lengths_P
    for number, count in enumerate(steps):
        ids_RS = ids_of(static.rows, count, seed=100 + number)
        got = static.step(ids_RS, start_R, TAPS)
        want = [target.forward(ids_RS[row][None], cache, tap_layers=TAPS) for row, cache in zip(rows, caches, strict=True)]
        torch.testing.assert_close(got.logits[rows], torch.cat([output.logits for output in want]), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(got.features[rows], torch.cat([output.features for output in want]), rtol=1e-4, atol=1e-4)
        start_R[rows] += count


def test_steps_of_one_and_of_many_tokens_equal_a_growing_cache_at_mixed_lengths_and_in_refilled_rows(target: TargetModel) -> None:
    static = StaticTarget(target, rows=5, capacity=32)
    assert_as_with_a_growing_cache(static, torch.tensor([4, 0, 2]), seed=0)
    assert_as_with_a_growing_cache(static, torch.tensor([0, 1, 4]), seed=1)


def test_a_smaller_start_forgets_what_came_after(target: TargetModel) -> None:
    static = StaticTarget(target, rows=3, capacity=32)
    ids_PT, lengths_P = prompts()
    static.prefill(ids_PT, lengths_P, torch.arange(3))
    want = static.step(ids_of(3, 4, seed=7), lengths_P).logits.clone()
    static.step(ids_of(3, 8, seed=8), lengths_P)
    static.step(ids_of(3, 8, seed=9), lengths_P + 8)
    torch.testing.assert_close(static.step(ids_of(3, 4, seed=7), lengths_P).logits, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("target", ["llama", "gemma2"], indirect=True)
def test_the_first_rows_may_go_on_without_the_others_and_tokens_beyond_the_room_harm_no_other_row(target: TargetModel) -> None:
    static = StaticTarget(target, rows=3, capacity=20)
    ids_PT, lengths_P = prompts()
    static.prefill(ids_PT, lengths_P, torch.arange(3))
    ids_RS = ids_of(3, 8, seed=7)
    want = static.step(ids_RS, lengths_P).logits.clone()  # the row of 17 tokens has room for 3 of the 8
    torch.testing.assert_close(static.step(ids_RS[:1], lengths_P[:1]).logits, want[:1], rtol=1e-5, atol=1e-5)
    alone = target.new_cache()
    target.forward(ids_PT[1:2], alone)
    torch.testing.assert_close(want[1:2, :3], target.forward(ids_RS[1:2, :3], alone).logits, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="prompts of 21 tokens do not fit into rows of 20"):
        static.prefill(ids_of(1, 21), torch.tensor([21]), torch.tensor([0]))


@pytest.mark.parametrize("target", ["qwen3"], indirect=True)
def test_other_threads_use_the_same_target_undisturbed(target: TargetModel) -> None:
    ids_PT, lengths_P = prompts()
    expected = target.forward(ids_PT, target.new_cache()).logits
    statics = [StaticTarget(target, rows=3, capacity=32) for _ in range(2)]
    stepped = statics[0].prefill(ids_PT, lengths_P, torch.arange(3), TAPS)
    wrong: list[str] = []

    def step(static: StaticTarget) -> None:
        for _ in range(15):
            got = static.prefill(ids_PT, lengths_P, torch.arange(3), TAPS)
            if not torch.equal(got.logits, stepped.logits) or not torch.equal(got.features, stepped.features):
                wrong.append("static")

    def forward() -> None:
        for _ in range(15):
            if not torch.equal(target.forward(ids_PT, target.new_cache()).logits, expected):
                wrong.append("growing")

    threads = [threading.Thread(target=step, args=(static,)) for static in statics] + [threading.Thread(target=forward)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_targets_whose_state_is_not_keys_of_their_own_are_refused(tmp_path: Path) -> None:
    folder = save_tiny_target("qwen3_5_text", tmp_path / "hybrid")
    target = TargetModel.from_pretrained(folder, dtype=torch.float32)
    with pytest.raises(TargetError, match="static cache: it has layers of the kind linear_attention"):
        StaticTarget(target, rows=2, capacity=16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3_text"])
def test_replayed_steps_equal_eager_ones_and_wait_for_nothing(family: str, tiny_folder: Callable[[str], Path]) -> None:
    target = TargetModel.from_pretrained(tiny_folder(family), dtype=torch.bfloat16, device="cuda")
    eager, graphed = (StaticTarget(target, rows=3, capacity=64, graphs=graphs) for graphs in (False, True))
    ids_PT, lengths = (x.cuda() for x in prompts())
    for static in (eager, graphed):
        static.prefill(ids_PT, lengths, torch.arange(3, device="cuda"))
    for number, count in enumerate((1, 8, 1, 8, 1)):
        ids = ids_of(3, count, seed=number).cuda()
        want = eager.step(ids, lengths, TAPS)
        if number > 1:
            torch.cuda.set_sync_debug_mode("error")
        try:
            got = graphed.step(ids, lengths, TAPS)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(got.logits, want.logits, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(got.features, want.features, rtol=1e-2, atol=1e-2)
        lengths = lengths + count
