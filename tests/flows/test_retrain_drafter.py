"""Retrainings in a row on a real Prefect server, with a real MLflow store: a first champion, a better one, one that is refused, nothing new."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from dflash_core.retrain import RetrainConfig, load_retrain_config
from dflash_core.retrain.rounds import Rounds
from flows.cli import app
from flows.evaluate_drafter import evaluate_drafter
from flows.retrain_drafter import retrain_drafter
from tasks.registry import Registry
from tasks.store import open_client
from tests.flows.newest import newest_run

pytestmark = pytest.mark.slow

NAME = "dflash-target"
FAIR = ["training.learning_rate=3e-3", "training.epochs=2"]
POOR = ["training.learning_rate=1e-8", "training.epochs=1"]
HELDOUT = 8  # prompts that are decoded: fewer than six never show a difference
GOOD = ["training.learning_rate=1e-2", "training.epochs=8"]


def make_predictable(target: Path) -> None:
    """Layers that add nothing: each token of the target's text follows from the one before, so that a drafter learns it in a second."""
    weights = load_file(target / "model.safetensors")
    silent = {name: torch.zeros_like(value) if "o_proj" in name or "down_proj" in name else value for name, value in weights.items()}
    save_file(silent, target / "model.safetensors", metadata={"format": "pt"})


class Weekly:
    """A configuration, the folder where prompts arrive, and what the last retraining left."""

    def __init__(self, path: Path):
        folder = path.parent
        make_predictable(folder / "target")
        self.traffic = folder / "traffic.jsonl"
        self.path = path
        section = f"retrain: {{prompts: [{self.traffic}], margin: 0.0}}\n"
        text = self.path.read_text().replace("  max_steps: 12\n", "")
        text = text.replace("heldout_fraction: 0.2", "heldout_fraction: 0.4").replace("num_prompts: 3", f"num_prompts: {HELDOUT}")
        self.path.write_text(text + section)
        self.arrived = 0
        self.traffic.touch()
        self.rounds = Rounds(folder / "workspace" / "retrain" / NAME)

    def config(self, *overrides: str) -> RetrainConfig:
        return load_retrain_config(self.path, overrides)

    @property
    def registry(self) -> Registry:
        return Registry(*open_client(self.config()))

    @property
    def champion(self) -> str | None:
        version = self.registry.champion(NAME)
        return version.number if version is not None else None

    def arrive(self, count: int) -> None:
        with self.traffic.open("a") as file:
            for number in range(self.arrived, self.arrived + count):
                file.write(json.dumps({"prompt": f"Tell me {number} and {number + 1}"}) + "\n")
        self.arrived += count

    def retrain(self, *overrides: str, dry_run: bool = False) -> Any:
        return retrain_drafter(self.config(*overrides), dry_run)


def planned(weekly: Weekly, *overrides: str) -> tuple[str, dict[str, str]]:
    """The first line that ``dflashctl plan`` prints of a retraining, and what it says of each stage."""
    told = CliRunner().invoke(app, ["plan", str(weekly.path), *(part for override in overrides for part in ("--set", override))])
    assert told.exit_code == 0, told.output
    first, *lines = told.stdout.splitlines()
    return first, {words[0]: " ".join(words[1:]) for line in lines if (words := line.split())}


@pytest.fixture(scope="module")
def weekly(tmp_path_factory: pytest.TempPathFactory, write_run: Callable[[Path], Path], prefect_url: str) -> Weekly:
    return Weekly(write_run(tmp_path_factory.mktemp("weekly")))


def test_the_first_retraining_makes_a_champion_of_a_lossless_drafter_that_has_learnt(weekly: Weekly) -> None:
    weekly.arrive(8)
    database, aside = weekly.path.parent / "workspace" / "mlflow.db", weekly.path.parent / "mlflow.db"
    database.rename(aside)
    sentence, stages = planned(weekly, *FAIR)
    assert list(database.parent.iterdir()) == [], "a plan writes nothing"
    aside.rename(database)
    assert re.fullmatch(rf"Round 1 of {NAME}, not begun yet: [4-8] new prompts and \d+ old ones, without a champion\.", sentence)
    assert stages["train"].startswith("never run")
    outcome = weekly.retrain(*FAIR)
    assert (outcome["promoted"], outcome["version"], weekly.champion) == (True, "1", "1"), outcome
    done = {"collect-prompts", "responses", "train", "evaluate", "export", "promote"}
    _, tasks, artifacts = newest_run(lambda tasks: set(tasks) >= done)
    assert set(tasks) >= done
    assert "There is no champion yet" in artifacts["retraining"].data
    assert weekly.rounds.watermark.round == 1
    assert [item.bytes for item in weekly.rounds.watermark.files] == [weekly.traffic.stat().st_size]


def test_without_new_prompts_a_retraining_is_done_at_once(weekly: Weekly) -> None:
    told = CliRunner().invoke(app, ["retrain", str(weekly.path)])
    assert (told.exit_code, told.stdout.splitlines()[-1]) == (0, "No new prompts since round 1: nothing to do."), told.output
    run, tasks, artifacts = newest_run(lambda tasks: tasks.get("collect-prompts") == "NothingNew")
    assert (run.state.type.value, run.state.message) == ("COMPLETED", "No new prompts since round 1: nothing to do.")
    assert tasks == {"collect-prompts": "NothingNew"}
    assert "No new prompts" in artifacts["retraining"].data
    assert planned(weekly) == ("No new prompts since round 1: nothing to do.", {})
    elsewhere = f"retrain.prompts=[{weekly.path.parent}/trafic/*.jsonl]"
    sentence = f"No new prompts since round 1: nothing to do. No file is found by {weekly.path.parent}/trafic/*.jsonl (retrain.prompts)."
    assert planned(weekly, elsewhere) == (sentence, {})


def test_a_better_drafter_becomes_the_champion_also_if_the_process_ends_before_the_watermark_moves(
    weekly: Weekly, monkeypatch: pytest.MonkeyPatch
) -> None:
    weekly.arrive(12)
    outcome = weekly.retrain(*GOOD, dry_run=True)
    assert (outcome["promoted"], weekly.champion, weekly.rounds.watermark.round) == (False, "1", 1), "a dry run moves nothing"
    assert outcome["summary"] == f"{NAME} version 2: would be promoted"
    assert "nothing was moved: it would be promoted" in newest_run()[2]["retraining"].data
    sentence, stages = planned(weekly, *GOOD)
    assert re.match(rf"Round 2 of {NAME}, begun at .*from version 1 on\.", sentence)
    assert {name: words.startswith("cached") for name, words in stages.items() if name in ("responses", "train", "export")} == {
        "responses": True, "train": True, "export": True,
    }  # fmt: skip

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Rounds, "close", killed)
        with pytest.raises(KeyboardInterrupt):
            weekly.retrain(*GOOD)
    assert (weekly.champion, weekly.rounds.watermark.round) == ("2", 1)
    weekly.arrive(1)  # for the next time
    outcome = weekly.retrain(*GOOD)
    assert (outcome["promoted"], outcome["version"], weekly.champion) == (True, "2", "2")
    cached = dict.fromkeys(("train", "evaluate", "export"), "Cached")
    _, tasks, artifacts = newest_run(lambda tasks: cached.items() <= tasks.items())
    assert cached.items() <= tasks.items()
    assert "# dflash-target: a new champion" in artifacts["retraining"].data
    assert "| version | version 1 | 2 |" in artifacts["retraining"].data
    assert "more than chance" in outcome["reasons"][2]
    client, _ = open_client(weekly.config())
    logged = {item.path for item in client.list_artifacts(weekly.registry.version(NAME, "2").run_id)}
    assert logged >= {"decision.md", "decision.json", "plots"}
    begun = weekly.rounds.place(2)
    asked = [json.loads(line)["messages"][0]["content"] for line in (begun / "prompts.jsonl").read_text().splitlines()]
    assert len(asked) == len(set(asked))
    assert "Tell me 20 and 21" not in asked
    fixed = {json.loads(line)["messages"][0]["content"] for line in (weekly.rounds.place(1) / "heldout.jsonl").read_text().splitlines()}
    assert fixed & set(asked) == set(asked[:HELDOUT])
    version = weekly.registry.version(NAME, "2")
    assert version.tags["dflash.compared_with"] == "1"
    assert version.tags["dflash.decision"] == "promoted"
    (champion,) = (weekly.rounds.folder.parents[1] / "registered" / NAME).glob("1-*")
    card = json.loads((champion / "config.json").read_text())
    assert card["block_size"] == 4, "the champion was fetched from the registry"


def test_a_drafter_that_is_not_better_by_the_margin_is_refused_and_its_prompts_are_old_all_the_same(weekly: Weekly) -> None:
    weekly.arrive(7)
    outcome = weekly.retrain(*POOR, "retrain.margin=9.0")
    assert (outcome["promoted"], outcome["version"], weekly.champion) == (False, "3", "2")
    assert "at least +900.00% is asked for" in outcome["reasons"][1]
    _, _, artifacts = newest_run()
    assert "the champion stays" in artifacts["retraining"].data
    assert weekly.rounds.watermark.round == 3
    assert weekly.retrain() == {"summary": "No new prompts since round 3: nothing to do."}
    client, _ = open_client(weekly.config())
    parents = [run for run in client.search_runs([client.get_experiment_by_name("dflash").experiment_id]) if "dflash.stage" not in run.data.tags]
    assert sorted(run.data.tags["dflash.decision"] for run in parents) == ["promoted", "promoted", "refused", "would be promoted"]
    assert {run.info.status for run in parents} == {"FINISHED"}


def test_the_champion_is_measured_by_the_evaluation_flow(weekly: Weekly) -> None:
    figures = evaluate_drafter(weekly.config())
    run, tasks, artifacts = newest_run(lambda tasks: tasks.get("measure-drafter") == "Completed")
    assert (run.name, figures["lossless"]) == ("tiny", 1.0)
    assert tasks["measure-drafter"] == "Completed"
    assert "acceptance" in artifacts
    client, _ = open_client(weekly.config())
    newest = max(client.search_runs([client.get_experiment_by_name("dflash").experiment_id]), key=lambda item: item.info.start_time)
    parent = client.get_run(newest.data.tags["mlflow.parentRunId"])
    assert (parent.info.run_name, parent.data.metrics["acceptance_length"]) == ("tiny-evaluation", figures["acceptance_length"])
