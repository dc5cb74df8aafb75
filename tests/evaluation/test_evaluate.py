"""Evaluation on a tiny target: figures, losslessness, resuming."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dflash_core.evaluation.evaluate as evaluate_module
from dflash_core.config import PipelineConfig
from dflash_core.decoding import autoregressive_generate
from dflash_core.drafter import DFlashDrafter
from dflash_core.errors import DataError, InputError
from dflash_core.evaluation import EvaluationPrompt, EvaluationResult, digest_of_drafter, evaluate_drafter, ways_table
from dflash_core.target import TargetModel
from tests.decoding.oracle import OracleDrafter
from tests.evaluation.conftest import TOKENS, prompts_of
from tests.evaluation.planted import served_as

Evaluate = Callable[..., EvaluationResult]


@pytest.fixture
def evaluate(config: PipelineConfig, target: TargetModel, drafter: DFlashDrafter, tmp_path: Path) -> Evaluate:
    def call(**changes: Any) -> EvaluationResult:
        arguments = {"config": config, "target": target, "drafter": drafter, "prompts": prompts_of()[:4], "folder": tmp_path} | changes
        return evaluate_drafter(**arguments)  # type: ignore[arg-type]

    return call


def lines(folder: Path) -> int:
    return len((folder / "prompts.jsonl").read_bytes().splitlines())


def with_evaluation(config: PipelineConfig, **changes: Any) -> PipelineConfig:
    return config.model_copy(update={"evaluation": config.evaluation.model_copy(update=changes)})


def test_a_random_drafter_is_lossless_and_saves_nothing(evaluate: Evaluate, tmp_path: Path) -> None:
    result = evaluate()
    assert result.lossless == 1.0
    assert result.diverged == result.diverged_beyond_noise == 0
    assert result.prompts == 4
    assert 1.0 <= result.trained.acceptance.mean_of_requests < 1.3
    assert result.trained.target_passes_saved_per_token < 0.3
    assert result.untrained is None
    assert [row.id for row in result.rows] == [f"prompt-{n}" for n in range(4)]
    assert EvaluationResult.model_validate_json((tmp_path / "evaluation.json").read_bytes()) == result


def test_the_untrained_drafter_is_measured_on_the_first_prompts_against_their_own_baseline(evaluate: Evaluate, drafter: DFlashDrafter) -> None:
    result = evaluate(untrained=copy.deepcopy(drafter).init_weights(2))
    assert result.untrained is not None
    assert (result.untrained.prompts, result.trained.prompts) == (2, 4)
    assert result.untrained.baseline_seconds.total < result.trained.baseline_seconds.total
    assert result.headline()["acceptance_length_untrained"] == result.untrained.acceptance.mean_of_requests


def test_an_oracle_reaches_the_block_size_and_its_figures_add_up(evaluate: Evaluate, target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [257, 44, 41, 9]
    own = autoregressive_generate(target, prompt, max_new_tokens=60, stop_ids=()).tokens
    oracle = OracleDrafter(target._model, [*prompt, *own], (0, 2), 4)
    monkeypatch.setattr(evaluate_module, "_decoding_copy", lambda drafter, target: drafter)
    monkeypatch.setattr(evaluate_module, "digest_of_drafter", lambda drafter: "oracle")
    result = evaluate(drafter=oracle, prompts=prompts_of([prompt]))
    trained = result.trained
    assert result.lossless == 1.0
    assert trained.acceptance.mean_of_requests == trained.acceptance.pooled == 4.0
    assert trained.acceptance.per_position == (1.0, 1.0, 1.0)
    assert trained.acceptance.histogram == (0, 0, 0, 3)
    assert (trained.tokens, trained.target_passes) == (12, 4)
    assert trained.target_passes_saved_per_token == pytest.approx((12 - 4) / 12)
    seconds = trained.seconds
    assert seconds.prefill + seconds.draft + seconds.verify + seconds.other == pytest.approx(seconds.total)
    assert trained.speedup == pytest.approx(trained.baseline_seconds.total / seconds.total)


def test_prompts_that_are_done_are_not_decoded_again(evaluate: Evaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate(prompts=prompts_of()[:2])
    decoded: list[EvaluationPrompt] = []
    whole = evaluate_module._Bench.measure

    def recording(self: Any, prompt: EvaluationPrompt, *, with_untrained: bool) -> Any:
        decoded.append(prompt)
        return whole(self, prompt, with_untrained=with_untrained)

    monkeypatch.setattr(evaluate_module._Bench, "measure", recording)
    seen: list[tuple[int, int, str]] = []
    result = evaluate(progress=lambda *call: seen.append(call))
    assert decoded == prompts_of()[2:4]
    assert result.prompts == lines(tmp_path) == 4
    assert seen == [(2, 4, "prompts"), (3, 4, "prompts"), (4, 4, "prompts")]
    assert evaluate() == result
    assert len(decoded) == 2


def test_every_set_has_figures_of_its_own_and_one_that_comes_later_is_all_that_is_decoded(
    evaluate: Evaluate, drafter: DFlashDrafter, tmp_path: Path
) -> None:
    before = copy.deepcopy(drafter).init_weights(2)
    alone = evaluate(untrained=before)
    result = evaluate(untrained=before, prompts=[*prompts_of()[:4], *prompts_of(TOKENS[1:4], "chat")])
    assert lines(tmp_path) == 7
    assert {name: found.prompts for name, found in result.sets.items()} == {"heldout": 4, "chat": 3}
    assert result.sets["heldout"] == alone.sets["heldout"]
    assert result.sets["heldout"].headline() == alone.headline()
    assert [found.untrained.prompts for found in result.sets.values() if found.untrained] == [2, 2], "untrained_prompts of each set"
    assert result.prompts_digest != alone.prompts_digest
    assert result.trained.tokens == sum(found.trained.tokens for found in result.sets.values())
    assert result.metrics()["eval/chat/acceptance_length"] == result.sets["chat"].trained.acceptance.mean_of_requests


def test_another_drafter_or_longer_answers_are_measured_afresh(
    evaluate: Evaluate, config: PipelineConfig, drafter: DFlashDrafter, tmp_path: Path
) -> None:
    first = evaluate()
    second = evaluate(drafter=copy.deepcopy(drafter).init_weights(9))
    assert lines(tmp_path) == 8
    assert first.drafter_digest != second.drafter_digest
    evaluate(config=with_evaluation(config, max_new_tokens=13))
    assert lines(tmp_path) == 12


def test_the_same_weights_in_another_configuration_are_another_drafter(evaluate: Evaluate, drafter: DFlashDrafter, tmp_path: Path) -> None:
    """Else a drafter with wrong taps would be given the figures of the right one."""
    first, second = evaluate(), evaluate(drafter=served_as(drafter, tap_layers=(0, 1)))
    assert (lines(tmp_path), first.drafter_digest != second.drafter_digest) == (8, True)
    rope, mask = ({"rope_parameters": {"rope_type": "default", "rope_theta": 2.0}}, {"mask_token_id": 5})
    assert len({digest_of_drafter(served_as(drafter, **changes)) for changes in (rope, mask, {}, {"target_name": "another spelling"})}) == 3


def test_a_verification_that_accepts_too_much_is_caught(evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch) -> None:
    import dflash_core.decoding.decoder as decoder_module
    from dflash_core.decoding.sampling import Verdict

    def credulous(target_logits_RSV: Tensor, drafted_RK: Tensor, count_R: Tensor) -> Verdict:
        return Verdict(count_R, target_logits_RSV[:, -1].argmax(-1))

    monkeypatch.setattr(decoder_module, "verify_greedy", credulous)
    result = evaluate()
    assert result.lossless == 0.0
    assert result.diverged_beyond_noise == 4
    assert result.trained.acceptance.pooled == 4.0, "so acceptance alone would have praised it"


def test_in_bfloat16_every_divergence_is_reported_and_only_those_beyond_noise_count(
    evaluate: Evaluate, tiny_folder: str, drafter: DFlashDrafter, config: PipelineConfig
) -> None:
    result = evaluate(target=TargetModel.from_pretrained(tiny_folder, dtype=torch.bfloat16), config=with_evaluation(config, max_new_tokens=48))
    assert result.dtype == "bfloat16"
    assert result.lossless == 1.0 - result.diverged_beyond_noise / 4
    assert result.diverged >= result.diverged_beyond_noise
    assert next(drafter.parameters()).dtype == torch.float32, "the caller's drafter keeps its precision"


def test_a_smaller_block_than_trained_is_measured_as_such(evaluate: Evaluate, config: PipelineConfig) -> None:
    result = evaluate(config=with_evaluation(config, block_size=2))
    assert result.block_size == 2
    assert len(result.trained.acceptance.per_position) == 1
    assert result.lossless == 1.0


def test_blocks_that_this_drafter_cannot_draft_are_refused_at_once(evaluate: Evaluate, config: PipelineConfig, tmp_path: Path) -> None:
    larger = config.drafter.model_copy(update={"block_size": 8})
    with pytest.raises(InputError, match=r"evaluation\.block_sizes\.1 = 6: larger than the block size that the drafter is trained with"):
        evaluate(config=with_evaluation(config.model_copy(update={"drafter": larger}), block_sizes=(2, 6)))
    assert not list(tmp_path.rglob("prompts.jsonl"))


def test_no_held_out_prompt_is_an_error_that_names_the_setting(evaluate: Evaluate) -> None:
    with pytest.raises(DataError, match=r"data.heldout_fraction = 0.05: left no prompt"):
        evaluate(prompts=[])


def test_every_other_way_of_decoding_is_measured_once_on_all_prompts(
    evaluate: Evaluate, config: PipelineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = with_evaluation(config, batch_sizes=(1, 3), temperatures=(0.0, 1.0), block_sizes=(2,))
    result = evaluate(config=several)
    ways = [(found.way.batch_size, found.way.temperature, found.way.block_size) for found in result.ways]
    assert ways == [(1, 0.0, 2), (1, 1.0, 4), (1, 1.0, 2), (3, 0.0, 4), (3, 0.0, 2), (3, 1.0, 4), (3, 1.0, 2)]
    for found in result.ways:
        assert found.figures.prompts == result.prompts
        assert found.diverged == (None if found.way.temperature else 0)
        assert len(found.figures.acceptance.per_position) == found.way.block_size - 1
        assert found.figures.seconds.total > 0
    greedy = [found.figures.acceptance for found in result.ways if found.way.temperature == 0.0 and found.way.block_size == 4]
    assert greedy == [result.trained.acceptance], "company changes neither texts nor rounds"
    assert result.metrics()["eval/batch-3_t-0.0_block-4/speedup"] == result.ways[3].figures.speedup
    assert [row["together"] for row in ways_table(result)] == ["1", "1", "1", "1", "3", "3", "3", "3"]

    def nothing(*_: Any, **__: Any) -> None:
        raise AssertionError("it was measured before")

    monkeypatch.setattr("dflash_core.evaluation.ways.open_decoder", nothing)
    assert evaluate(config=several).ways == result.ways
    next(tmp_path.glob("way-*.json")).write_bytes(b"{")
    with pytest.raises(AssertionError, match="it was measured before"):  # but that one has to be measured again
        evaluate(config=several)
    (tmp_path / "evaluation.json").unlink(missing_ok=True)
    assert not evaluate().ways
