"""Processes that know nothing of a run but a small job make its shards; the run finishes them without loading its target."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dflash_core.config import load_config
from dflash_core.errors import TargetError
from dflash_core.pipeline import run_stage, shard_job
from dflash_core.plan import Plan
from dflash_core.shards import verify_shards
from dflash_core.shards.job import ShardJob, make_shards
from dflash_core.target import TargetModel
from tests.shards.fakes import contents
from tests.tiny_run import write_tiny_run

MADE = ("target", "responses", "samples")


def test_a_job_makes_what_the_run_would_have_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, found = write_tiny_run(tmp_path), {}
    for name, store in (("alone", "null"), ("one file system", "null"), ("store", f"file://{tmp_path}/store")):
        plan = Plan(load_config(path, [f"extraction.store={store}"]))
        for stage in MADE:
            run_stage(plan, stage)
        if name != "alone":
            job = shard_job(plan)
            assert job is not None
            counts = make_shards(ShardJob.model_validate_json(job.model_dump_json()))
            assert counts["extracted_tokens"] == run_stage(plan, "samples").manifest.counts["train_tokens"]
            monkeypatch.setattr(TargetModel, "from_pretrained", None)  # nothing is left to be done with it
            assert make_shards(job)["extracted_tokens"] == 0
            with pytest.raises(TargetError, match=r"is another one here: its digest is .*Pin target\.revision"):
                make_shards(job.model_copy(update={"target_digest": "0" * 64}))
        run_stage(plan, "shards")
        monkeypatch.undo()
        assert shard_job(plan) is None
        folder = plan.folder("shards")
        assert verify_shards(folder) == []
        found[name] = {file: content for file, content in contents(folder).items() if file != "manifest.json"}
        shutil.rmtree(folder)
    assert found["alone"] == found["one file system"] == found["store"]
