"""Shards made by processes of a Ray cluster, which here is one of two processes on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_core.config import load_config
from dflash_core.errors import ConfigError
from dflash_core.pipeline import run_stage, shard_job
from dflash_core.plan import Plan
from dflash_core.shards import verify_shards
from dflash_core.target import TargetModel
from tests.tiny_run import write_tiny_run


@pytest.mark.slow
def test_two_processes_of_a_ray_cluster_make_every_shard_once_and_the_run_finds_them(
    tmp_path: Path, prefect_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    from flows.extract_shards import divide_shards, ray_runner

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    plan = Plan(load_config(write_tiny_run(tmp_path), ["extraction.ray.workers=2"]))
    for stage in ("target", "responses", "samples"):
        run_stage(plan, stage)
    job = shard_job(plan)
    assert job is not None
    assert job.gpus == 0
    runner = ray_runner(plan.config.extraction.ray, num_cpus=2, object_store_memory=80 * 2**20)
    counts = divide_shards.with_options(task_runner=runner)(job.model_dump(mode="json"), 2)
    assert len(counts) == 2
    assert sum(each["extracted_tokens"] for each in counts) == run_stage(plan, "samples").manifest.counts["train_tokens"]
    monkeypatch.setattr(TargetModel, "from_pretrained", None)  # the run itself needs no target any more
    run_stage(plan, "shards")
    assert verify_shards(plan.folder("shards")) == []
    assert shard_job(plan) is None


def test_workers_without_ray_are_refused_before_anything_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_core.checks.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"extraction\.ray\.workers = 2: ray and prefect_ray cannot be imported.*dflash-pipeline\[ray\]"):
        Plan(load_config(write_tiny_run(tmp_path), ["extraction.ray.workers=2"]))
