"""The run: warm-up first, threads that end together, and what the user reads when something breaks."""

import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_core.errors import CheckpointError, ConfigError, LateCompilationError, TrainingError, WarmUpError
from dflash_core.training import DrafterTrainer, TrainingSession
from dflash_core.training.metrics import MetricLog
from dflash_core.training.replica import Replica
from tests.training.small import RowsInFp8, SmallRows, config, final_weights, losses, plant, run, stall_once, warm_up
from tests.waiting import PATIENCE_S, ended


def in_thread(work: Callable[[], object]) -> BaseException | None:
    caught: list[BaseException] = []

    def call() -> None:
        try:
            work()
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=call, name="task runner")
    thread.start()
    thread.join(PATIENCE_S)
    return caught[0] if caught else None


def test_training_learns_and_leaves_final_weights_metrics_and_facts(tmp_path: Path) -> None:
    seen: list[tuple[int, dict[str, float], str]] = []
    _, session = warm_up(config(max_steps=12, log_every=2), tmp_path)
    threads = torch.get_num_threads()
    result = DrafterTrainer(session).run(lambda step, metrics: seen.append((step, dict(metrics), threading.current_thread().name)))
    assert result.finished
    assert result.weights == tmp_path / "final" / "model.safetensors"
    assert [step for step, _, _ in seen] == [2, 4, 6, 8, 10, 12]
    assert {thread for _, _, thread in seen} == {"MainThread"}
    assert losses(tmp_path)[-1] < losses(tmp_path)[0] - 0.1
    assert {"loss", "token_accuracy", "accuracy_slot_1", "accuracy_slot_3", "learning_rate", "grad_norm", "tokens_per_second"} <= seen[-1][1].keys()
    assert {"supervised_slots", "data_wait_share", "sync_share", "queue_depth", "nonfinite_steps", "memory_rss"} <= seen[-1][1].keys()
    assert "accuracy_slot_0" not in seen[-1][1]
    assert (tmp_path / "training.json").is_file()
    assert torch.get_num_threads() == threads
    assert ended("replica")


def test_features_in_fp8_train_to_the_weights_of_what_they_stand_for(tmp_path: Path) -> None:
    for widened in (True, False):
        assert run(config(rows_per_microstep=2), tmp_path / str(widened), RowsInFp8(widened=widened)).finished
    assert final_weights(tmp_path / "True") == final_weights(tmp_path / "False")


def test_off_the_main_thread_warm_up_and_training_refuse(tmp_path: Path) -> None:
    error = in_thread(lambda: warm_up(config(), tmp_path))
    assert isinstance(error, WarmUpError)
    assert "'task runner'" in str(error)
    assert "main thread" in str(error)
    _, session = warm_up(config(), tmp_path)
    assert isinstance(in_thread(DrafterTrainer(session).run), WarmUpError)
    assert DrafterTrainer(session).run().finished  # a refused call has not used the session up


def test_a_session_is_found_by_run_and_settings_and_is_good_for_one_run(tmp_path: Path) -> None:
    report, session = warm_up(config(), tmp_path)
    assert report.total_steps == 6
    assert [device.device for device in report.devices] == ["cpu", "cpu"]
    assert TrainingSession.get("run", config()) is session
    assert TrainingSession.get("run", config(max_steps=7)) is None
    assert TrainingSession.get("another", config()) is None
    DrafterTrainer(session).run()
    assert TrainingSession.get("run", config()) is None
    with pytest.raises(WarmUpError, match="has been used"):
        DrafterTrainer(session).run()


def test_a_forced_retry_warms_up_again_and_ends_with_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(config(), tmp_path / "calm")

    def die(replica: Replica) -> None:
        raise OSError("planted")

    with monkeypatch.context() as patch:
        plant(patch, replica=1, step=4, fault=die)
        with pytest.raises(OSError, match="planted"):
            run(config(), tmp_path / "retried")
    assert TrainingSession.get("run", config()) is None
    report, session = warm_up(config(), tmp_path / "retried")
    assert report.resumed_step == 4
    assert DrafterTrainer(session).run().finished
    assert final_weights(tmp_path / "retried") == final_weights(tmp_path / "calm")
    assert losses(tmp_path / "retried") == losses(tmp_path / "calm")


def test_a_dying_worker_ends_all_promptly_with_its_own_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die_of_something_odd(replica: Replica) -> None:
        raise KeyError("planted")

    plant(monkeypatch, replica=1, step=3, fault=die_of_something_odd)
    with pytest.raises(KeyError, match="planted") as caught:
        run(config(max_steps=20), tmp_path)
    assert any(entry.name == "die_of_something_odd" for entry in caught.traceback)
    assert any("replica 1 (cpu), step 4" in note for note in caught.value.__notes__)
    assert ended("replica")


def test_a_failing_source_of_rows_surfaces_with_its_own_traceback(tmp_path: Path) -> None:
    class Broken(SmallRows):
        def row(self, ordinal: int) -> Any:
            if ordinal == 7:
                raise OSError("the disk is gone")
            return super().row(ordinal)

    with pytest.raises(OSError, match="the disk is gone") as caught:
        run(config(), tmp_path, Broken())
    assert any(entry.name == "row" for entry in caught.traceback)
    assert ended("replica")


def test_a_stalled_worker_ends_the_run_and_everyone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released, zero, one = (
        threading.Event(),
        "replica 0 (cpu) waits for the other replicas in step 3",
        "replica 1 (cpu) computes micro-step 0 of step 3",
    )
    plant(monkeypatch, replica=1, step=2, fault=lambda replica: released.wait())
    stall_once(monkeypatch, lambda who: zero in who and one in who)
    _, session = warm_up(config(), tmp_path)
    try:
        with pytest.raises(TrainingError) as caught:
            DrafterTrainer(session).run()
    finally:
        released.set()
    for part in ("No step has finished for training.stall_timeout_s = 0.2 seconds", zero, one):
        assert part in str(caught.value)
    assert ended("replica")


def test_a_drifting_replica_ends_the_run_with_what_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def drift(replica: Replica) -> None:
        replica.layout.views(replica.moments.masters_P)["layers.1.mlp.up_proj.weight"][3, 5] += 1e-6

    plant(monkeypatch, replica=1, step=2, fault=drift)
    with pytest.raises(
        TrainingError, match=r"no longer equal after step 4: replica 1 differs from replica 0 in weights of .*layers.1.mlp.up_proj.weight"
    ):
        run(config(), tmp_path)
    assert ended("replica")


def test_a_nan_on_one_replica_is_skipped_on_all_counted_and_survived(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = PoisonedRows({5})
    with caplog.at_level(logging.WARNING):
        result = run(config(compare_replicas_every=1), tmp_path, source)
    assert result.finished
    assert result.skipped_steps == 1
    assert result.metrics["nonfinite_steps"] == 1.0
    assert "Step 3 was skipped on all replicas: NaN or infinity on replica 1." in caplog.text


def test_too_many_nans_in_a_row_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(
        TrainingError, match=r"gradients of 3 steps in a row, the last of them step 4, were not finite \(NaN or infinity on replica 0\)"
    ):
        run(config(max_nonfinite_steps=3), tmp_path, PoisonedRows({2, 4, 6}))


class PoisonedRows(SmallRows):
    def __init__(self, poisoned: set[int]):
        super().__init__()
        self.poisoned = poisoned

    def row(self, ordinal: int) -> Any:
        row = super().row(ordinal)
        if ordinal in self.poisoned:
            row.features[7, 3] = float("nan")
        return row


def test_a_stop_is_agreed_on_and_the_same_call_resumes_to_the_same_weights(tmp_path: Path) -> None:
    run(config(max_steps=8), tmp_path / "calm")
    stop = threading.Event()
    _, session = warm_up(config(max_steps=8), tmp_path / "stopped")
    result = DrafterTrainer(session).run(lambda step, metrics: stop.set(), stop)
    assert not result.finished
    assert result.steps < 8
    report, session = warm_up(config(max_steps=8), tmp_path / "stopped")
    assert report.resumed_step == result.steps
    finished = DrafterTrainer(session).run()
    assert final_weights(tmp_path / "stopped") == final_weights(tmp_path / "calm")
    _, session = warm_up(config(max_steps=8), tmp_path / "stopped")
    again = DrafterTrainer(session).run()  # nothing is left to do, and the result is the same
    assert again == finished


def test_a_signal_on_the_main_thread_leaves_a_checkpoint_and_goes_on_its_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class TerminationSignal(BaseException):
        pass

    def terminate(number: int, frame: object) -> None:
        raise TerminationSignal

    stopping, mute = threading.Event(), MetricLog.mute

    def send(replica: Replica) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        stopping.wait(PATIENCE_S)  # or the training might be over before the main thread takes it

    monkeypatch.setattr(MetricLog, "mute", lambda log: (mute(log), stopping.set()))
    _, session = warm_up(config(max_steps=8, checkpoint_every=1000), tmp_path)
    plant(monkeypatch, replica=1, step=3, fault=send)
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        with pytest.raises(TerminationSignal):
            DrafterTrainer(session).run()
    finally:
        signal.signal(signal.SIGTERM, before)
    report, _ = warm_up(config(max_steps=8, checkpoint_every=1000), tmp_path)
    assert report.resumed_step == len(losses(tmp_path)) == 4
    assert ended("replica")


def test_an_error_of_whoever_listens_to_metrics_stops_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    def listen(step: int, metrics: object) -> None:
        raise ConnectionError("tracking server")

    _, session = warm_up(config(checkpoint_every=1000), tmp_path)
    with pytest.raises(ConnectionError, match="tracking server"):
        DrafterTrainer(session).run(listen)
    assert warm_up(config(checkpoint_every=1000), tmp_path)[0].resumed_step > 0


def test_settings_that_change_the_course_are_refused_on_resume_and_others_are_not(tmp_path: Path) -> None:
    run(config(max_steps=4), tmp_path)
    with pytest.raises(CheckpointError, match=r"training.learning_rate is 0.01 and was 0.003"):
        warm_up(config(max_steps=4, learning_rate=0.01), tmp_path)
    with pytest.raises(CheckpointError, match=r"optimiser steps of the run .* is 5 and was 4"):
        warm_up(config(max_steps=5), tmp_path)
    report, _ = warm_up(config(1, accumulation_steps=2, max_steps=4, log_every=3, stall_timeout_s=5.0), tmp_path)
    assert report.resumed_step == 4


def test_a_schedule_longer_than_the_data_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"training.max_steps = 97.*6 epochs hold 96 steps"):
        warm_up(config(max_steps=97), tmp_path, SmallRows(rows=32))


def test_a_compiled_drafter_trains_and_its_late_compilation_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    monkeypatch.setattr(torch._inductor.config.cpp, "simdlen", 1)  # plain loops compile sooner than those of vectors

    class Longer(SmallRows):
        def row(self, ordinal: int) -> Any:
            row = super().row(ordinal)
            if ordinal == 5:  # the third row of replica 1 comes with fewer anchors: a new shape
                object.__setattr__(row, "anchors", row.anchors[:-1])
            return row

    report, session = warm_up(config(compile="on", drafter={"num_layers": 1}), tmp_path, Longer())
    assert [device.graphs for device in report.devices] == [1, 1]
    assert [device.graphs_found for device in report.devices] == [0, 1]  # the second replica finds what the first has compiled
    with pytest.raises(LateCompilationError) as caught:
        DrafterTrainer(session).run()
    for part in ("draft_of_replica_1", "replica 1 (cpu)", "size mismatch", "[1, 5, 64]"):
        assert part in str(caught.value)
    run(config(drafter={"num_layers": 1}), tmp_path / "eager")
    assert len(losses(tmp_path)) == 2  # both replicas trained on compiled code until then
    assert losses(tmp_path) == pytest.approx(losses(tmp_path / "eager")[:2], rel=1e-4)
    assert ended("replica")
    torch._dynamo.reset()
