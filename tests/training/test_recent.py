"""How a training goes of late, and how long it will take."""

from __future__ import annotations

from dflash_core.pace import Pace
from dflash_core.training import RecentMetrics


def test_the_loss_that_is_shown_is_the_mean_of_the_last_steps_and_says_of_how_many() -> None:
    recent = RecentMetrics.of([{"step": step, "loss": float(step), "tokens_per_second": 1000.0 + step} for step in range(101, 141)])
    assert recent.means() == {"loss": sum(range(121, 141)) / 20}
    assert recent.words() == "loss 130.500 (mean of 20 steps), 1,140 tokens/s"


def test_a_record_of_many_steps_counts_for_as_many() -> None:
    recent = RecentMetrics.of([{"step": step, "loss": loss} for step, loss in ((15, 9.0), (30, 3.0), (35, 1.0))])  # 30 was a checkpoint
    assert recent.means()["loss"] == (15 * 3.0 + 5 * 1.0) / 20
    assert recent.steps == 20


def test_the_only_record_there_is_stands_for_itself() -> None:
    assert RecentMetrics.of([{"step": 500, "loss": 2.5, "token_accuracy": 0.25}]).words() == "loss 2.500, accuracy 25.0%"
    assert RecentMetrics().words() == ""


def test_the_time_left_follows_the_pace_of_the_last_minute_whatever_was_before() -> None:
    pace = Pace()
    assert pace.remaining(500, 1000, 0.0) is None, "what was found done took no time"
    assert pace.remaining(510, 1000, 10.0) == 490.0
    assert pace.remaining(510, 1000, 1000.0) is None, "nothing went on for longer than that"
    for second in range(1001, 1100):
        left = pace.remaining(510 + second - 1000, 1000, float(second))
    assert left == 1000 - (510 + 99), "an evaluation that paused it is forgotten a minute later"


def test_however_often_it_is_asked_the_pace_is_that_of_a_minute() -> None:
    pace = Pace()
    for tick in range(10_000):
        left = pace.remaining(tick, 20_000, tick / 100)
    assert left is not None
    assert abs(left - 100.01) < 1e-6
    assert len(pace._readings) < 100
