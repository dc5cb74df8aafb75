"""What a run takes, of a configuration that nothing has been run of."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash_core.config import load_config
from dflash_core.estimate import Estimate, Forecast, Rates, estimate
from dflash_core.plan import STAGES, Plan
from flows.plan import print_plan, too_large
from tests.tiny_run import PROMPTS, write_tiny_run


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_run(tmp_path_factory.mktemp("estimate"))


@pytest.fixture(autouse=True)
def _a_slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_core.estimate.stages.measure_rates", lambda device, dtype: Rates(product=1e5, vector=1e5))


def plan_of(config: Path, *changes: str) -> Plan:
    return Plan(load_config(config, changes), str(config))


def estimated(config: Path, stage: str, *changes: str) -> Estimate:
    return estimate(plan_of(config, *changes)).stages[stage]


def test_every_way_of_decoding_is_estimated(config: Path) -> None:
    usual, several = (estimated(config, "evaluate", f"evaluation.block_sizes={sizes}") for sizes in ("[]", "[2, 3]"))
    assert several.rows == f"{usual.rows}, 3 ways of decoding"
    assert several.seconds > 2 * usual.seconds  # type: ignore[operator]


def test_decoding_as_it_is_served_is_estimated_where_it_is_asked_for(config: Path) -> None:
    usual, served = (
        estimated(config, "evaluate", f"evaluation.served_dtype={dtype}", "evaluation.served_prompts=2") for dtype in ("auto", "bfloat16")
    )
    assert served.rows == f"{usual.rows}, 2 in bfloat16"
    assert served.seconds > usual.seconds  # type: ignore[operator]
    assert served.memory == usual.memory, "one precision after the other"


@pytest.mark.parametrize(
    ("change", "stage"),
    [
        ("evaluation.batch_sizes=[1, 64]", "evaluate"),
        ("data.generation.batch_size=64", "responses"),
        ("extraction.batch_tokens=4000", "shards"),
        ("training.rows_per_microstep=4", "train"),
        ("training.evaluation.every_steps=2", "train"),
    ],
)
def test_settings_that_take_memory_are_estimated_to_take_it(config: Path, change: str, stage: str) -> None:
    assert estimated(config, stage, change).memory_bytes > estimated(config, stage).memory_bytes  # type: ignore[operator]


def test_checkpoints_of_muon_take_less_disk_and_checkpointing_more_time(config: Path) -> None:
    usual, muon, longer = (
        estimated(config, "train", f"training.{change}") for change in ("epochs=50", "optimizer=muon", "activation_checkpointing=true")
    )
    assert muon.disk_bytes < usual.disk_bytes  # type: ignore[operator]
    assert longer.seconds > usual.seconds  # type: ignore[operator]


@pytest.mark.parametrize(
    ("source", "conversations"),
    [
        ("{source: builtin:python-tasks}", 10_000),
        ("{source: 'hf://owner/dataset', limit: 70}", 70),
        ("{source: 'hf://owner/prompts.jsonl'}", 10_000),
        ("{source: FOLDER/prompts.jsonl, limit: 5}", 5),
        ("{source: FOLDER/prompts.jsonl, limit: 50000}", PROMPTS),
        ("{source: FOLDER/prompts.jsonl.gz}", 3),
        ("{source: FOLDER/prompts.parquet}", 4),
        ("{source: FOLDER/damaged.jsonl.gz}", 10_000),
        ("{source: FOLDER/damaged.parquet}", 10_000),
    ],
)
def test_prompts_of_any_source_can_be_estimated(config: Path, source: str, conversations: int) -> None:
    folder = config.parent
    (folder / "prompts.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a"}\n' * 3, mtime=0))
    pq.write_table(pa.table({"prompt": ["a"] * 4}), folder / "prompts.parquet")
    (folder / "damaged.jsonl.gz").write_bytes(b"not gzip")
    (folder / "damaged.parquet").write_bytes(b"not parquet")
    plan = plan_of(config, f"data.sources=[{source.replace('FOLDER', str(folder))}]")
    assert estimate(plan).stages["responses"].rows == f"about {conversations:,} conversations"


def test_a_plan_says_what_other_programs_cost_and_what_does_not_fit(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = {name: Estimate("some", 10, {"cpu": 3 * 10**9}, 10.0) for name in STAGES}
    plan = plan_of(config)
    monkeypatch.setattr("flows.plan.total_memory", lambda device: 2 * 10**9)
    print_plan(plan, plan.stages, Forecast(stages, Rates(1.0, 1.0, share=0.25)))
    text = " ".join(capsys.readouterr().out.split())
    assert "about 1 min 20 s (within a factor of two)" in text
    assert "leave this one 25% of a processor at present: with them about 5 min 20 s" in text
    assert "evaluate needs about 3.0 GB on cpu, which has 2.0 GB: lower evaluation.batch_sizes or max_new_tokens." in text
    monkeypatch.setattr("flows.plan.total_memory", lambda device: 4 * 10**9)
    assert not list(too_large(stages))
