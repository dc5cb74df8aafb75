"""Threads, flex_attention and the guard on GPUs."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflash_core.config import load_config
from dflash_core.drafter import DFlashConfig, DFlashDrafter
from dflash_core.errors import TrainingError
from dflash_core.feed import Row, collate
from dflash_core.pipeline import run_stage
from dflash_core.plan import Plan
from dflash_core.target import TargetVocabulary
from dflash_core.training import DrafterTrainer, read_metrics
from dflash_core.training.replica import Replica
from tests.children import environment
from tests.target.tiny import save_tiny_target
from tests.tiny_run import write_tiny_run
from tests.training.small import DISTILLED, INFO, RowsInFp8, RowsOfATeacher, SmallRows, config, losses, plant, run, vocabulary, warm_up
from tests.waiting import ended

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
of_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize("devices", [["cuda:0"], ["cuda:0", "cuda:0"], ["cuda:0", "cuda:1"]])
def test_compiled_replicas_train_in_threads_without_late_compilation_or_growth_of_memory(tmp_path: Path, devices: list[str]) -> None:
    if int(devices[-1][-1]) >= torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    report, session = warm_up(config(devices=devices, max_steps=30, checkpoint_every=10, precision="bfloat16"), tmp_path)
    assert all(device.graphs == 2 for device in report.devices)
    assert DrafterTrainer(session).run().finished
    curve = losses(tmp_path)
    assert curve[-1] < curve[0] - 0.1
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len({line["memory_reserved_0"] for line in lines}) == 1
    assert len({line["memory_retries_0"] for line in lines}) == 1


def test_flex_attention_and_the_dense_mask_give_the_same_losses(tmp_path: Path) -> None:
    run(config(devices=["cuda:0"], accumulation_steps=2, max_steps=4), tmp_path / "gpu")
    run(config(devices=["cpu"], accumulation_steps=2, max_steps=4), tmp_path / "cpu")
    assert losses(tmp_path / "gpu") == pytest.approx(losses(tmp_path / "cpu"), rel=2e-3)


def test_muon_trains_there_as_it_does_on_the_cpu_and_compiles_nothing_late(tmp_path: Path) -> None:
    for device in ("cpu", "cuda:0"):
        assert run(config(devices=[device], optimizer="muon", max_steps=6), tmp_path / device[:3]).finished
    assert losses(tmp_path / "cud") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-2)  # orthogonalised in bfloat16 and in float32


@pytest.mark.parametrize(("devices", "accumulation"), [(["cuda:0"], 1), (["cuda:0"], 2), (["cuda:0", "cuda:0"], 1)])
def test_graphs_give_the_numbers_of_the_step_without_them(tmp_path: Path, devices: list[str], accumulation: int) -> None:
    for name, graphs in (("eager", False), ("graphs", True)):
        settings = config(devices=devices, accumulation_steps=accumulation, max_steps=8, precision="bfloat16", cuda_graphs=graphs)
        assert run(settings, tmp_path / name).finished
    assert losses(tmp_path / "graphs") == pytest.approx(losses(tmp_path / "eager"), rel=1e-4)
    eager, graphs_ = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("eager", "graphs"))
    for name, weight in eager.items():
        torch.testing.assert_close(graphs_[name], weight, rtol=0, atol=2e-3)


def test_distillation_trains_in_graphs_as_it_does_on_the_cpu(tmp_path: Path) -> None:
    for device, graphs in (("cpu", False), ("cuda:0", True)):
        settings = config(devices=[device], max_steps=8, cuda_graphs=graphs, **DISTILLED)
        assert run(settings, tmp_path / device[:3], RowsOfATeacher()).finished
    assert losses(tmp_path / "cud") == pytest.approx(losses(tmp_path / "cpu"), rel=2e-3)


@pytest.mark.parametrize("devices", [["cuda:0", "cuda:0", "cuda:0"], ["cuda:0", "cuda:1"]])
def test_a_sharded_optimiser_trains_as_the_other_does(tmp_path: Path, devices: list[str]) -> None:
    if int(devices[-1][-1]) >= torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    for name, settings in (("all_reduce", {}), ("sharded", {"sync": "sharded"}), ("graphs", {"sync": "sharded", "cuda_graphs": True})):
        assert run(config(devices=devices, max_steps=8, compare_replicas_every=1, **settings), tmp_path / name).finished
    for name in ("sharded", "graphs"):
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "all_reduce"), rel=1e-4)


@pytest.mark.parametrize("graphs", [False, True])
def test_the_host_waits_for_the_device_nowhere_in_a_step(graphs: bool) -> None:
    settings = config(devices=["cuda:0"], precision="bfloat16", cuda_graphs=graphs, objective={"weighting": "dpace"})
    drafter_config, device = DFlashConfig.from_target(INFO, settings.drafter), torch.device("cuda:0")
    small = vocabulary()
    weight = small.embedding_weight.to(device, torch.bfloat16)
    made = Replica(0, device, settings, drafter_config, TargetVocabulary(weight, weight, INFO))
    made.load({name: parameter.detach() for name, parameter in DFlashDrafter(drafter_config).init_weights(0).named_parameters()})
    made.warm_up([SmallRows().row(0)])
    batch = collate([SmallRows().row(1)]).to(device)
    with made.on_device():
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                made.begin_step()
                made.micro_step(batch)
                made.close_step(False)
                made.apply(1e-3)
                later = made.totals_later()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert later().loss > 0
    assert made.updates == 3


def test_a_row_of_another_shape_is_named(tmp_path: Path) -> None:
    class Shorter(SmallRows):
        def row(self, ordinal: int) -> Row:
            row = super().row(ordinal)
            return replace(row, anchors=row.anchors[:-1]) if ordinal == 5 else row

    with pytest.raises(TrainingError, match=r"anchors of row 5 are .*\[5\], and were .*\[6\] in warm-up"):
        run(config(devices=["cuda:0", "cuda:0"]), tmp_path, Shorter())


def test_features_in_fp8_train_with_graphs_to_the_losses_of_what_they_stand_for(tmp_path: Path) -> None:
    for widened in (True, False):
        settings = config(devices=["cuda:0"], rows_per_microstep=2, precision="bfloat16", cuda_graphs=True)
        assert run(settings, tmp_path / str(widened), RowsInFp8(widened=widened)).finished
    assert losses(tmp_path / "False") == pytest.approx(losses(tmp_path / "True"), rel=1e-5)


@pytest.mark.parametrize(("target", "drafter"), [("cuda:0", "cuda:0"), ("cuda:0", "cuda:1")])
def test_a_live_target_feeds_training_with_the_features_of_shards_in_flat_memory(tmp_path: Path, target: str, drafter: str) -> None:
    if int(drafter[-1]) >= torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    curves = {}
    for feed in ("shards", "online"):
        words = [f"target.device={target}", "target.dtype=bfloat16", "extraction.feature_dtype=bfloat16", "training.precision=bfloat16"]
        words += [f"training.devices=[{drafter}]", f"training.feed={feed}", "training.max_steps=30", "training.queue_rows=4"]
        plan = Plan(load_config(tiny_run_on(tmp_path), words), "tiny")
        for name in ("target", "responses", "samples", *(["shards"] if feed == "shards" else []), "train"):
            run_stage(plan, name)
        lines = read_metrics(plan.folder("train") / "metrics.jsonl")
        curves[feed] = [line["loss"] for line in lines]
        for index in {target[-1], drafter[-1]} if feed == "online" else {drafter[-1]}:
            assert len({line[f"memory_reserved_{index}"] for line in lines[5:]}) == 1
    assert curves["online"] == pytest.approx(curves["shards"], rel=2e-2)


@pytest.mark.parametrize(("head_dim", "attention"), [(16, "flex"), (64, "fused")])
def test_what_trimmed_shards_leave_out_is_read_by_no_kernel(tmp_path: Path, head_dim: int, attention: str) -> None:
    words = ["training.devices=[cuda:0]", "training.precision=bfloat16", f"training.attention={attention}", "drafter.sliding_window=6"]
    words += ["target.device=cuda:0", "target.dtype=bfloat16", "extraction.feature_dtype=bfloat16"]
    words += ["extraction.teacher=last_hidden", "objective.distillation={weight: 0.5}"]
    curves = []
    for trim in ("false", "true"):
        plan = Plan(load_config(tiny_run_on(tmp_path, head_dim), [*words, f"extraction.trim={trim}"]), "tiny")
        for name in ("target", "responses", "samples", "shards", "train"):
            run_stage(plan, name)
        curves.append([line["loss"] for line in read_metrics(plan.folder("train") / "metrics.jsonl")])
    print(f"largest difference: {max(abs(a - b) for a, b in zip(*curves, strict=True))}")
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)


@of_two
@pytest.mark.parametrize("sync", ["all_reduce", "sharded"])
def test_torchrun_trains_on_two_gpus_as_threads_do(tmp_path: Path, sync: str) -> None:
    path = tiny_run_on(tmp_path)
    words = ["--set", "training.devices=[cuda:0, cuda:1]", "--set", "training.precision=bfloat16", "--set", f"training.sync={sync}"]
    curves, weights = [], []
    for launcher in ("threads", "torchrun"):
        started = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if launcher == "torchrun" else []
        here = ["--set", f"training.launcher={launcher}", "--set", f"run.workspace={tmp_path / launcher}"]
        command = [sys.executable, *started, "-m", "dflash_core", "train", str(path), *words, *here]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        (metrics,) = (tmp_path / launcher / "stages").glob("train-*/metrics.jsonl")
        curves.append([line["loss"] for line in read_metrics(metrics)])
        weights.append(load_file(metrics.with_name("final") / "model.safetensors"))
    assert curves[1] == pytest.approx(curves[0], rel=1e-3)
    for name, weight in weights[0].items():  # masters, gathered for the checkpoint
        assert (weights[1][name] - weight).norm() < 0.02 * weight.norm(), name


@of_two
def test_a_worker_that_dies_ends_the_one_on_the_other_gpu_and_training_goes_on_from_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(devices=["cuda:0", "cuda:1"], precision="bfloat16", stall_timeout_s=600.0)  # a collective would wait for that, and the test not
    assert run(settings, tmp_path / "calm").finished
    died = []

    def die(replica: Replica) -> None:
        died.append(time.monotonic())
        raise OSError("planted")

    with monkeypatch.context() as patch:
        plant(patch, replica=1, step=4, fault=die)
        with pytest.raises(OSError, match="planted"):
            run(settings, tmp_path / "died")
        seconds = time.monotonic() - died[0]
    assert ended("replica")
    print(f"all had ended {seconds:.1f} s after one died")
    report, session = warm_up(settings, tmp_path / "died")
    assert report.resumed_step == 4
    assert DrafterTrainer(session).run().finished
    assert losses(tmp_path / "died") == pytest.approx(losses(tmp_path / "calm"), rel=1e-4)


@of_two
@pytest.mark.parametrize("sync", ["all_reduce", "sharded"])
def test_a_rank_that_is_killed_ends_the_one_on_the_other_gpu_and_the_same_command_goes_on(tmp_path: Path, sync: str) -> None:
    settings = ["training.devices=[cuda:0, cuda:1]", "training.precision=bfloat16", "training.compile=off", f"training.sync={sync}"]
    settings += ["training.launcher=torchrun", "training.stall_timeout_s=600"]  # a collective would wait for that, and the test not
    words = ["train", str(tiny_run_on(tmp_path, head_dim=64)), *(word for setting in settings for word in ("--set", setting))]
    calm, killed = ([*words, "--set", f"run.workspace={tmp_path / name}"] for name in ("calm", "killed"))

    def train(how: str, words: list[str]) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tests.training.rank_child"]
        return subprocess.run([*command, how, "7", *words], env=environment(), capture_output=True, text=True, timeout=280, check=False)

    done, died = train("neither", calm), train("kill", killed)
    died_at = time.time()
    assert done.returncode == 0, done.stdout + done.stderr
    assert died.returncode != 0
    assert "Signal 9 (SIGKILL)" in died.stderr, died.stdout + died.stderr
    (checkpoint,) = (tmp_path / "killed" / "stages").glob("train-*/checkpoints/step-*")
    seconds = died_at - (checkpoint / "state.json").stat().st_mtime  # rank 1 waits for the first checkpoint before it dies
    print(f"all had ended {seconds:.1f} s after the checkpoint that the kill waited for")
    resumed = train("neither", killed)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "step 1 " not in resumed.stdout
    curves = [
        [line["loss"] for line in read_metrics(next((tmp_path / name / "stages").glob("train-*/metrics.jsonl")))] for name in ("calm", "killed")
    ]
    assert curves[1] == pytest.approx(curves[0], rel=1e-3)


def tiny_run_on(folder: Path, head_dim: int = 16) -> Path:
    """A tiny run whose heads have the least size that ``flex_attention`` takes, or 64, which the kernels do."""
    if not (folder / "tiny.yaml").is_file():
        write_tiny_run(folder)
        save_tiny_target("llama", folder / "target", num_hidden_layers=6, head_dim=head_dim)
    return folder / "tiny.yaml"
