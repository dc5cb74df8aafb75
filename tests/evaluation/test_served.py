"""Speed in the precision of serving, beside losslessness in float32."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dflash_core.evaluation.evaluate as evaluate_module
from dflash_core.config import PipelineConfig, load_config
from dflash_core.drafter import DFlashDrafter
from dflash_core.evaluation import (
    Divergence,
    EvaluationPrompt,
    EvaluationResult,
    InPrecision,
    compare,
    evaluate_drafter,
    measure_served,
    served_table,
    sets_table,
    ways_table,
)
from dflash_core.evaluation.plots import report_figure
from dflash_core.pipeline import drafter_folder, evaluation_of
from dflash_core.plan import Plan
from dflash_core.summary import write_summary
from dflash_core.target import TargetModel
from tests.evaluation.conftest import TOKENS, prompts_of
from tests.evaluation.test_evaluate import lines, with_evaluation
from tests.evaluation.test_plots import page, result
from tests.tiny_run import run_all, write_tiny_run

PROMPTS = [*prompts_of()[:3], *prompts_of(TOKENS[1:4], "chat")]
Serve = Callable[..., InPrecision]


@pytest.fixture
def two_of_each(config: PipelineConfig) -> PipelineConfig:
    return with_evaluation(config, served_prompts=2, max_new_tokens=6)


@pytest.fixture
def serve(two_of_each: PipelineConfig, tiny_folder: str, drafter: DFlashDrafter, tmp_path: Path) -> Serve:
    target = TargetModel.from_pretrained(tiny_folder, dtype=torch.bfloat16)

    def call(config: PipelineConfig = two_of_each, **arguments: Any) -> InPrecision:
        return measure_served(config, target, drafter, PROMPTS, tmp_path, **arguments)

    return call


@pytest.fixture
def whole(two_of_each: PipelineConfig, target: TargetModel, drafter: DFlashDrafter, serve: Serve, tmp_path: Path) -> EvaluationResult:
    several = with_evaluation(two_of_each, block_sizes=(2,))
    return evaluate_drafter(several, target, drafter, PROMPTS, tmp_path, served=serve(several))


def test_speed_is_that_of_serving_and_that_of_float32_bears_its_name(whole: EvaluationResult, tmp_path: Path) -> None:
    served = whole.served
    assert served is not None
    assert (whole.dtype, served.dtype, whole.prompts, served.prompts) == ("float32", "bfloat16", 6, 4)
    assert [(row.set, row.id) for row in served.rows] == [(name, f"prompt-{n}") for name in ("heldout", "chat") for n in (0, 1)]
    metrics = whole.metrics()
    for prefix, own, theirs in (("", whole, served), ("eval/chat/", whole.sets["chat"], served.sets["chat"])):
        assert metrics[f"{prefix}speedup"] == theirs.trained.speedup
        assert metrics[f"{prefix}tokens_per_second"] == theirs.trained.tokens_per_second
        assert metrics[f"{prefix}speedup_float32"] == own.trained.speedup
        assert metrics[f"{prefix}acceptance_length"] == own.trained.acceptance.mean_of_requests
        assert metrics[f"{prefix}acceptance_length_bfloat16"] == theirs.trained.acceptance.mean_of_requests
        assert metrics[f"{prefix}diverged_bfloat16"] == theirs.diverged
    assert whole.headline()["speedup_low"] == served.trained.intervals.speedup.low  # type: ignore[union-attr]
    for row, of_serving in zip(sets_table(whole), served_table(whole), strict=True):
        assert row["set"] == of_serving["set"]
        assert row["speed-up, bfloat16"] == of_serving["speed-up, bfloat16"]
        assert (row["prompts"], of_serving["prompts"]) in (("3", "2"), ("6", "4"))
    assert not whole.ways, "which are about speed"
    assert [found.figures.prompts for found in served.ways] == [4]
    assert metrics["eval/batch-1_t-0.0_block-2/speedup"] == served.ways[0].figures.speedup
    assert [row["block"] for row in ways_table(whole) if row["speed-up, bfloat16"]] == ["4", "2"]
    texts = {text.get_text() for axes in report_figure([], whole).subfigs[0].axes for text in axes.texts}
    assert f"{served.trained.speedup:.2f}×" in texts
    assert any("in bfloat16" in text for text in texts)
    text = page(tmp_path, metrics=[], evaluation=whole)
    assert f"<b>{served.trained.speedup:.2f}×</b>" in text
    assert "As it is served, in bfloat16" in text
    assert text.count(">–</td>") == 2, "prompts that were decoded in float32 alone"
    assert EvaluationResult.model_validate_json((tmp_path / "evaluation.json").read_bytes()) == whole


def test_a_killed_measurement_goes_on_after_the_last_finished_prompt(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[EvaluationPrompt] = []
    measure = evaluate_module._Bench.measure

    def killed_at_the_third(self: Any, prompt: EvaluationPrompt, *, with_untrained: bool) -> Any:
        if len(decoded) == 2:
            raise KeyboardInterrupt
        decoded.append(prompt)
        return measure(self, prompt, with_untrained=with_untrained)

    with monkeypatch.context() as patched:
        patched.setattr(evaluate_module._Bench, "measure", killed_at_the_third)
        with pytest.raises(KeyboardInterrupt):
            serve()
    seen: list[tuple[int, int, str]] = []
    result = serve(progress=lambda *call: seen.append(call))
    assert seen == [(done, 4, "prompts in bfloat16") for done in (2, 3, 4)]
    assert lines(tmp_path) == 4
    assert serve() == result


def test_a_divergence_within_the_noise_of_bfloat16_is_counted_and_is_no_loss(
    two_of_each: PipelineConfig, target: TargetModel, drafter: DFlashDrafter, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter([Divergence(3, gap=0.1, noise=0.2), Divergence(3, gap=0.3, noise=0.2), None, None])
    with monkeypatch.context() as patched:
        patched.setattr(evaluate_module, "find_divergence", lambda *_: next(found))
        served = serve()
    assert (served.diverged, served.diverged_beyond_noise, served.lossless) == (2, 1, 0.75)
    result = evaluate_drafter(two_of_each, target, drafter, PROMPTS, tmp_path, served=served)
    assert (result.lossless, result.diverged) == (1.0, 0), "float32 proves what bfloat16 cannot"
    assert [(row["diverged"], row["beyond noise"]) for row in served_table(result)] == [("2", "1"), ("0", "0"), ("2", "1")]


def test_results_of_before_are_read_and_are_compared_in_the_precision_that_both_have() -> None:
    old, other = result(untrained=True, rounds=[3, 0, 1]), result(untrained=False, rounds=[3, 3])
    assert '"served":null' in (text := old.model_dump_json())
    assert EvaluationResult.model_validate_json(text.replace(',"served":null', "")) == old
    assert old.as_served is old
    assert not served_table(old)
    assert "speed-up, float32" in sets_table(old)[0]
    assert not [name for name in old.metrics() if name.endswith(("_float32", "_bfloat16"))]
    figures = {name: getattr(other, name) for name in InPrecision.model_fields} | {"dtype": "bfloat16"}
    figures["trained"] = other.trained.model_copy(update={"speedup": 2.7})
    new = old.model_copy(update={"served": InPrecision.model_validate(figures)})
    both, mixed = compare(new, new), compare(old, new)
    assert (both.speed_dtype, both.first_speedup, both.second_speedup) == ("bfloat16", 2.7, 2.7)
    assert (mixed.speed_dtype, mixed.first_speedup, mixed.second_speedup) == ("float32", old.trained.speedup, old.trained.speedup)


@pytest.mark.parametrize(
    ("target", "evaluation", "expected"),
    [
        ("bfloat16", {"device": "cuda:0"}, "bfloat16"),
        ("bfloat16", {"device": "cuda:0+cuda:1"}, "bfloat16"),
        ("float32", {"device": "cuda:0"}, None),
        ("bfloat16", {"device": "cuda:0", "dtype": "bfloat16"}, None),
        ("bfloat16", {"device": "cuda:0", "served_dtype": None}, None),
        ("bfloat16", {"device": "cpu"}, None),
        ("float32", {"device": "cpu", "served_dtype": "bfloat16"}, "bfloat16"),
    ],
)
def test_the_precision_of_serving_is_the_targets_on_a_gpu(config: PipelineConfig, target: str, evaluation: dict[str, Any], expected: str) -> None:
    asked = with_evaluation(config, **evaluation).model_copy(update={"target": config.target.model_copy(update={"dtype": target})})
    assert asked.served_dtype == expected


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda:0", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")])],
)
def test_a_run_tells_the_speed_of_serving_everywhere_with_one_target_in_memory(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny_run(tmp_path)
    changes = ["training.max_steps=2", "data.sources.0.limit=16", "evaluation.served_prompts=2", f"evaluation.device={device}"]
    loaded: list[weakref.ref[TargetModel]] = []
    load = TargetModel.from_pretrained

    def loading(*args: Any, **kwargs: Any) -> TargetModel:
        assert [known for known in loaded if known() is not None] == [], "the one before is gone"
        model = load(*args, **kwargs)
        loaded.append(weakref.ref(model))
        return model

    monkeypatch.setattr(TargetModel, "from_pretrained", loading)
    plan = Plan(load_config(path, [*changes, "evaluation.served_dtype=bfloat16"]))
    results = run_all(plan)
    evaluation = evaluation_of(results["evaluate"].folder)
    assert evaluation.served is not None
    assert len(loaded) >= 3, "float32 before, bfloat16, float32"
    summary = json.loads(write_summary(plan, results).read_text())
    assert (summary["speedup"], summary["speed_dtype"]) == (evaluation.served.trained.speedup, "bfloat16")
    assert summary["sets"]["heldout"]["speedup_float32"] == evaluation.trained.speedup
    assert summary["intervals"]["speedup"] == evaluation.served.trained.intervals.speedup.model_dump()  # type: ignore[union-attr]
    card = (drafter_folder(results["export"].folder) / "README.md").read_text()
    assert f"{evaluation.served.trained.speedup:.2f} times the target alone in bfloat16" in card
    without = Plan(load_config(path, changes))
    assert without.key("train") == plan.key("train")
    assert without.key("evaluate") != plan.key("evaluate")
    assert without.key("evaluate") == Plan(load_config(path, [*changes, "evaluation.served_prompts=7"])).key("evaluate"), "of no use here"
