"""The reference of ``benchmarks.curve`` belongs to the rows and settings of today."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.curve import REFERENCE, STEPS, check_comparable, plan_for, rows_digest, tail_of, windows


@pytest.mark.slow
def test_the_reference_curve_was_trained_on_the_rows_and_settings_that_a_comparison_would_use_now(tmp_path: Path) -> None:
    reference = json.loads(REFERENCE.read_text())
    plan = plan_for(tmp_path, "cpu", "float32", reference["seed"])
    check_comparable(plan, rows_digest(plan), reference)
    with pytest.raises(ValueError, match="the rows have digest abc"):
        check_comparable(plan, "abc", reference)
    assert len(reference["losses"]) == STEPS
    assert tail_of(reference["losses"]) < 0.7 * windows(reference["losses"])[0]
