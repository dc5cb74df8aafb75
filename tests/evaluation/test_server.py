"""A running server's figures are read off its answers and its counters, and servers that are not what they should be are refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dflash_core.config import load_config
from dflash_core.decoding import Generation, autoregressive_generate, measure_acceptance, speculative_generate
from dflash_core.drafter import DFlashDrafter, load_checkpoint
from dflash_core.errors import EndpointError, InputError
from dflash_core.evaluation import server as module
from dflash_core.evaluation.counters import Counters, acceptance_between, read_counters
from dflash_core.evaluation.server import ServerFigures, compare_servers, measure_server
from dflash_core.pipeline import drafter_folder, evaluation_of
from dflash_core.plan import Plan
from dflash_core.target import TargetModel
from flows.cli import app
from tests.evaluation.conftest import TOKENS
from tests.evaluation.stand_in import Answer, StandIn, serving
from tests.tiny_run import run_all, write_tiny_run
from tests.waiting import PATIENCE_S, eventually

PROMPTS = TOKENS


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SETTLE_SECONDS", PATIENCE_S)  # all counters come that are waited for, but where a test says otherwise
    monkeypatch.setattr(module.time, "sleep", lambda seconds, sleep=module.time.sleep: sleep(min(seconds, 0.02)))


@pytest.fixture
def target(target: TargetModel) -> TargetModel:
    """It says five words only, so that some drafts are accepted."""
    target.vocabulary.head_weight[5:] = target.vocabulary.head_weight[0]
    return target


def decoding(target: TargetModel, drafter: DFlashDrafter | None) -> Answer:
    """Real decoding, as a server of this target would do it."""

    def answer(prompt: list[int], max_tokens: int, ignore_eos: bool) -> Generation:
        stops = () if ignore_eos else target.info.eos_token_ids
        if drafter is None:
            return autoregressive_generate(target, prompt, max_new_tokens=max_tokens, stop_ids=stops)
        return speculative_generate(target, drafter, prompt, max_new_tokens=max_tokens, block_size=4, stop_ids=stops)

    return answer


def measured(url: str, *, drafts: bool = True, concurrency: int = 1, timeout_seconds: float = 10.0) -> ServerFigures:
    return measure_server(url, PROMPTS, max_new_tokens=12, stop_ids=(258,), drafts=drafts, concurrency=concurrency, timeout_seconds=timeout_seconds)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_vllms_counters_give_the_acceptance_that_the_decoding_had(target: TargetModel, drafter: DFlashDrafter, concurrency: int) -> None:
    answer = decoding(target, drafter)
    own = [answer(prompt, 12, False) for prompt in PROMPTS]
    want = measure_acceptance(own, 4)
    stand_in = StandIn("vllm", answer, drafts=True)
    with serving(stand_in) as url:
        figures = measured(url + "/v1/", concurrency=concurrency)
    assert figures.acceptance is not None
    assert (figures.engine, figures.model, figures.prompts, figures.notes) == ("vllm", "tiny", len(PROMPTS), ())
    assert (figures.acceptance.rounds, figures.acceptance.accepted, figures.acceptance.drafted) == (want.rounds, want.accepted, want.drafted)
    assert figures.acceptance.acceptance_length == pytest.approx(want.pooled) != 1.0
    assert figures.acceptance.per_position == pytest.approx(want.per_position)
    assert figures.tokens == sum(len(done.tokens) for done in own)
    assert figures.tokens_per_second == pytest.approx(figures.tokens / figures.seconds)
    assert 0 < figures.latency_seconds["p50"] <= figures.latency_seconds["p99"] <= figures.seconds
    assert figures.texts == tuple(" ".join(map(str, done.tokens)) for done in own)
    asked = stand_in.asked[1:]
    assert sorted(body["prompt"] for body in asked) == sorted(PROMPTS)
    assert all(
        (body["temperature"], body["repetition_penalty"], body["stop_token_ids"], body["ignore_eos"]) == (0, 1, [258], False) for body in asked
    )


def test_sglangs_counters_give_the_acceptance_of_whole_answers(target: TargetModel, drafter: DFlashDrafter) -> None:
    answer = decoding(target, drafter)
    own = [answer(prompt, 12, False) for prompt in PROMPTS]
    with serving(StandIn("sglang", answer, drafts=True)) as url:
        figures = measured(url)
    assert figures.acceptance is not None
    rounds = sum(len(done.accepted) for done in own)
    assert (figures.engine, figures.acceptance.rounds, figures.acceptance.accepted) == ("sglang", rounds, None)
    assert figures.acceptance.acceptance_length == pytest.approx((figures.tokens - len(PROMPTS)) / rounds)
    assert 1.0 < figures.acceptance.acceptance_length <= measure_acceptance(own, 4).pooled  # tokens beyond the end were verified, not sent


def test_two_servers_are_compared_by_speed_and_by_text(target: TargetModel, drafter: DFlashDrafter) -> None:
    with (
        serving(StandIn("vllm", decoding(target, drafter), drafts=True)) as one,
        serving(StandIn("vllm", decoding(target, None), drafts=False)) as other,
    ):
        drafted, alone = measured(one), measured(other, drafts=False)
    result = compare_servers(drafted, alone, None)
    assert alone.acceptance is None
    assert result.same_text == 1.0
    assert result.speedup == pytest.approx(drafted.tokens_per_second / alone.tokens_per_second)
    differing = alone.model_copy(update={"texts": ("another", *alone.texts[1:])})
    assert compare_servers(drafted, differing, None).same_text == pytest.approx(0.8)


def made_up(prompt: list[int], max_tokens: int, ignore_eos: bool) -> Generation:
    zero = {"seconds": 0.0, "prefill_seconds": 0.0, "draft_seconds": 0.0, "verify_seconds": 0.0}
    return Generation(tokens=(1,) * 5, finish_reason="length", accepted=(1, 1), drafted=(3, 3), target_passes=3, draft_passes=2, **zero)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_server_that_drafts_though_it_should_not_or_the_other_way_round_is_refused_before_the_prompts(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SETTLE_SECONDS", 0.2)
    for drafts in (True, False):
        stand_in = StandIn(engine, made_up, drafts=drafts)
        with serving(stand_in) as url, pytest.raises(EndpointError, match=r"should|expected") as caught:
            measured(url, drafts=not drafts)
        assert str(caught.value).startswith(url)
        assert len(stand_in.asked) == 1


def test_busy_servers_are_asked_again_and_refusals_are_told_with_the_servers_words() -> None:
    with serving(StandIn("vllm", made_up, drafts=True, failures=[503, 429, 408])) as url:
        measured(url)
    stand_in = StandIn("vllm", made_up, drafts=True)
    with serving(stand_in) as url:
        stand_in.failures = []
        figures = measured(url)
        assert figures.notes == ()
        stand_in.failures = [400]
        with pytest.raises(EndpointError, match=r"/v1/completions: refused: status 400: .*too long"):
            measured(url)
        stand_in.failures = [503] * 4
        with pytest.raises(EndpointError, match=r"no answer in 4 tries of up to 10 s: status 503"):
            measured(url)


def test_a_server_that_hangs_or_is_not_there_ends_in_an_error() -> None:
    hangs = StandIn("vllm", made_up, drafts=True, most=0)
    with serving(hangs) as url, pytest.raises(EndpointError, match=r"completions: no answer in 4 tries of up to 0.1 s: ReadTimeout"):
        module._Server(url, 0.1).complete("tiny", [1], 1, [])
    with pytest.raises(EndpointError, match=r"/v1/models: no answer .*[Rr]efused"):
        measured(url)
    with pytest.raises(EndpointError, match="expected the address of a server"):
        measured("localhost:8000")


def test_an_interrupt_does_not_wait_for_requests_under_way() -> None:
    stand_in = StandIn("vllm", made_up, drafts=True, most=1)  # the warm-up; none of the two that are under way is answered

    def interrupt(done: int, total: int, unit: str) -> None:
        assert eventually(lambda: stand_in.begun == 3)
        raise KeyboardInterrupt

    with serving(stand_in) as url:
        with pytest.raises(KeyboardInterrupt):
            measure_server(url, PROMPTS, max_new_tokens=12, stop_ids=(), drafts=True, concurrency=2, progress=interrupt)
        assert len(stand_in.asked) == 1, "the others were not answered, and it ended all the same"
        assert stand_in.begun < 1 + len(PROMPTS)


def test_what_makes_figures_doubtful_is_noted() -> None:
    with serving(StandIn("sglang", made_up, drafts=True, metrics=False)) as url:
        figures = measured(url)
    assert (figures.acceptance, figures.engine) == (None, None)
    assert "--enable-metrics" in figures.notes[0]
    with serving(StandIn("vllm", made_up, drafts=True, others=3)) as url:
        assert "tokens more than were asked for here" in measured(url).notes[0]


def counted(rounds: int, drafted: int, accepted: int, positions: tuple[int, ...], *, tokens: int = 20, engine: str = "vllm") -> Counters:
    return Counters(engine, float(tokens), float(rounds), float(drafted), float(accepted), tuple(map(float, positions)))


BEFORE = counted(2, 6, 3, (2, 1, 0), tokens=5)


@pytest.mark.parametrize(
    ("after", "doubt"),
    [
        (counted(8, 24, 9, (6, 3, 0)), None),
        (counted(8, 24, 9, (6, 3)), None),
        (counted(8, 24, 9, (6, 3, 0, 0)), None),
        (counted(8, 24, 2, (6, 3, 0)), "went back during the measurement"),
        (counted(8, 24, 9, (1, 3, 0)), "went back during the measurement"),
        (counted(8, 24, 9, (6,)), "went back during the measurement"),
        (counted(8, 24, 9, (6, 3, 0), engine="sglang"), "went back during the measurement"),
        (counted(8, 24, 9, (6, 3, 0), tokens=12), "counted 7 of the 15 tokens that it answered, so acceptance is unknown: it was started anew"),
        (counted(8, 9, 9, (6, 3, 0)), "6 of 3 drafts accepted in 6 rounds"),
        (counted(8, 24, 9, (12, 3, 0)), "contradict each other"),
    ],
)
def test_counters_of_a_server_that_began_anew_or_contradicts_itself_are_no_figures(after: Counters, doubt: str | None) -> None:
    acceptance, doubts = acceptance_between(BEFORE, after, requests=3, tokens=15)
    if doubt is None:
        assert (acceptance is not None and acceptance.acceptance_length, doubts) == (2.0, [])
    else:
        assert (acceptance, len(doubts), doubt in doubts[0]) == (None, 1, True)


@pytest.mark.parametrize(("usage", "text"), [(None, "x"), (-1, "x"), (5, None)])
def test_an_answer_that_counts_nothing_or_says_nothing_is_refused(usage: int | None, text: str | None) -> None:
    answer = {"choices": [{"text": text}], "usage": {"completion_tokens": usage}}
    stand_in = StandIn("vllm", made_up, drafts=True)
    stand_in.complete = lambda body: answer  # type: ignore[method-assign]
    with serving(stand_in) as url, pytest.raises(EndpointError, match="/v1/completions: expected a completion with its usage"):
        measured(url)


def test_no_prompts_empty_answers_and_counters_that_are_no_numbers_are_errors_and_answers_beyond_the_limit_are_noted() -> None:
    answers = [Generation(**{**vars(made_up([], 1, False)), "tokens": (1,) * count, "accepted": (0,)}) for count in (0, 20)]
    with serving(StandIn("vllm", lambda *asked: answers[0] if not asked[2] else answers[1], drafts=True)) as url:
        with pytest.raises(EndpointError, match=f"{url}: answered none of {len(PROMPTS)} prompts"):
            measured(url)
        with pytest.raises(InputError, match="prompts = 0: there is none to send"):
            measure_server(url, [], max_new_tokens=1, stop_ids=(), drafts=True)
    with serving(StandIn("vllm", lambda *asked: answers[1], drafts=True)) as url:
        assert f"{len(PROMPTS)} answers are of more than 12 tokens" in measured(url).notes[0]
    for value in ("NaN", "abc", "-1", "+Inf"):
        with pytest.raises(EndpointError, match=re.escape(f"/metrics: vllm:generation_tokens_total = {value}, expected a count")):
            read_counters(f"foo bar\nvllm:generation_tokens_total{{}} {value}")


def test_counters_are_summed_over_engines_and_other_programs_have_none() -> None:
    text = "\n".join(
        f'vllm:{name}{{engine="{engine}"}} {engine + 1}e0'
        for name in ("generation_tokens_total", "spec_decode_num_drafts_total")
        for engine in (0, 1)
    )
    counters = read_counters(text)
    assert counters is not None
    assert (counters.tokens, counters.rounds, counters.accepted) == (3.0, 3.0, 0.0)
    assert read_counters("# HELP go_gc\ngo_gc_seconds_sum 1.5\n") is None


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny_run(tmp_path_factory.mktemp("server"))
    run_all(Plan(load_config(path)))
    return path


@pytest.mark.slow
def test_the_command_puts_the_servers_figures_beside_ours(run: Path) -> None:
    plan = Plan(load_config(run))
    target = TargetModel.from_pretrained(plan.info, dtype=torch.float32)
    drafter = load_checkpoint(drafter_folder(plan.folder("export")), dtype=torch.float32)
    ours = evaluation_of(plan.folder("evaluate"))
    with (
        serving(StandIn("vllm", decoding(target, drafter), drafts=True)) as one,
        serving(StandIn("vllm", decoding(target, None), drafts=False)) as other,
    ):
        done = CliRunner().invoke(app, ["evaluate", str(run), "--server", one, "--alone", other], env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    assert "100.0% of 3 prompts answered alike" in done.stdout
    length = f"{ours.trained.acceptance.pooled:.3f}"
    assert [line.split()[-2:] for line in done.stdout.splitlines() if "acceptance length" in line] == [[length, length]]
    assert (plan.run_folder / "evaluations" / "server.json").is_file()
    refused = CliRunner().invoke(app, ["evaluate", str(run), "--alone", "http://localhost:1"])
    assert (refused.exit_code, "Name that with --server" in refused.stderr) == (2, True)
