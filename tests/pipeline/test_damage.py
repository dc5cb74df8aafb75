"""Damage to what is done is noticed, named and made good."""

from __future__ import annotations

import logging
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_core.errors import DFlashError, ShardError
from dflash_core.pipeline import run_stage
from dflash_core.stages import Manifest
from tests.pipeline.stages import missing, plan_of
from tests.tiny_run import run_all

pytestmark = pytest.mark.slow


def results_of(workspace: Path, name: str) -> dict[str, bytes]:
    (folder,) = (workspace / "stages").glob(f"{name}-*")
    return {record.path: (folder / record.path).read_bytes() for record in (Manifest.read(folder) or pytest.fail(name)).files}


def delete(path: Path) -> None:
    path.unlink()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("name", "file", "damage"),
    [
        ("target", "target.json", flip),
        ("responses", "conversations.jsonl.gz", delete),
        ("responses", "conversations.jsonl.gz", flip),
        ("responses", "counts.json", cut),
        ("samples", "train.parquet", flip),
        ("samples", "heldout.parquet", delete),
        ("shards", "shard-00002.safetensors", cut),
        ("shards", "index.arrow", flip),
        ("shards", "index/shard-00001.arrow", flip),
        ("shards", "card.json", delete),
        ("train", "final/model.safetensors", flip),
        ("train", "final/model.safetensors", cut),
        ("train", "metrics.jsonl", delete),
        ("evaluate", "evaluation.json", flip),
        ("evaluate", "prompts.jsonl", cut),
        ("export", "drafter/model.safetensors", flip),
        ("export", "drafter/config.json", delete),
    ],
)
def test_a_damaged_file_of_a_finished_stage_is_noticed_named_and_made_anew_as_it_was(
    config: Path, copy: Path, caplog: pytest.LogCaptureFixture, name: str, file: str, damage: Callable[[Path], None]
) -> None:
    def comparable() -> dict[str, bytes]:
        timed = ("prompts.jsonl", "evaluation.json", "metrics.jsonl", "training.json", "README.md")
        return {path: content for path, content in results_of(copy, name).items() if Path(path).name not in timed}

    before = comparable()
    (path,) = (copy / "stages").glob(f"{name}-*/{file}")
    damage(path)
    change = f"run.workspace={copy}"
    assert missing(plan_of(config, change)) == [name]
    reason = plan_of(config, change).stage(name).why_not
    assert reason is not None
    assert file in reason
    with caplog.at_level(logging.WARNING):
        results = run_all(plan_of(config, change))
    assert f"{name} is run: {reason}" in caplog.messages
    assert [key for key, result in results.items() if not result.cached] == [name]
    assert comparable() == before
    assert missing(plan_of(config, change)) == []


@pytest.mark.parametrize("name", ["responses", "samples", "export"])
def test_a_disk_that_fills_up_is_told_with_its_folder_and_later_the_stage_is_done_as_it_was(config: Path, copy: Path, name: str) -> None:
    (folder,) = (copy / "stages").glob(f"{name}-*")
    before = {path.name: path.read_bytes() for path in folder.glob("*.[jp]*") if path.name != "manifest.json"}
    shutil.rmtree(folder)
    plan, (soft, hard) = plan_of(config, f"run.workspace={copy}"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # what is larger does not fit
    try:
        with pytest.raises(DFlashError, match=rf"The disk of .*/{folder.name} is full .* bytes are free\. .*start again") as error:
            run_stage(plan, name)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(folder.rglob("*.tmp")), error.value
    result = run_stage(plan, name)
    assert (result.cached, result.seconds) == (False, result.manifest.seconds), "one clock for 'done in' and 'cached (took …)'"
    assert {path.name: path.read_bytes() for path in folder.glob("*.[jp]*") if path.name != "manifest.json"} == before


def test_of_damaged_shards_only_the_lost_one_is_made_again(config: Path, copy: Path) -> None:
    (folder,) = (copy / "stages").glob("shards-*")
    shards = sorted(folder.glob("shard-*.safetensors"))
    before = [(path.read_bytes(), path.stat().st_mtime_ns) for path in shards]
    shards[1].unlink()
    assert run_stage(plan_of(config, f"run.workspace={copy}"), "shards").cached is False
    after = [(path.read_bytes(), path.stat().st_mtime_ns) for path in shards]
    assert [content for content, _ in after] == [content for content, _ in before]
    assert [index for index, (old, new) in enumerate(zip(before, after, strict=True)) if old != new] == [1]


def test_a_flipped_bit_in_a_shard_is_found_by_training_and_the_remedy_it_names_makes_that_shard_anew(config: Path, copy: Path) -> None:
    (path,) = (copy / "stages").glob("shards-*/shard-00001.safetensors")
    before = path.read_bytes()
    flip(path)
    changes = [f"run.workspace={copy}", "run.seed=3"]
    with pytest.raises(ShardError, match=r"shard-00001.safetensors.*CRC-32.*Delete that file and run the extraction again"):
        run_all(plan_of(config, *changes))
    path.unlink()
    results = run_all(plan_of(config, *changes))
    assert path.read_bytes() == before
    assert results["samples"].cached


def test_lost_weights_come_back_from_the_last_checkpoint_and_checkpoints_may_be_deleted(config: Path, copy: Path) -> None:
    (folder,) = (copy / "stages").glob("train-*")
    weights = folder / "final" / "model.safetensors"
    before = weights.read_bytes()
    weights.unlink()
    steps: list[int] = []
    run_stage(plan_of(config, f"run.workspace={copy}"), "train", on_metrics=lambda step, _: steps.append(step))
    assert weights.read_bytes() == before
    assert steps == []
    shutil.rmtree(folder / "checkpoints")
    assert missing(plan_of(config, f"run.workspace={copy}")) == []
