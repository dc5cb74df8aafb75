"""Evaluation while training goes on: of whole steps, skipped rather than waited for, guarded, and the best weights kept."""

import json
import logging
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_core.drafter import DFlashConfig, DFlashDrafter
from dflash_core.errors import LateCompilationError, TrainingError
from dflash_core.feed import loaders_of
from dflash_core.training import DrafterTrainer, TrainingResult, TrainingSession, WarmUpReport, checkpoints, read_metrics
from dflash_core.training.course import config_settings
from dflash_core.training.evaluation_thread import EvaluationThread
from dflash_core.training.evaluator import Snapshot
from dflash_core.training.replica import Replica
from dflash_core.training.warming import warm_up_source
from tests.training.kill_child import wait_for_the_evaluator
from tests.training.small import INFO, SmallRows, config, final_weights, run, stall_once, vocabulary
from tests.waiting import ended, eventually


class Judge:
    """Says what ``lengths`` says of its first, second, … drafter, the last one for all others; and remembers their weights."""

    device, dtype, key = torch.device("cpu"), torch.float32, "judge"

    def __init__(self, *lengths: float, work: Callable[[int], object] = lambda number: None):
        self.lengths, self.work = lengths or (1.0,), work
        self.seen: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []
        self.threads: list[str] = []

    def measure(self, drafter: DFlashDrafter, go_on: Callable[[], bool]) -> Mapping[str, float] | None:
        number = len(self.seen)
        before = {name: weight.clone() for name, weight in drafter.state_dict().items()}
        self.work(number)
        self.seen.append((before, {name: weight.clone() for name, weight in drafter.state_dict().items()}))
        self.threads.append(threading.current_thread().name)
        return {"acceptance_length": self.lengths[min(number, len(self.lengths) - 1)]} if go_on() else None


def settings(replicas: int = 2, every: int = 2, **training: Any) -> Any:
    return config(replicas, evaluation={"every_steps": every}, **{"keep_checkpoints": 9, **training})


def warmed(judge: Judge, folder: Path, given: Any) -> tuple[WarmUpReport, TrainingSession]:
    report = warm_up_source(
        given,
        run_id="run",
        loaders=loaders_of(SmallRows()),
        settings=config_settings(given),
        info=INFO,
        vocabulary=vocabulary(),
        folder=folder,
        judge=lambda: judge,
    )
    session = TrainingSession.get("run", given)
    assert session is not None
    return report, session


def evaluated(judge: Judge, folder: Path, given: Any, **arguments: Any) -> TrainingResult:
    return DrafterTrainer(warmed(judge, folder, given)[1]).run(**arguments)


def evaluations(folder: Path) -> dict[int, float]:
    return {int(record["step"]): record["eval/acceptance_length"] for record in read_metrics(folder / "evaluations.jsonl")}


@pytest.fixture
def evaluator_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EvaluationThread, "offer", EvaluationThread.offer)  # so that it is put back
    wait_for_the_evaluator()


@pytest.mark.usefixtures("evaluator_is_waited_for")
def test_evaluations_are_told_to_metrics_and_log_and_the_last_step_is_one_of_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told: dict[int, Mapping[str, float]] = {}
    judge = Judge(1.0, 1.5, 1.25, 1.75)
    report, session = warmed(judge, tmp_path, settings(max_steps=5))
    with caplog.at_level(logging.INFO, "dflash_core"):
        DrafterTrainer(session).run(lambda step, metrics: told.update({step: metrics} if "eval/acceptance_length" in metrics else {}))
    assert evaluations(tmp_path) == {0: 1.0, 2: 1.5, 4: 1.25, 5: 1.75}
    assert {step: metrics["eval/acceptance_length"] for step, metrics in told.items()} == evaluations(tmp_path)
    assert {"eval/seconds", "eval/skipped"} <= told[5].keys()
    assert judge.threads == ["MainThread", "evaluator", "evaluator", "evaluator"]
    assert report.evaluator is not None
    assert report.evaluator.acceptance_length == 1.0
    assert "Acceptance length after step 2: 1.500, the best so far" in caplog.text
    assert re.search(r"after step 4: 1\.250 \(", caplog.text)


def test_a_slow_evaluator_costs_evaluations_and_not_steps_and_sees_the_weights_of_one_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calm = tmp_path / "calm"
    run(config(checkpoint_every=1, keep_checkpoints=9, max_steps=8), calm)
    folder = tmp_path / "slow"
    seventh = folder / "checkpoints" / "step-00000007"
    judge = Judge(work=lambda number: eventually(seventh.is_dir) if number == 1 else None)  # of step 2: while steps 3 to 7 go on
    evaluated(judge, folder, settings(checkpoint_every=1, max_steps=8))
    assert final_weights(folder) == final_weights(calm)
    assert [step for step in evaluations(folder) if step < 8] == [0, 2]
    for (before, after), step in zip(judge.seen[1:], (2, 8), strict=True):
        expected = load_file(calm / "checkpoints" / f"step-{step:08d}" / "model.safetensors")
        for name, weight in expected.items():
            assert torch.equal(before[name], weight)
            assert torch.equal(after[name], weight)
    assert "Step 4 is not evaluated, since the evaluation of step 2 is still going on" in caplog.text
    last = read_metrics(folder / "evaluations.jsonl")[-1]
    assert last["eval/skipped"] == 2.0  # steps 4 and 6; the last step is never skipped


@pytest.mark.usefixtures("evaluator_is_waited_for")
@pytest.mark.parametrize(("lengths", "best"), [((9.0, 1.5, 2.0, 1.75), 4), ((1.0, 2.0, 2.0, 1.0), 4), ((1.0, 1.0, 1.0, 1.0), 6)])
def test_the_best_weights_are_kept_whatever_retention_deletes_and_ties_go_to_the_later(tmp_path: Path, lengths: Any, best: int) -> None:
    judge = Judge(*lengths)
    result = evaluated(judge, tmp_path, settings(max_steps=6, keep_checkpoints=1))
    assert result.best == checkpoints.BestWeights(best, lengths[best // 2])
    assert result.weights == tmp_path / "best" / "model.safetensors"
    assert json.loads((tmp_path / "training.json").read_text())["best"] == {"step": best, "acceptance_length": lengths[best // 2]}
    kept, seen = load_file(result.weights), judge.seen[best // 2][0]
    assert all(torch.equal(kept[name], seen[name]) for name in kept)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000006"]


@pytest.mark.usefixtures("evaluator_is_waited_for")
def test_the_last_weights_go_on_where_that_is_asked_for(tmp_path: Path) -> None:
    result = evaluated(Judge(1.0, 3.0, 2.0), tmp_path, settings(1, max_steps=3, keep="last"))
    assert result.weights == tmp_path / "final" / "model.safetensors"
    assert result.best == checkpoints.BestWeights(2, 3.0)


@pytest.mark.usefixtures("evaluator_is_waited_for")
def test_a_resumed_run_knows_the_best_weights_and_forgets_evaluations_after_its_checkpoint(tmp_path: Path) -> None:
    stop = threading.Event()
    given = settings(max_steps=8, checkpoint_every=3)
    first = Judge(1.0, 3.0, 2.0, work=lambda number: stop.set() if number == 2 else None)
    stopped = evaluated(first, tmp_path, given, stop=stop)
    assert not stopped.finished
    assert stopped.best == checkpoints.BestWeights(2, 3.0)
    with (tmp_path / "evaluations.jsonl").open("a") as file:
        file.write('{"step": 8, "eval/acceptance_length": 7.0}\n{"step": 9')
    result = evaluated(Judge(2.0), tmp_path, given)
    assert result.best == checkpoints.BestWeights(2, 3.0)
    assert sorted(evaluations(tmp_path)) == list(evaluations(tmp_path))
    assert evaluations(tmp_path)[8] == 2.0
    measured_otherwise = Judge(1.5)
    measured_otherwise.key = "other prompts"
    _, session = warmed(measured_otherwise, tmp_path, given)
    assert session.evaluator is not None
    assert session.evaluator.best == checkpoints.BestWeights(8, 1.5)  # not 3.0 of other prompts


def test_an_evaluator_that_dies_ends_the_run_and_says_where(tmp_path: Path) -> None:
    def work(number: int) -> None:
        if number == 1:
            raise ValueError("no such token")

    _, session = warmed(Judge(work=work), tmp_path, settings(max_steps=150))
    with pytest.raises(ValueError, match="no such token") as caught:
        DrafterTrainer(session).run()
    assert caught.value.__notes__ == ["In the evaluator, while it evaluates step 2."]
    assert not (tmp_path / "training.json").exists()


def test_a_late_compilation_in_the_evaluator_is_refused_and_named(tmp_path: Path) -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    compiled = torch.compile(double, fullgraph=True, dynamic=False, backend="eager")
    _, session = warmed(Judge(work=lambda number: compiled(torch.ones(3 + number))), tmp_path, settings(max_steps=150))
    with pytest.raises(LateCompilationError, match=r"double .*in thread 'evaluator'.*float32\[4\] on cpu"):
        DrafterTrainer(session).run()


def test_an_evaluator_that_hangs_at_the_end_is_a_stall_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    judge = Judge(work=lambda number: released.wait() if number == 1 else None)
    stall_once(monkeypatch, lambda who: "replica 0 (cpu) waits for the evaluator" in who and "evaluator evaluates step 2" in who)
    _, session = warmed(judge, tmp_path, settings(max_steps=3))
    try:
        with pytest.raises(TrainingError, match="evaluator evaluates step 2"):
            DrafterTrainer(session).run()
    finally:
        released.set()


def test_a_failing_worker_does_not_leave_the_evaluator_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, session = warmed(Judge(), tmp_path, settings(max_steps=150))

    def fail(self: Replica, batch: Any) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(Replica, "micro_step", fail)
    with pytest.raises(ValueError, match="broken"):
        DrafterTrainer(session).run()
    assert ended("evaluator", "replica")


def test_a_snapshot_for_another_precision_is_a_copy_in_it(tmp_path: Path) -> None:
    _, session = warmed(Judge(), tmp_path, settings(1))
    replica = session.replicas[0]
    expected = {name: weight.bfloat16() for name, weight in replica.drafter.state_dict().items()}
    snapshot = Snapshot(replica, DFlashConfig.from_target(INFO, session.config.drafter), torch.device("cpu"), torch.bfloat16)
    snapshot.take()
    replica.weights.add_(1.0)
    snapshot.arrive()
    found = snapshot.drafter.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("where", ["cuda:0", "cpu", "cuda:1"])
def test_beside_a_replica_on_a_gpu_the_weights_are_of_one_step_too_wherever_they_are_judged(tmp_path: Path, where: str) -> None:
    if int(where.partition(":")[2] or 0) >= torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    judge = Judge()
    judge.device, judge.dtype = torch.device(where), torch.bfloat16
    given = config(
        devices=["cuda:0"],
        precision="bfloat16",
        max_steps=12,
        checkpoint_every=1,
        keep_checkpoints=20,
        evaluation={"every_steps": 3, "device": where},
    )
    assert evaluated(judge, tmp_path, given).finished
    steps = list(evaluations(tmp_path))
    assert steps[-1] == 12
    for (before, after), step in zip(judge.seen[1:], steps[1:], strict=True):
        masters = load_file(tmp_path / "checkpoints" / f"step-{step:08d}" / "model.safetensors")
        for name, weight in masters.items():
            assert torch.equal(before[name].cpu(), weight.bfloat16())
            assert torch.equal(after[name], before[name])
