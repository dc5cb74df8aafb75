"""Training from trimmed shards is training from whole ones, bit for bit: nothing that is left out is ever read."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_core import pipeline
from dflash_core.config import load_config
from dflash_core.errors import ShardError
from dflash_core.estimate import estimate
from dflash_core.plan import Plan
from dflash_core.shards import ShardDataset
from dflash_core.training import warm_up
from flows.plan import about_trimming
from tests.tiny_run import write_tiny_run
from tests.training.small import losses

WINDOW, DISTILLED = "drafter.sliding_window=6", "objective.distillation={weight: 0.5}"
SHORT = ("training.max_steps=3", "extraction.feature_dtype=bfloat16")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny_run(tmp_path_factory.mktemp("trimmed"))
    plan = Plan(load_config(path))
    for stage in ("target", "responses", "samples"):
        pipeline.run_stage(plan, stage)
    return path


def plan_of(path: Path, *changes: str) -> Plan:
    return Plan(load_config(path, [*SHORT, *changes]), str(path))


def outcome(plan: Plan) -> tuple[list[float], bytes]:
    pipeline.run_stage(plan, "shards")
    folder = pipeline.run_stage(plan, "train").folder
    return losses(folder), (folder / "final" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "changes",
    [(), (WINDOW, "extraction.teacher=last_hidden", DISTILLED)],
    ids=["full attention", "a window and distillation"],
)
def test_losses_and_weights_are_the_same_bits_and_what_is_saved_is_known_beforehand(path: Path, changes: tuple[str, ...]) -> None:
    whole, trimmed = plan_of(path, *changes), plan_of(path, *changes, "extraction.trim=true")
    forecast = estimate(trimmed).stages["shards"]
    assert estimate(whole).stages["shards"].trimmable_bytes == forecast.trimmable_bytes
    assert outcome(trimmed) == outcome(whole)
    counts = [pipeline.run_stage(plan, "shards").manifest.counts for plan in (whole, trimmed)]
    assert counts[1]["trimmed_bytes"] == forecast.trimmable_bytes
    assert counts[1]["bytes"] == pytest.approx(forecast.disk_bytes, rel=0.1)  # headers
    assert (counts[1]["trimmed_bytes"] > 0.3 * counts[0]["bytes"]) == (WINDOW in changes)


def test_a_plan_says_what_trimming_saves_and_what_it_would_where_that_is_worth_it(path: Path) -> None:
    def said(*changes: str) -> list[str]:
        plan = plan_of(path, *changes)
        return list(about_trimming(plan, estimate(plan).stages))

    would, does = said(WINDOW)[0], said(WINDOW, "extraction.trim=true")[0]
    assert would.startswith("extraction.trim would save ")
    assert does == would.replace("would save", "saves")
    assert said(WINDOW, "training.feed=online") == []


def test_training_refuses_shards_that_are_trimmed_to_less_than_its_drafter_sees(path: Path, tmp_path: Path) -> None:
    trimmed, wider = plan_of(path, WINDOW, "extraction.trim=true"), plan_of(path, "drafter.sliding_window=7")
    dataset = ShardDataset(pipeline.run_stage(trimmed, "shards").folder)
    with pytest.raises(ShardError, match=r"trimmed_for_window = 6.*drafter\.sliding_window = 7 sees farther"):
        warm_up(wider.config, run_id="wider", dataset=dataset, info=wider.info, vocabulary=None, folder=tmp_path)  # type: ignore[arg-type]
