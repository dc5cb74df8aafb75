"""One process for each replica: the outcome of threads, and what becomes of the others when one is killed, fails or falls silent."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load

from dflash_core.__main__ import main
from dflash_core.config import load_config
from dflash_core.errors import ConfigError, TrainingError
from dflash_core.pipeline import run_stage
from dflash_core.plan import Plan
from dflash_core.training import DrafterTrainer, check_launcher, ranks
from dflash_core.training.ranks import Ranks
from tests.tiny_run import ON_DISK, write_tiny_run
from tests.training.small import config as small_config
from tests.training.small import final_weights, losses, warm_up
from tests.waiting import PATIENCE_S, eventually

ROOT = Path(__file__).parents[2]
TORCHRUN = ["--set", "training.launcher=torchrun"]
SHARDED = ["--set", "training.sync=sharded", "--set", "training.compare_replicas_every=2"]
ALONE = ["training.devices=[cpu]", "training.accumulation_steps=2"]  # one replica, with the rows of two
BY_TORCHRUN = {"TORCHELASTIC_RUN_ID": "test", "RANK": "0", "LOCAL_RANK": "0"}
TWO = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose stages are done up to the training in threads."""
    path = write_tiny_run(tmp_path_factory.mktemp("run"))
    for name in ON_DISK[: ON_DISK.index("train") + 1]:
        run_stage(plan_of(path), name)
    return path


def plan_of(config: Path, *changes: str) -> Plan:
    return Plan(load_config(config, changes), str(config))


def elsewhere(config: Path, workspace: Path, *changes: str) -> list[str]:
    """The words for a run in a workspace of its own, in which everything before the training is done."""
    shutil.copytree(config.parent / "workspace", workspace, ignore=shutil.ignore_patterns("train-*", "runs"))
    return ["train", str(config), *TORCHRUN, *changes, "--set", f"run.workspace={workspace}"]


def folder_of(config: Path, workspace: Path, *changes: str) -> Path:
    return plan_of(config, f"run.workspace={workspace}", *changes).folder("train")


def outcome(config: Path, workspace: Path | None = None, *changes: str) -> tuple[list[float], bytes]:
    folder = folder_of(config, workspace or config.parent / "workspace", *changes)
    return losses(folder), final_weights(folder)


def trained_in_threads(config: Path, workspace: Path, *changes: str) -> Path:
    """Train here, in a workspace of its own; from its checkpoint, if it has one."""
    run_stage(plan_of(config, f"run.workspace={workspace}", *changes), "train")
    return workspace


@pytest.fixture(scope="module")
def sharded(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workspace of a training in threads with a sharded optimiser."""
    workspace = tmp_path_factory.mktemp("sharded") / "workspace"
    elsewhere(config, workspace)
    return trained_in_threads(config, workspace, "training.sync=sharded")


def left_off(config: Path, trained: Path, workspace: Path, step: int, *changes: str) -> Path:
    """A workspace whose training, with these changes, is where another's was after ``step``."""
    elsewhere(config, workspace)
    checkpoint = Path("checkpoints") / f"step-{step:08d}"
    shutil.copytree(folder_of(config, trained) / checkpoint, folder_of(config, workspace, *changes) / checkpoint)
    return workspace


@pytest.fixture(scope="module")
def killed(config: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path, list[str]]:
    """What torchrun comes to whose rank 1 is killed in its sixth step, the workspace, and the words of the command. Its optimiser is sharded."""
    workspace = tmp_path_factory.mktemp("killed") / "workspace"
    words = elsewhere(config, workspace, *SHARDED)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tests.training.rank_child"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([*torchrun, "kill", "6", *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    left_off(config, workspace, workspace.with_name("as it was left"), 5, *ALONE)
    return ended, workspace, words


@pytest.fixture(scope="module")
def said(
    config: Path, killed: tuple[object, Path, list[str]], sharded: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[list[int], list[str]]]:
    """Exit statuses and outputs of two ranks: left alone, going on where one was killed or where threads were, one failing, one told to stop."""
    folder = tmp_path_factory.mktemp("said")
    taken_over = left_off(config, sharded, folder / "taken-over-workspace", 10)
    words = {
        "calm": elsewhere(config, folder / "calm-workspace"),
        "resumed": killed[2],
        "taken over": ["train", str(config), *TORCHRUN, *SHARDED, "--set", f"run.workspace={taken_over}"],
        "failed": elsewhere(config, folder / "failed-workspace"),
        "stopped": elsewhere(config, folder / "stopped-workspace"),
    }
    cases = [(str(folder / name), {"failed": "fail", "stopped": "stop"}.get(name, "neither"), 3, words[name]) for name in words]
    code = f"from tests.training.rank_child import start_all; start_all({cases!r})"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {
        name: (json.loads((folder / name / "statuses.json").read_text()), [(folder / name / f"{rank}.txt").read_text() for rank in range(2)])
        for name in words
    }


def test_two_processes_end_in_the_losses_and_weights_of_two_threads_bit_for_bit(
    config: Path, said: dict[str, tuple[list[int], list[str]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    statuses, outputs = said["calm"]
    assert statuses == [0, 0], outputs
    assert outcome(config, tmp_path_factory.getbasetemp() / "said0" / "calm-workspace") == outcome(config)
    assert "train: " in outputs[0]
    assert outputs[1] == ""  # the first rank alone writes and tells


def test_when_a_rank_is_killed_torchrun_ends_the_others_and_the_same_command_goes_on_to_the_weights_of_threads_with_shards_too(
    config: Path,
    killed: tuple[subprocess.CompletedProcess[str], Path, list[str]],
    sharded: Path,
    said: dict[str, tuple[list[int], list[str]]],
) -> None:
    ended, workspace, _ = killed
    assert ended.returncode != 0
    assert "Signal 9 (SIGKILL)" in ended.stderr  # torchrun's own
    ways = ("Another process of this training has ended", "Rank 0: Interrupted. The same command goes on", "has ended without a word: it was killed")
    assert any(way in ended.stderr for way in ways), ended.stderr
    assert not re.search(r"^train: [\d.]+ s ", ended.stdout, re.MULTILINE)
    statuses, outputs = said["resumed"]
    assert statuses == [0, 0], outputs
    assert "step 1 " not in outputs[0]  # it went on from a checkpoint
    assert outcome(config, workspace) == outcome(config, sharded)


def test_processes_with_shards_and_threads_go_on_from_each_others_checkpoints(
    config: Path, killed: tuple[object, Path, object], sharded: Path, said: dict[str, tuple[list[int], list[str]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    statuses, outputs = said["taken over"]
    assert statuses == [0, 0], outputs
    for_threads, for_ranks = killed[1].with_name("as it was left"), tmp_path_factory.getbasetemp() / "said0" / "taken-over-workspace"
    trained_in_threads(config, for_threads, *ALONE)
    expected, weights = outcome(config, sharded)
    assert outcome(config, for_ranks) == (expected[10:], weights)
    alone, its_weights = outcome(config, for_threads, *ALONE)
    assert alone == pytest.approx(expected[5:], rel=1e-5)  # one replica adds in another order
    torch.testing.assert_close(load(its_weights), load(weights), rtol=0, atol=1e-5)


def test_a_rank_that_fails_ends_the_others_which_say_what_has_happened(said: dict[str, tuple[list[int], list[str]]]) -> None:
    statuses, (zero, one) = said["failed"]
    assert statuses == [1, 1], (zero, one)
    assert "Rank 1: OSError: the host is on fire" in one
    assert "Another process of this training has ended in the middle of a step" in zero or "has failed: OSError: the host is on fire" in zero


def test_when_one_rank_is_told_to_stop_the_training_is_not_done_and_goes_on_when_started_again(
    config: Path, said: dict[str, tuple[list[int], list[str]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    statuses, (zero, one) = said["stopped"]
    assert statuses == [130, 130], (zero, one)
    assert "Rank 0: Another process was told to stop, so all have stopped after step 4 of 12. The same command goes on from here." in zero
    assert "Rank 1: Interrupted. The same command goes on from here." in one
    assert "train: done" not in zero
    assert outcome(config, trained_in_threads(config, tmp_path_factory.getbasetemp() / "said0" / "stopped-workspace")) == outcome(config)


def test_processes_notice_who_falls_silent_and_who_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(ranks, "_BEAT_S", PATIENCE_S)  # nobody beats by himself
    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=time.sleep))
    store = dist.HashStore()  # type: ignore[attr-defined]
    zero, one, two, three = (Ranks(store, rank, 4, rank, 4) for rank in range(4))
    of_zero, of_one = dict.fromkeys((1, 2, 3), (0, 0)), {0: (0, 0)}
    two.leave()  # done, and silent by right; three is slow to begin
    for _ in range(2 * ranks._SILENCE):
        one._beat(of_one)
        zero._beat(of_zero)
    clock.now += 1e6  # all were stopped, and zero is the first to go on
    for _ in range(ranks._SILENCE):
        zero._beat(of_zero)
    with pytest.raises(TrainingError, match=r"rank 1 \(process .* has not been heard of for .* seconds"):
        zero._beat(of_zero)  # one is as good as killed
    for _ in range(ranks._ABSENCE - 3 * ranks._SILENCE):
        of_zero[1] = 0, 0
        zero._beat(of_zero)
    with pytest.raises(TrainingError, match=r"rank 3 .* has not been heard of for .* seconds"):
        zero._beat(of_zero)
    for rank in (zero, one, three):
        rank.leave()
    monkeypatch.undo()
    monkeypatch.setattr(ranks, "_BEAT_S", 0.02)
    monkeypatch.setattr(ranks, "_SILENCE", 10)
    heard, lost = threading.Event(), []
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.add("pulse/1", 1)
    store.set("name/1", "rank 1 (process 1 elsewhere)")
    zero = Ranks(store, 0, 2, 0, 1)
    zero.on_loss = lambda error: (lost.append(error), heard.set())  # type: ignore[func-returns-value]
    assert heard.wait(PATIENCE_S)
    assert "rank 1 (process " in str(lost[0])
    assert "has not been heard of for" in str(lost[0])
    with pytest.raises(TrainingError, match="Start again to go on from the last checkpoint"):
        zero.wait_for("what rank 1 will never say", 1)
    store = dist.HashStore()  # type: ignore[attr-defined]
    zero, one = (Ranks(store, rank, 2, rank, 2) for rank in range(2))
    one.leave("OSError: the host is on fire")
    with pytest.raises(TrainingError, match=r"rank 1 \(process \d+ on .*\) has failed: OSError: the host is on fire"):
        zero.wait_for("anything", 1)


def test_a_process_of_the_same_host_that_was_killed_is_missed_at_once_and_one_that_has_left_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_BEAT_S", PATIENCE_S)  # nobody beats by himself
    nobody = 2**22 + 1  # Linux gives no process such a number
    store = dist.HashStore()  # type: ignore[attr-defined]
    zero, one, elsewhere = Ranks(store, 0, 3, 0, 2), Ranks(store, 1, 3, 1, 2), Ranks(store, 2, 3, 0, 1)
    for rank in (1, 2):
        store.set(f"process/{rank}", f"{nobody} {ranks._pid_namespace()}")
    heard = dict.fromkeys((1, 2), (0, 0))
    with pytest.raises(TrainingError, match=r"rank 1 \(process .*\) has ended without a word: it was killed"):
        zero._beat(heard)
    store.set("process/1", f"{nobody} pid:[1]")
    zero._beat(heard)  # in a container of its own
    store.set("process/1", f"{nobody} {ranks._pid_namespace()}")
    one.leave()
    zero._beat(heard)  # rank 2's number means nothing on this host
    for rank in (zero, elsewhere):
        rank.leave()


def test_nobody_waits_for_what_a_process_has_left_unsaid() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    zero, one = (Ranks(store, rank, 2, rank, 2) for rank in range(2))
    one.announce("settings", "abc")
    one.leave()  # interrupted, which is no failure
    assert zero.wait_for("settings", 1) == "abc"
    with pytest.raises(TrainingError, match=r"rank 1 \(process .*\) was told to end before this training had begun"):
        zero.wait_for("step to go on from", 1)
    zero.leave()


def test_a_process_that_was_lost_before_the_first_step_ends_the_training(tmp_path: Path) -> None:
    _, session = warm_up(small_config(1), tmp_path)
    session.ranks = Ranks(dist.HashStore(), 0, 1, 0, 1)  # type: ignore[attr-defined]
    session.ranks._lost = TrainingError("rank 1 has ended without a word")
    with pytest.raises(TrainingError, match="rank 1 has ended without a word"):
        DrafterTrainer(session).run()
    session.ranks.leave()


def test_the_pulse_goes_on_while_a_process_waits_for_others_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_BEAT_S", 0.02)
    keeper = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    zero, one = (Ranks(dist.TCPStore("127.0.0.1", keeper.port, wait_for_workers=False), rank, 2, rank, 2) for rank in range(2))
    joined: list[object] = []

    def join(rank: Ranks) -> None:
        joined.append(rank.connect(torch.device("cpu"), PATIENCE_S, "all_reduce"))

    joining = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in (zero, one)]
    joining[0].start()
    assert eventually(lambda: keeper.num_keys() > 6)  # it has told where it listens, and waits for the other's answer
    beats = keeper.add("pulse/0", 0)
    assert eventually(lambda: keeper.add("pulse/0", 0) > beats + 10)
    joining[1].start()
    for thread in joining:
        thread.join()
    assert len(joined) == 2
    for rank in (zero, one):
        rank.leave()


def test_processes_with_other_settings_are_named_with_both_values() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    zero, one = (Ranks(store, rank, 2, rank, 2) for rank in range(2))
    one.announce("settings 1", "abc")
    with pytest.raises(TrainingError, match=r"settings: rank 0 has xyz and rank 1 has abc. All processes need the same configuration"):
        zero.agree("settings", "xyz")
    for rank in (zero, one):
        rank.leave()


@pytest.mark.parametrize(
    ("changes", "environment", "problem"),
    [
        ([], TWO, "training.launcher = 'threads': torchrun has started this process"),
        (["launcher=torchrun"], {}, "training.launcher = 'torchrun': torchrun has not started this process. Start `torchrun --nproc-per-node 2"),
        (["launcher=torchrun"], {"WORLD_SIZE": "4"}, r"training.devices = \['cpu', 'cpu'\]: torchrun has started 4 processes"),
        (["launcher=torchrun", "devices=['cuda:0', 'cuda:0']"], TWO, "processes of one host would share a GPU"),
    ],
)  # fmt: skip
def test_a_launcher_that_is_not_the_configured_one_is_refused(
    config: Path, monkeypatch: pytest.MonkeyPatch, changes: list[str], environment: dict[str, str], problem: str
) -> None:
    for name, value in ({**BY_TORCHRUN, **environment} if environment else {}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=problem):
        check_launcher(load_config(config, [f"training.{change}" for change in changes]), str(config))


@pytest.mark.parametrize("rank", ["0", "1"])
def test_every_process_says_what_is_wrong_with_the_settings_since_torchrun_ends_the_others_after_the_first(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: str
) -> None:
    for name, value in {**BY_TORCHRUN, **TWO, "RANK": rank, "LOCAL_RANK": rank}.items():
        monkeypatch.setenv(name, value)
    assert main(["train", str(config)]) == 2
    assert "training.launcher = 'threads': torchrun has started this process" in capsys.readouterr().err


def test_two_hosts_may_have_gpus_of_the_same_names(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**BY_TORCHRUN, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    check_launcher(load_config(config, ["training.launcher=torchrun", "training.devices=['cuda:0', 'cuda:0']"]))
