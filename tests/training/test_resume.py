"""The real thing from shards to final weights, and through SIGKILLs."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflash_core.drafter import DFlashConfig, DFlashDrafter, save_checkpoint
from dflash_core.errors import CheckpointError, ShardError
from dflash_core.training import read_metrics, train, warm_up
from dflash_core.training.checkpoints import read_best
from dflash_core.training.warming import initial_drafter
from tests.training.small import INFO, config, final_weights, losses, make_shards, vocabulary


def test_after_kills_at_any_moment_the_final_weights_are_those_of_an_undisturbed_run_bit_for_bit(tmp_path: Path) -> None:
    """With two replicas; with one, ``test_kills`` does so."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.kill_child", str(tmp_path), "2"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("killed") == 10, done.stdout
    assert final_weights(tmp_path / "killed") == final_weights(tmp_path / "calm")
    assert losses(tmp_path / "killed") == losses(tmp_path / "calm")
    assert len(losses(tmp_path / "calm")) == 8
    evaluated = tmp_path / "evaluated"
    assert final_weights(evaluated) == final_weights(tmp_path / "calm")
    curve = read_metrics(evaluated / "evaluations.jsonl")
    steps = [record["step"] for record in curve]
    assert steps == sorted(set(steps))
    assert steps[-1] == 8
    best = read_best(evaluated, "norm")
    assert best is not None
    assert best.acceptance_length >= max(record["eval/acceptance_length"] for record in curve if record["step"])
    kept = load_file(evaluated / "best" / "model.safetensors")
    calm = load_file(tmp_path / "calm" / "checkpoints" / f"step-{best.step:08d}" / "model.safetensors") if best.step in (6, 8) else kept
    assert all(torch.equal(kept[name], calm[name]) for name in kept)


def test_training_without_a_warm_up_warms_up_first_and_learns_from_shards(tmp_path: Path) -> None:
    dataset = make_shards(tmp_path / "shards")
    result = train(config(max_steps=12), run_id="run", dataset=dataset, info=INFO, vocabulary=vocabulary(), folder=tmp_path / "train")
    assert result.finished
    curve = losses(tmp_path / "train")
    assert curve[-1] < curve[0] - 0.1
    assert result.weights is not None
    weights = load_file(result.weights)
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == DFlashConfig.from_target(INFO, config().drafter).tensor_shapes()
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


def test_shards_of_another_target_are_refused_with_both_digests(tmp_path: Path) -> None:
    dataset = make_shards(tmp_path / "shards", dataclasses.replace(INFO, digest="e" * 64))
    with pytest.raises(ShardError, match=r"target_digest: the shards have 'eeee.*this run needs 'dddd"):
        warm_up(config(), run_id="run", dataset=dataset, info=INFO, vocabulary=vocabulary(), folder=tmp_path / "train")


def test_training_goes_on_from_an_initial_checkpoint_of_the_same_shape_only(tmp_path: Path) -> None:
    drafter_config = DFlashConfig.from_target(INFO, config().drafter)
    drafter = DFlashDrafter(drafter_config).init_weights(9)
    save_checkpoint(drafter, tmp_path / "start")
    given = config().model_copy(update={"drafter": config().drafter.model_copy(update={"initial_checkpoint": tmp_path / "start"})})
    weights = initial_drafter(given, drafter_config, INFO).state_dict()
    assert all(torch.equal(weights[name], parameter.detach()) for name, parameter in drafter.named_parameters())
    with pytest.raises(CheckpointError, match=r"num_layers is 2, here 3"):
        initial_drafter(given, dataclasses.replace(drafter_config, num_layers=3), INFO)
