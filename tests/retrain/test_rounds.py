"""Which prompts a round takes, and what a kill at any moment leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_core.config import parse_as
from dflash_core.data import Conversation, Message, RejectLog, read_prompts
from dflash_core.data.samples import is_heldout
from dflash_core.errors import ConfigError, DataError, DFlashError
from dflash_core.retrain import RetrainConfig
from dflash_core.retrain.decision import Decision
from dflash_core.retrain.rounds import RetrainBusyError, Round, Rounds, pipeline_config, read_conversations

FRACTION = 0.2


class Site:
    """Old prompts, a folder where new ones arrive, and the rounds."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.rounds = Rounds(folder / "rounds-of-target")
        self.arrived = 0
        (folder / "traffic").mkdir()
        self.write("old.jsonl", [f"old {number}" for number in range(40)])

    def write(self, name: str, prompts: list[str]) -> None:
        with (self.folder / name).open("a") as file:
            file.writelines(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)

    def arrive(self, count: int) -> None:
        self.write("traffic/log.jsonl", [f"new {self.arrived + number}" for number in range(count)])
        self.arrived += count

    def config(self, **retrain: Any) -> RetrainConfig:
        tree = {
            "run": {"name": "weekly", "workspace": str(self.folder / "workspace")},
            "target": {"model": "some/target"},
            "data": {"sources": [{"source": str(self.folder / "old.jsonl")}], "max_length": 64, "heldout_fraction": FRACTION},
            "drafter": {"mask_token_id": 7, "block_size": 4},
            "training": {"row_length": 64, "num_anchors": 8},
            "evaluation": {"num_prompts": 3, "untrained_prompts": 1},
            "retrain": {"prompts": [str(self.folder / "traffic" / "*.jsonl")], "replay_fraction": 0.5, **retrain},
        }
        return parse_as(RetrainConfig, tree)

    def open(self, champion: str | None, **retrain: Any) -> Round | None:
        return self.rounds.open(self.config(**retrain), champion)

    def prompts(self, current: Round | None, name: str = "prompts.jsonl") -> list[str]:
        assert current is not None
        return [said(item) for item in read_conversations(self.rounds.place(current.number) / name)]


def said(conversation: Conversation) -> str:
    return conversation.messages[0].content


def heldout(prompts: list[str]) -> set[str]:
    return {prompt for prompt in prompts if is_heldout(Conversation("x", (Message("user", prompt),)), FRACTION)}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_the_first_round_takes_everything_and_holds_out_what_the_pipeline_would(site: Site, tmp_path: Path) -> None:
    site.arrive(20)
    everything = [f"old {n}" for n in range(40)] + [f"new {n}" for n in range(20)]
    current = site.open(None)
    prompts = site.prompts(current)
    assert set(site.prompts(current, "heldout.jsonl")) == heldout(everything)
    assert set(prompts) - heldout(everything) == set(everything) - heldout(everything)
    assert len(prompts) == len(set(prompts))
    assert prompts[:3] == site.prompts(current, "heldout.jsonl")[:3]
    assert len(heldout(prompts)) == 3, "no more are answered than are decoded"
    assert current is not None
    data = pipeline_config(site.config(), site.rounds.place(current.number), current, None).data
    with RejectLog(tmp_path / "rejected.jsonl") as rejected:
        assert [said(item) for item in read_prompts(data, rejected)] == prompts


def test_later_rounds_take_what_is_new_and_a_share_of_the_old_and_never_what_is_held_out(site: Site) -> None:
    site.arrive(20)
    first = site.open(None)
    assert first is not None
    site.rounds.close(first)
    site.arrive(30)
    second = site.open("1")
    assert second is not None
    new = {f"new {n}" for n in range(20, 50)}
    trained = set(site.prompts(second)) - set(site.prompts(first, "heldout.jsonl"))
    assert trained & new == new - heldout(list(new))
    assert second.new == len(trained & new)
    assert second.replayed == len(trained - new) == second.new, "half of them are old"
    assert not heldout(list(trained))
    assert site.prompts(second)[:3] == site.prompts(first)[:3], "the same are held out"
    site.rounds.close(second)
    site.arrive(10)
    third = site.open("2")
    assert third is not None
    assert set(site.prompts(third)) & {f"new {n}" for n in range(50, 60)}
    assert not any(prompt in site.prompts(third, "new.jsonl") for prompt in new)


def test_what_a_round_would_take_can_be_asked_without_beginning_it(site: Site, tmp_path: Path) -> None:
    site.arrive(10)
    foreseen = site.rounds.choose(site.config(), None, tmp_path / "draft")
    assert not site.rounds.folder.exists()
    begun = site.open(None)
    assert foreseen is not None
    assert begun is not None
    assert foreseen.model_copy(update={"begun": begun.begun}) == begun
    assert (tmp_path / "draft" / "prompts.jsonl").read_bytes() == (site.rounds.place(1) / "prompts.jsonl").read_bytes()


def test_without_enough_new_prompts_nothing_is_done_and_they_wait(site: Site) -> None:
    site.arrive(20)
    first = site.open(None)
    assert first is not None
    site.rounds.close(first)
    assert site.open("1") is None
    site.write("traffic/again.jsonl", ["new 1", "old  2"])
    assert site.open("1") is None, "both are known"
    site.arrive(4)
    assert site.open("1", min_new_prompts=6) is None
    assert site.rounds.watermark.round == 1
    site.arrive(6)
    second = site.open("1", min_new_prompts=6)
    assert second is not None
    assert set(site.prompts(second, "new.jsonl")) == {f"new {n}" for n in range(20, 30)}


def test_a_round_that_was_begun_is_taken_up_as_it_was_and_what_came_later_is_for_the_next(site: Site) -> None:
    site.arrive(20)
    assert site.rounds.begun() is None
    first = site.open(None)
    site.arrive(10)
    assert site.rounds.begun() == first
    assert first is not None
    decision = Decision(promote=True, reasons=("it is",), champion=None, champion_length=None, challenger_length=1.5, lossless=1.0, prompts=3)
    assert site.rounds.decision(first) is None
    site.rounds.decide(first, decision)
    assert Rounds(site.rounds.folder).decision(first) == decision
    site.rounds.close(first)
    assert site.rounds.begun() is None
    second = site.open("1")
    assert set(site.prompts(second, "new.jsonl")) == {f"new {n}" for n in range(20, 30)}


def test_a_kill_while_a_round_is_begun_leaves_none_and_the_next_begins_it_whole(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.arrive(20)

    def killed(folder: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("dflash_core.retrain.rounds.sync_files", killed)
        with pytest.raises(KeyboardInterrupt):
            site.open(None)
    assert site.rounds.begun() is None
    site.arrive(5)
    current = site.open(None)
    assert {f"new {n}" for n in range(25)} == set(site.prompts(current, "new.jsonl"))
    assert [path.name for path in site.rounds.place(1).parent.iterdir()] == ["0001"]


def test_bad_lines_are_an_error_before_a_round_is_begun_and_a_round_that_is_given_up_is_read_afresh(site: Site) -> None:
    site.write("traffic/log.jsonl", [f"good {number}" for number in range(8)])
    with (site.folder / "traffic" / "log.jsonl").open("a") as file:
        file.write("no json\n" * 9)
    with pytest.raises(DataError, match=r"max_rejected_fraction.*\n.*log\.jsonl:9"):
        site.open(None)
    assert site.rounds.begun() is None
    (site.folder / "traffic" / "log.jsonl").unlink()
    site.arrive(5)
    first = site.open(None)
    assert first is not None
    site.rounds.give_up(first)
    assert site.rounds.begun() is None
    assert set(site.prompts(site.open(None), "new.jsonl")) == {f"new {n}" for n in range(5)}


def test_another_share_of_held_out_prompts_is_refused_later(site: Site) -> None:
    site.arrive(20)
    first = site.open(None)
    assert first is not None
    site.rounds.close(first)
    site.arrive(20)
    config = site.config()
    other = config.model_copy(update={"data": config.data.model_copy(update={"heldout_fraction": 0.3})})
    with pytest.raises(ConfigError, match=r"data\.heldout_fraction = 0\.3: the held-out prompts of .* were chosen with 0\.2"):
        site.rounds.open(other, "1")
    assert site.open("1") is not None
    with pytest.raises(ConfigError, match=r"data\.heldout_fraction = 0\.3"):
        site.rounds.check(other)  # before a round is taken up


def test_a_file_of_the_rounds_that_is_damaged_is_named(site: Site) -> None:
    site.arrive(20)
    first = site.open(None)
    assert first is not None
    site.rounds.close(first)
    path = site.rounds.folder / "watermark.json"
    path.write_text(path.read_text()[:-20])
    with pytest.raises(DFlashError, match=f"{path} is damaged"):
        site.rounds.begun()


def test_names_of_files_need_not_be_utf8(site: Site) -> None:
    site.arrive(20)
    (site.folder / "traffic" / "log.jsonl").rename(os.fsdecode(os.fsencode(site.folder / "traffic") + b"/log-\xff.jsonl"))
    first = site.open(None)
    assert first is not None
    assert len(site.prompts(first, "new.jsonl")) == 20
    assert first.files[0].path.endswith(r"log-\xff.jsonl")
    assert site.rounds.begun() == first


def test_a_champion_is_the_start_and_is_decoded_on_every_held_out_prompt(site: Site) -> None:
    site.arrive(20)
    current = site.open(None)
    assert current is not None
    derived = pipeline_config(site.config(), site.rounds.place(current.number), current, site.folder / "champion")
    assert derived.run.name == "weekly-0001"
    assert derived.drafter.initial_checkpoint == site.folder / "champion"
    assert derived.evaluation.untrained_prompts is None, "every prompt is decoded by the champion too"
    assert type(derived).__name__ == "PipelineConfig"


def test_one_process_at_a_time_and_the_lock_of_a_dead_one_is_free(tmp_path: Path) -> None:
    code = """
import sys, time
from pathlib import Path
from dflash_core.retrain.rounds import Rounds
with Rounds(Path(sys.argv[1])).held():
    print("held", flush=True)
    time.sleep(600)
"""
    rounds = Rounds(tmp_path / "dflash-target")
    with subprocess.Popen([sys.executable, "-c", code, str(rounds.folder)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(RetrainBusyError, match=f"dflash-target is being retrained by process {process.pid} on "), rounds.held():
            pass
        process.send_signal(signal.SIGKILL)
    with rounds.held():
        pass


@pytest.mark.parametrize(
    ("section", "values", "field"),
    [
        ("training", {"max_steps": 5}, r"training\.max_steps = 5: how many"),
        ("tracking", {"enabled": False}, r"tracking\.enabled = False"),
        ("retrain", {"prompts": []}, r"retrain\.prompts"),
        ("retrain", {"prompts": [""]}, r"retrain\.prompts\.0 = ''"),
        ("retrain", {"replay_fraction": 1.0}, r"retrain\.replay_fraction = 1\.0"),
        ("retrain", {"min_new": 5}, r"retrain\.min_new = 5.*Did you mean 'min_new_prompts'"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_their_path(site: Site, section: str, values: dict[str, Any], field: str) -> None:
    tree = site.config().model_dump(mode="json")
    tree[section] |= values
    with pytest.raises(ConfigError, match=field):
        parse_as(RetrainConfig, tree)


def test_traffic_in_a_round_is_filtered_and_redacted_before_it_is_written(site: Site) -> None:
    rows = [{"request": {"messages": [{"role": "user", "content": f"question {i} of ann{i}@x.org"}]}} for i in range(20)]
    rows.append({"request": {"messages": [{"role": "user", "content": "short"}]}})
    (site.folder / "traffic" / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = site.config().model_dump(mode="json")
    tree["data"]["filters"] = {"min_characters": 6, "redact": [{"pattern": r"\S+@\S+", "replacement": "somebody"}]}
    current = site.rounds.open(parse_as(RetrainConfig, tree), "1")
    written = site.prompts(current, "new.jsonl")
    assert sorted(written) == sorted(f"question {i} of somebody" for i in range(20))
    assert all("@" not in path.read_text() for path in site.rounds.place(1).iterdir() if path.name != "round.json")


def test_of_traffic_that_cannot_be_used_it_is_said_how_much_and_why(site: Site) -> None:
    site.write("old.jsonl", [f"older {number}" for number in range(400)])
    site.arrive(3)
    with (site.folder / "traffic" / "log.jsonl").open("a") as file:
        file.write('{"text": "hello"}\n{"prompt": 7}\n')
    assert site.open("1", min_new_prompts=50) is None
    found = site.rounds.rejected
    assert found.startswith("2 of 5 rows were rejected; of the first, ")
    assert "log.jsonl:4" in found
    site.rounds.open(site.config(prompts=[str(site.folder / "old.jsonl")]), None)
    assert site.rounds.rejected == ""
