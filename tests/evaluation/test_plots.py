"""Pictures are drawn by any thread, from any run, and leave no global state behind."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dflash_core.decoding import Generation
from dflash_core.evaluation import EvaluationResult, PromptRecord, sets_table
from dflash_core.evaluation.panels import running_mean, series
from dflash_core.evaluation.plots import inline_charts, report_figure, write_picture
from dflash_core.evaluation.report import Report, write_report
from dflash_core.evaluation.result import Way, WayFigures, measured, prompt_figures
from dflash_core.training import read_metrics


def generation(accepted: list[int], block: int = 4) -> Generation:
    drafted = (block - 1,) * len(accepted)
    return Generation((5,) * 12, "length", tuple(accepted), drafted, 1 + len(accepted), len(accepted), 1.0, 0.1, 0.2, 0.6)


def result(*, untrained: bool, rounds: list[int], sets: tuple[str, ...] = ("heldout",)) -> EvaluationResult:
    """Three prompts of each set, all with the same rounds."""
    before = [0] * 11 if untrained else None
    return result_of([(name, f"p{n}", rounds, before) for name in sets for n in range(3)])


def result_of(prompts: list[tuple[str, str, list[int], list[int] | None]], *, lossless: bool = True) -> EvaluationResult:
    """An evaluation of prompts: set, id (whose part before '#' is the conversation), accepted drafts by round, and those before training.

    Not ``lossless``: the first prompt's answer is not the target's own.
    """
    records = [
        PromptRecord(
            key="k", set=name, id=id, conversation=id.partition("#")[0], prompt_tokens=4, baseline=generation([0] * 11, 1),
            trained=generation(rounds), untrained=None if before is None else generation(before), divergence=None,
            lossless=lossless or number > 0,
        )
        for number, (name, id, rounds, before) in enumerate(prompts)
    ]  # fmt: skip
    of_sets = {name: measured([record for record in records if record.set == name], 4) for name in dict.fromkeys(name for name, *_ in prompts)}
    return EvaluationResult(
        target="tiny", target_digest="t", drafter_digest="d", prompts_digest="p", dtype="float32", device="cpu", threads=1, block_size=4,
        max_new_tokens=12, temperature=0.0, **dict(measured(records, 4)), sets=of_sets,
        rows=tuple(prompt_figures(record, 4) for record in records),
    )  # fmt: skip


METRICS = [
    {"step": n, "loss": 5 / n, "accuracy_slot_1": n / 20, "tokens_per_second": 900.0 + n, "memory_rss": 2.0**30, "memory_peak_0": 2.0**31}
    for n in range(1, 10)
]


@pytest.mark.parametrize(("metrics", "untrained", "rounds"), [(METRICS, True, [3, 0, 1]), (METRICS[:1], False, [0]), ([], False, [])])
def test_every_run_gets_every_picture(metrics: list[dict[str, float]], untrained: bool, rounds: list[int], tmp_path: Path) -> None:
    evaluation = result(untrained=untrained, rounds=rounds)
    assert write_picture(tmp_path / "plots" / "report.png", metrics, evaluation).read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["report.png"], "no temporary file is left"
    assert len(inline_charts(metrics, evaluation)) == (8 if metrics else 3)
    during = [{"step": step, "eval/acceptance_length": length} for step, length in ((0.0, 1.0), (4.0, 1.567), (8.0, 1.4))]
    with_curve = inline_charts([*metrics, *during], evaluation)
    assert len(with_curve) == 9
    assert "1.57" in with_curve[1]


def test_threads_draw_the_same_picture_as_the_main_thread(tmp_path: Path) -> None:
    def picture(name: str) -> bytes:
        report_figure(METRICS, result(untrained=True, rounds=[3, 0])).savefig(tmp_path / name, format="png", dpi=40)
        return (tmp_path / name).read_bytes()

    alone = picture("alone")
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(picture, ["one", "other"])) == [alone, alone]


def test_the_report_states_the_headline_figures() -> None:
    evaluation = result(untrained=True, rounds=[3, 0, 1])
    figure = report_figure(METRICS, evaluation)
    texts = {text.get_text() for part in figure.subfigs for axes in part.axes for text in axes.texts} | {
        text.get_text() for text in figure.subfigs[0].texts
    }
    assert "DFlash drafter for tiny" in texts
    assert {"100 %", "2.33", f"{evaluation.trained.speedup:.2f}×"} <= texts
    assert any("1.00 before training" in text for text in texts)


def test_neither_pyplot_nor_its_state_is_touched_and_the_core_does_without_matplotlib() -> None:
    code = (
        "import sys, dflash_core.evaluation; assert 'matplotlib' not in sys.modules;"
        "import dflash_core.evaluation.plots; assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_metrics_are_read_without_damaged_lines_up_to_a_torn_last_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 2.0}\n5\n{"loss": 1}\n\xff\0\n{"step": 2}\n{"step": 3, "lo')
    assert read_metrics(path) == [{"step": 1, "loss": 2.0}, {"step": 2}]
    assert series(read_metrics(path), "loss") == ([1], [2.0])
    assert read_metrics(tmp_path / "not-here.jsonl") == []


def test_running_mean_keeps_constants_and_the_length() -> None:
    assert running_mean([]) == []
    assert running_mean([2.0] * 50) == [2.0] * 50
    smooth = running_mean([math.sin(n) for n in range(100)], share=0.2)
    assert len(smooth) == 100
    assert max(map(abs, smooth[10:90])) < 0.15


def page(tmp_path: Path, *, metrics: list[dict[str, float]], evaluation: EvaluationResult) -> str:
    facts = {"Target": {"name": "a <tiny> & odd target"}}
    report = Report("tiny-1", evaluation, metrics, facts, [("train", "2.0 s", "done")], {"training.epochs": 3}, {"run": "http://127.0.0.1/#/runs/1"})
    return write_report(tmp_path / "report.html", report).read_text(encoding="utf-8")


def test_the_page_of_a_run_needs_nothing_but_itself_and_is_well_formed(tmp_path: Path) -> None:
    text = page(tmp_path, metrics=METRICS, evaluation=result(untrained=True, rounds=[3, 0, 1]))
    assert not re.findall(r"<(?:script|link|img|iframe)\b|@import|url\((?!#)|(?:src|href)=\"(?!#|http://127\.0\.0\.1/)", text)
    references, names = set(re.findall(r'(?:url\(#|href="#)([\w-]+)', text)), set(re.findall(r'\bid="([\w-]+)"', text))
    assert references <= names
    assert text.count("<svg") == 8
    assert "a &lt;tiny&gt; &amp; odd target" in text
    assert not {"#111827", "#2563eb"} & set(re.findall(r"(?:fill|stroke): (#\w{6})", text)), "charts take their colours from the page"
    parser = HTMLParser()
    parser.feed(text)
    parser.close()


def test_the_page_says_what_matters_first_and_does_without_what_was_not_recorded(tmp_path: Path) -> None:
    evaluation = result(untrained=True, rounds=[3, 0, 1])
    text = page(tmp_path, metrics=[], evaluation=evaluation)
    assert text.count("<svg") == 3, "there was no training to draw"
    assert "All 3 answers are the target's own, token for token." in text
    assert "<b>2.33</b>" in text
    assert "1.00 before this training" in text
    wrong = evaluation.model_copy(update={"lossless": 1 / 3, "diverged": 2, "diverged_beyond_noise": 2, "untrained": None})
    text = page(tmp_path, metrics=[], evaluation=wrong)
    assert "2 of 3 answers are not the" in text
    assert "before this training" not in text


def test_several_sets_have_a_chart_and_a_table_and_one_has_no_row_over_all(tmp_path: Path) -> None:
    several = result(untrained=False, rounds=[3, 0, 1], sets=("heldout", "mtbench"))
    text = page(tmp_path, metrics=[], evaluation=several)
    assert text.count("<svg") == 4
    assert re.findall(r"<tr><td>(heldout|mtbench|overall)</td><td class=\"n\">(\d)", text) == [("heldout", "3"), ("mtbench", "3"), ("overall", "6")]
    assert "6 prompts of 2 sets" in " ".join(text.split())
    assert [row["set"] for row in sets_table(result(untrained=False, rounds=[1]))] == ["heldout"]


def test_other_ways_of_decoding_are_a_table_of_the_page_where_there_are_any(tmp_path: Path) -> None:
    evaluation = result(untrained=False, rounds=[3, 0, 1])
    way = WayFigures(way=Way(batch_size=32, temperature=0.7, block_size=4), diverged=None, figures=evaluation.trained)
    heading = "Other ways of decoding 3 prompts, in float32"
    assert heading not in page(tmp_path, metrics=[], evaluation=evaluation)
    text = page(tmp_path, metrics=[], evaluation=evaluation.model_copy(update={"ways": (way,)}))
    rows = text.partition(heading)[2].partition("</table>")[0]
    assert re.findall(r"<tr><td[^>]*>(\d+)</td><td[^>]*>([\d.]+)</td>", rows) == [("1", "0"), ("32", "0.7")]
