"""What commands print: whole, wherever it goes."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from flows.show import print_rows, standard_output

ROWS = [
    {"set": "heldout", "place": "/a/folder/with/a/long/name/evaluation.json", "pooled": "1.63 (1.38–1.90)", "took": "1 min 14 s"},
    {"set": "[red]", "place": "", "pooled": "2.00", "took": ""},
]


@pytest.mark.parametrize("width", [20, 60, 80])
def test_no_cell_of_a_table_is_cut_on_a_terminal_however_narrow(width: int) -> None:
    file = io.StringIO()
    print_rows(Console(file=file, width=width, soft_wrap=True), ROWS, unbroken=("took",))
    text = file.getvalue()
    assert "…" not in text
    for row in ROWS:
        assert all(word in text for cell in (row["set"], row["place"], row["pooled"]) for word in cell.split())
        assert row["took"] in text


def test_tables_and_lines_have_no_width_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    print_rows(standard_output(), ROWS)
    standard_output().print("a " * 100 + "end")
    lines = capsys.readouterr().out.splitlines()
    assert any(all(cell in line for cell in ROWS[0].values()) for line in lines)
    assert lines[-1] == "a " * 100 + "end"
