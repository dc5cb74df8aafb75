import json
import logging
import resource
from pathlib import Path

import pytest
import torch

from dflash_core.errors import CheckpointError
from dflash_core.training.checkpoints import TrainingCheckpoint, TrainingState, newest_training_checkpoint, save_training_checkpoint

SETTINGS = {"training.learning_rate": 1e-3, "drafter.tap_layers": (1, 3)}


def checkpoint(step: int) -> TrainingCheckpoint:
    generator = torch.Generator().manual_seed(step)
    weights, first, second = ({"a": torch.randn(3, 4, generator=generator), "b": torch.randn(5, generator=generator)} for _ in range(3))
    return TrainingCheckpoint(TrainingState(step=step, next_ordinal=4 * step, updates=step, seconds=1.5), weights, first, second)


def save(folder: Path, *steps: int, keep: int = 3) -> list[Path]:
    return [save_training_checkpoint(folder, checkpoint(step), SETTINGS, keep) for step in steps]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_comes_back_bit_for_bit_with_its_state(tmp_path: Path) -> None:
    save(tmp_path, 2)
    found, saved = newest_training_checkpoint(tmp_path, SETTINGS), checkpoint(2)
    assert found is not None
    assert found.state == saved.state
    for kind in ("weights", "exp_avg", "exp_avg_sq"):
        assert all(torch.equal(getattr(found, kind)[name], tensor) for name, tensor in getattr(saved, kind).items())


def test_without_any_checkpoint_there_is_none(tmp_path: Path) -> None:
    assert newest_training_checkpoint(tmp_path / "checkpoints", SETTINGS) is None


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 2, 4, 6, 8, keep=2)
    assert names(tmp_path) == ["step-00000006", "step-00000008"]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
def test_a_damaged_newest_checkpoint_is_passed_over_for_the_one_before_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: str
) -> None:
    _, newest = save(tmp_path, 2, 4)
    content = bytearray((newest / name).read_bytes())
    if damage == "missing":
        (newest / name).unlink()
    else:
        content[3 if name == "state.json" else -3] ^= 255
        (newest / name).write_bytes(content[: len(content) // 2] if damage == "truncated" else content)
    with caplog.at_level(logging.WARNING):
        found = newest_training_checkpoint(tmp_path, SETTINGS)
    assert found is not None
    assert found.state.step == 2
    assert "step-00000004" in caplog.text
    assert "damaged" in caplog.text


def test_if_all_are_damaged_nothing_starts_silently_from_the_beginning(tmp_path: Path) -> None:
    for folder in save(tmp_path, 2, 4):
        (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"Every checkpoint in .* is damaged"):
        newest_training_checkpoint(tmp_path, SETTINGS)


def test_after_a_fall_back_the_damaged_later_ones_do_not_crowd_out_the_good(tmp_path: Path) -> None:
    _, newest = save(tmp_path, 2, 4)
    (newest / "state.json").unlink()
    save(tmp_path, 3, keep=1)
    assert names(tmp_path) == ["step-00000003"]


def test_other_settings_are_refused_by_field_with_both_values(tmp_path: Path) -> None:
    save(tmp_path, 2)
    with pytest.raises(CheckpointError, match=r"training.learning_rate is 0.002 and was 0.001"):
        newest_training_checkpoint(tmp_path, {**SETTINGS, "training.learning_rate": 2e-3})


def test_another_format_is_refused(tmp_path: Path) -> None:
    (folder,) = save(tmp_path, 2)
    state = folder / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "format": 99}))
    with pytest.raises(CheckpointError, match="has format 99"):
        newest_training_checkpoint(tmp_path, SETTINGS)


def test_what_a_killed_writer_left_behind_is_ignored_and_removed(tmp_path: Path) -> None:
    (tmp_path / ".step-00000009.tmp").mkdir(parents=True)
    (tmp_path / ".step-00000009.tmp" / "model.safetensors").write_bytes(b"half")
    assert newest_training_checkpoint(tmp_path, SETTINGS) is None
    save(tmp_path, 2)
    assert names(tmp_path) == ["step-00000002"]


@pytest.mark.parametrize("limit", [100, 400])  # bytes of a file: less than the weights, and less than the moments
def test_a_checkpoint_that_the_disk_has_no_room_for_is_told_as_that_and_gives_back_what_it_has_taken(tmp_path: Path, limit: int) -> None:
    save(tmp_path, 2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"The disk of .* is full .*204 bytes do not fit.*before it are kept.*: free some space"):
            save(tmp_path, 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(tmp_path) == ["step-00000002"]
    save(tmp_path, 4)
    assert names(tmp_path) == ["step-00000002", "step-00000004"]
