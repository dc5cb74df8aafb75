"""Drafters trained from features in fp8 and in bfloat16 are judged alike, on conversations that neither was trained on."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from typing import Any

import pytest

from benchmarks import features, losses
from dflash_core.data import SampleTable
from dflash_core.runners import drafter_config_of
from dflash_core.shards import ShardDataset
from dflash_core.training import initial_drafter
from tests.target.tiny import VOCABULARY
from tests.tiny_run import write_tiny_run

OF_ONE = [f"features.{dtype}.seed{seed}.heldout_loss" for seed in (0, 1) for dtype in ("bfloat16", "fp8")]


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Namespace:
    """Of a command that has been run, with a tiny target."""
    folder = tmp_path_factory.mktemp("features")
    config = write_tiny_run(folder)
    options = Namespace(config=config, workspace=folder / "runs", results=folder / "results.jsonl", steps=12, seeds=[0, 1], prompts=3, overrides=[])
    assert features.main(words(options)) == 0
    return options


def words(options: Namespace) -> list[str]:
    given = {"config": options.config, "workspace": options.workspace, "results": options.results, "steps": options.steps}
    return [*(word for name, value in given.items() for word in (f"--{name}", str(value))), "--device=cpu", "--commit=abc", "--seeds", "0", "1"]


def lines(options: Namespace) -> list[dict[str, Any]]:
    return [json.loads(line) for line in options.results.read_text().splitlines()]


def test_the_gap_is_that_of_both_means_and_what_is_recorded_is_not_measured_again(options: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(features, "Comparison")
    assert features.main(words(options)) == 0
    assert [line["name"] for line in lines(options)] == [*OF_ONE, "features.fp8.gap_of_spread", "features.fp8.gap"]
    exact_0, stored_0, exact_1, stored_1, _, gap = (line["value"] for line in lines(options))
    assert len({exact_0, stored_0, exact_1, stored_1}) == 4
    assert gap == pytest.approx((stored_0 - exact_0 + stored_1 - exact_1) / 2, abs=1e-4)
    assert lines(options)[-1]["detail"]["spread"] == pytest.approx(abs(exact_0 - exact_1), abs=1e-4)


def test_all_are_judged_on_the_same_bfloat16_features_of_conversations_that_none_was_trained_on(options: Namespace) -> None:
    (folder,), (samples,) = (list(options.workspace.glob(pattern)) for pattern in ("heldout/*", "stages/samples-*"))
    dataset = ShardDataset(folder)
    assert {line["detail"]["heldout"]["digest"] for line in lines(options)[:4]} == {dataset.digest[:12]}
    assert {column.name: column.dtype for column in dataset.card.columns}["features"] == "BF16"
    training, heldout = (SampleTable.open(samples / f"{side}.parquet") for side in ("train", "heldout"))
    assert dataset.ids == [heldout.id(i) for i in range(len(heldout))]
    assert not set(dataset.ids) & {training.id(i) for i in range(len(training))}
    features.check_disjoint(training, heldout)
    with pytest.raises(ValueError, match="6 of 6 held-out prompts are trained on too"):
        features.check_disjoint(heldout, heldout)


def test_a_worse_drafter_has_a_higher_loss_and_one_that_says_nothing_that_of_a_guess(options: Namespace) -> None:
    plan = features.plan_for(options, "cpu", "bfloat16", 0, features.ALL_SLOTS_ALIKE)
    rows = features.HeldOutRows(plan, ShardDataset(next((options.workspace / "heldout").iterdir())))
    untrained = initial_drafter(plan.config, drafter_config_of(plan), plan.info).state_dict()
    assert rows.judge(untrained).loss > lines(options)[0]["value"] + 0.01
    assert rows.judge({name: weight.new_zeros(weight.shape) for name, weight in untrained.items()}).loss == pytest.approx(math.log(VOCABULARY))
    assert rows.judge(untrained) == rows.judge(untrained)


def test_answers_and_samples_are_those_of_the_comparison_of_losses(options: Namespace) -> None:
    ours, theirs = features.plan_for(options, "cpu", "fp8", 1), losses.plan_for(options, "cpu", "decay", "float32")
    assert ours.stage("samples").cached
    assert ours.key("samples") == theirs.key("samples")
