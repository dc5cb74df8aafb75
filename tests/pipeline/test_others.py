"""Others at the same workspace or store, and what the killed ones leave."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dflash_core import runners
from dflash_core.pipeline import run_stage
from dflash_core.stages import StageBusyError, stage_lock
from dflash_core.target import TargetModel
from tests.pipeline.stages import plan_of
from tests.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.slow


def test_a_folder_that_another_process_works_in_is_left_alone(config: Path, tmp_path: Path) -> None:
    plan = plan_of(config, f"run.workspace={tmp_path}")
    run_stage(plan, "target")
    with stage_lock(plan.folder("responses")), pytest.raises(StageBusyError, match=r"responses-\w+ is being worked on by another process"):
        run_stage(plan, "responses")
    assert not run_stage(plan, "responses").cached
    with stage_lock(plan.folder("responses")):
        assert run_stage(plan, "responses").cached, "what is finished may be read by many"


def test_who_shares_the_extraction_helps_the_process_that_holds_it_and_takes_its_place_when_that_is_gone(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed: list[str] = []
    monkeypatch.setattr(runners, "push", lambda folder, address, progress: pushed.append(address))
    plan = plan_of(config, f"run.workspace={tmp_path}", f"extraction.store=file://{tmp_path}/store")
    for name in ("target", "responses", "samples"):
        run_stage(plan, name)
    with ThreadPoolExecutor(1) as threads:
        with stage_lock(plan.folder("shards")):
            helping = threads.submit(run_stage, plan, "shards", share=True)
            assert eventually((plan.folder("shards") / "index.arrow").exists)
            assert plan.stage("shards").manifest is None
            assert not helping.done()
        assert helping.result(PATIENCE_S).manifest == plan.stage("shards").manifest
    assert len(pushed) == 1, "by whoever holds the stage, and not by those who help"


def test_a_store_gives_the_shards_that_another_workspace_has_put_there(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = f"extraction.store=file://{tmp_path}/store"
    plans = [plan_of(config, f"run.workspace={tmp_path / name}", store) for name in ("one", "other")]
    for name in ("target", "responses", "samples"):
        run_stage(plans[0], name)
        run_stage(plans[1], name)
    made = run_stage(plans[0], "shards")
    monkeypatch.setattr(TargetModel, "packed_hidden_states", None)
    found = run_stage(plans[1], "shards")
    assert found.manifest.counts["digest"] == made.manifest.counts["digest"]
    assert found.manifest.files == made.manifest.files
    assert found.folder != made.folder


def test_what_was_begun_is_said_to_be_resumed(config: Path, tmp_path: Path) -> None:
    plan = plan_of(config, f"run.workspace={tmp_path}")
    assert plan.stage("responses").why_not == "never run"
    run_stage(plan, "target")
    with stage_lock(plan.folder("responses")):
        assert plan.stage("responses").why_not == "never run", "its own folder, made to be locked, is no result of other settings"
    (plan.folder("responses") / "journal.jsonl").touch()
    assert plan.stage("responses").why_not == "begun, will be resumed"


def test_files_that_a_killed_process_left_half_written_are_removed(config: Path, tmp_path: Path) -> None:
    plan = plan_of(config, f"run.workspace={tmp_path}")
    left = plan.folder("target") / "part" / ".weights.1234.tmp"
    left.parent.mkdir(parents=True)
    left.touch()
    run_stage(plan, "target")
    assert not left.exists()
