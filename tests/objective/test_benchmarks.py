"""The benchmarks at a tiny size on the CPU, so that no GPU time is spent on finding their typos."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forks import Forks

pytest.importorskip("triton")
KEYS = {"name", "value", "unit", "gpu", "torch", "commit", "dirty", "date", "samples", "detail"}


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    modules = ", ".join(f"benchmarks.{name}" for name in ("step", "flatness", "evaluator", "extract", "reader", "online"))
    with Forks(f"{modules}, dflash_core.target.static, torch._inductor.compile_fx") as forks:
        yield forks


def test_objective_imports_without_pydantic_as_bare_gpu_machines_need(forks):
    modules = ", ".join(f"dflash_core.objective{name}" for name in ("", ".reference", ".softmax_kernel"))
    imported = "[name for name in sys.modules if name.partition('.')[0] in ('dflash_core', 'pydantic')]"
    forks.run(f"import sys\nfor name in {imported}:\n    del sys.modules[name]\nsys.modules['pydantic'] = None\nimport {modules}")


def test_every_section_runs_at_a_tiny_size_and_a_second_run_measures_nothing_again(tmp_path, forks):
    results = tmp_path / "results.jsonl"
    words = ["--shape", "tiny", "--device", "cpu", "--results", str(results), "--commit", "abc", "--attention", "grouped", "batched", "expanded"]
    words += ["--sections", "loss", "attention", "step", "profile", "--variants", "product", "accumulate2", "host", "muon"]
    forks.run(f"from benchmarks.step import main\nassert main({words!r}) == 0\nassert main({words!r}) == 0")
    records = [json.loads(line) for line in results.read_text().splitlines()]
    assert all(set(record) == KEYS for record in records)
    names = [record["name"] for record in records]
    assert names.count("ceiling.bf16") == 2  # a ceiling is always that of the same process
    assert len(set(names)) == len(names) - 1
    expected = {"loss.step.tiny.chunk16", "loss.error.nll.tiny", "attention.forward.tiny.batched", "step.profile.tiny"}
    expected |= {f"step.bf16.tiny{suffix}" for suffix in ("", ".ceiling_share", ".peak", ".accumulate2", ".host", ".muon")}
    assert expected <= set(names)
    losses = next(record["detail"]["losses"] for record in records if record["name"] == "step.bf16.tiny")
    assert losses[-1] < losses[0]


def test_the_engine_is_measured_at_a_tiny_size_by_the_commands_that_a_gpu_gets(tmp_path, forks):
    results = tmp_path / "results.jsonl"
    words = ["--shape", "tiny", "--steps", "12", "--results", str(results), "--commit", "abc"]
    alone = [*words, "--sections", "overhead", "--device", "cpu"]
    together = [*words, "--sections", "scaling", "--devices", "cpu,cpu", "--shapes", "tiny"]
    out = forks.run(f"from benchmarks.flatness import main\nassert main({alone!r}) == 0\nassert main({together!r}) == 0")
    assert "READY" in out
    records = {record["name"]: record for record in map(json.loads, results.read_text().splitlines())}
    names = {"engine.overhead.tiny", "multi.scaling_2gpu_tiny", "flatness.peak_spread", "flatness.reserved_growth", "flatness.retries"}
    assert set(records) == names
    assert records["multi.scaling_2gpu_tiny"]["detail"]["replicas"] == "bit-identical"
    assert records["flatness.retries"]["samples"] == 7  # of 12 steps, the first 5 do not count


def test_an_evaluator_beside_training_is_measured_at_a_tiny_size(tmp_path, forks):
    results = tmp_path / "results.jsonl"
    words = ["--shape", "tiny", "--device", "cpu", "--steps", "8", "--tokens", "2", "--results", str(results), "--commit", "abc"]
    forks.run(f"from benchmarks.evaluator import main\nassert main({words!r}) == 0")
    records = {record["name"]: record for record in map(json.loads, results.read_text().splitlines())}
    assert set(records) == {"evaluator.step_ratio", "evaluator.seconds"}
    assert records["evaluator.step_ratio"]["detail"]["late_compiles"] == 0
    assert records["evaluator.seconds"]["samples"] >= 1


def test_extraction_and_the_reader_are_measured_at_a_tiny_size(tmp_path, forks):
    results = tmp_path / "results.jsonl"
    words = ["--device", "cpu", "--results", str(results), "--commit", "abc", "--folder", str(tmp_path)]
    reader = [*words, "--gigabytes", "0.01"]
    forks.run(
        f"from benchmarks import extract, reader\nassert extract.main({[*words, '--sections', 'tiny']!r}) == 0\nassert reader.main({reader!r}) == 0"
    )
    records = {record["name"]: record for record in map(json.loads, results.read_text().splitlines())}
    names = {"extract.ceiling_share.tiny", "extract.tok_s.tiny", "extract.tok_s.tiny.passes", "extract.packed_error.tiny"}
    assert {*names, "reader.rows_s.small", "reader.gb_s", "reader.gb_s.first_epoch", "reader.copy_gb_s", "reader.checksum_gb_s"} <= set(records)
    assert records["extract.packed_error.tiny"]["value"] < 0.02


def test_flops_of_a_step_are_those_of_the_issue():
    from benchmarks.common import SHAPES

    assert SHAPES["1x2048"].flops == pytest.approx(68.1e12, rel=2e-3)


def test_training_from_a_live_target_is_measured_at_a_tiny_size(tmp_path, forks):
    results = tmp_path / "results.jsonl"
    out = forks.run(
        "from pathlib import Path\nimport torch\nfrom benchmarks.common import SHAPES, Recorder\nfrom benchmarks.online import measure_online\n"
        f"recorder = Recorder(Path({str(results)!r}), torch.device('cpu'), 'abc', False)\n"
        "measure_online(recorder, SHAPES['tiny'], 'cpu', 'cpu', 12, ['apart', 'together'], {'compile': 'off'})"
    )
    (record,) = map(json.loads, results.read_text().splitlines())
    assert record["name"] == "multi.online_tok_s.one_gpu"
    assert {"data_wait_share", "source_wait_share", "feed_bottleneck", "queue_depth", "copy", "target_alone_tok_s"} <= set(record["detail"]), out


def test_figures_name_what_is_missing_or_out_of_bounds_and_the_command_that_measures_it(tmp_path, capsys):
    from benchmarks import figures

    def line(name: str, value: float, gpu: str = "H200") -> str:
        return json.dumps({"name": name, "value": value, "unit": "", "gpu": gpu, "commit": "abc", "date": "2026-01-01"}) + "\n"

    results = tmp_path / "results.jsonl"
    kept = "".join(line(figure.name, figure.bound, "cpu" if figure.name.endswith(".cpu") else "H200") for figure in figures.FIGURES)
    results.write_text(kept)
    assert figures.main(["--results", str(results)]) == 0
    assert "not" not in capsys.readouterr().out
    results.write_text(kept + line("tau.gsm8k", 9.0, "cpu") + line("reader.gb_s", 9.9) + line("threads.failures", 1))
    assert figures.main(["--results", str(results), "--missing"]) == 1
    assert capsys.readouterr().out.splitlines() == [figures.THREADS, "python -m benchmarks.reader"]
    found = figures.records(results.read_text().splitlines())
    assert [record["value"] for record in found["tau.gsm8k"]] == [3.0]  # not that of a CPU
    assert "9.9  | ≥ 10 | **not reached**; was 10 at abc, 2026-01-01 |" in figures.table(found)


def test_a_drafter_is_recorded_as_its_evaluation_and_its_training_were(tmp_path, capsys):
    from benchmarks.drafter import main
    from dflash_core.config import load_config
    from dflash_core.plan import Plan
    from tests.tiny_run import run_all, write_tiny_run

    config, results = write_tiny_run(tmp_path), tmp_path / "results.jsonl"
    settings = ["training.max_steps=4", "training.devices=[cpu]", "training.evaluation.every_steps=2", "evaluation.block_sizes=[2]"]
    settings += ["evaluation.served_dtype=bfloat16", "evaluation.served_prompts=2"]
    words = ["--config", str(config), "--results", str(results), "--commit", "abc", "--speed-on", "heldout"]
    words += [word for setting in settings for word in ("--set", setting)]
    assert main(words) == 2
    assert "never run. Run: python -m dflash_core evaluate" in capsys.readouterr().err
    run_all(Plan(load_config(config, settings)))
    assert main(words) == 0
    records = {record["name"]: record for record in map(json.loads, results.read_text().splitlines())}
    assert list(records) == ["drafter.train_s", "tau.trained", "tau.heldout", "speedup.cpu.bfloat16", "speedup.cpu.float32"]
    assert list(records["tau.trained"]["detail"]["by_tokens"]) == ["0", "128", "256"]
    assert 1.0 <= records["tau.heldout"]["value"] <= 4.0
    served = records["speedup.cpu.bfloat16"]
    assert (served["samples"], served["detail"]["dtype"], set(served["detail"]["other_blocks_on_all_prompts"])) == (2, "bfloat16", {"2"})
    assert records["speedup.cpu.float32"]["samples"] == 3


def test_each_block_size_is_held_against_the_target_alone_and_the_parts_of_a_round_are_timed(tmp_path):
    from argparse import Namespace

    import torch

    from benchmarks import blocks
    from benchmarks.common import Recorder
    from dflash_core.config import DrafterConfig
    from dflash_core.drafter import DFlashConfig, DFlashDrafter
    from dflash_core.target import TargetModel
    from tests.target.tiny import save_tiny_target

    target = TargetModel.from_pretrained(save_tiny_target("llama", tmp_path), dtype=torch.float32)
    shape = DrafterConfig(num_layers=1, block_size=4, mask_token_id=259, tap_layers=(0, 2))
    drafter = DFlashDrafter(DFlashConfig.from_target(target.info, shape)).init_weights(0)
    recorder = Recorder(tmp_path / "results.jsonl", torch.device("cpu"), "abc", False)
    options = Namespace(set="toy", drafter=Path("drafter"), new=6, blocks=[2, 4], dtype="float32")
    blocks.measure_speed(recorder, target, drafter, [[257, 40, 41], [257, 9]], options)
    blocks.measure_parts(recorder, target, drafter, [1, 4], "float32")
    records = {record["name"]: record for record in map(json.loads, recorder.path.read_text().splitlines())}
    parts = {f"blocks.part.{part}.float32.{width}" for part in ("pass", "head", "draft", "read") for width in (1, 4)}
    assert set(records) == {"blocks.cpu.float32.2.toy", "blocks.cpu.float32.4.toy"} | parts
    assert {records[f"blocks.cpu.float32.{block}.toy"]["detail"]["same_text"] for block in (2, 4)} == {"2/2"}
