"""What a run says of itself where something usual is missing."""

from __future__ import annotations

import getpass
import os

import pytest

from tasks.origin import process_tags
from tasks.summary import in_markdown
from tests.evaluation.test_plots import result

SUMMARY = {
    "run": "tiny-1", "lossless": 1.0, "acceptance_length": {"mean_of_requests": 1.5, "pooled": 1.4}, "acceptance_length_untrained": None,
    "speedup": 0.9, "tokens_per_second": {"training": 100.0, "decoding": 9.0, "decoding_without_drafter": 10.0}, "export_path": "/drafter",
    "stages": {"train": {"seconds": 75.0, "cached": False}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("run_id", "links", "words"),
    [
        (None, {}, "| MLflow | not recorded |"),
        ("abc", {}, "| MLflow | run `abc` |"),
        ("abc", {"run": "http://m/#/abc", "report": "http://m/r"}, "| MLflow | [abc](http://m/#/abc), [report](http://m/r) |"),
    ],
)
def test_the_summary_says_where_the_run_is_recorded(run_id: str | None, links: dict[str, str], words: str) -> None:
    lines = in_markdown({**SUMMARY, "mlflow_run_id": run_id}, result(untrained=False, rounds=[1]), links, None).splitlines()
    assert words in lines
    assert "| registered as | not registered |" in lines
    assert "| untrained | not measured |" in lines
    assert "| heldout | 3 | 100.0 % | 2.00 (2.00–2.00) | 2.00 (2.00–2.00) |  | 1.00× (1.00–1.00) |" in lines
    assert "| train | 1 min 15 s |  |" in lines


def test_a_user_without_a_name_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(getpass, "getuser", nobody)
    assert process_tags()["mlflow.user"] == str(os.getuid())
