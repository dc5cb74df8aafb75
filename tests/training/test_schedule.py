from hypothesis import given
from hypothesis import strategies as st

from dflash_core.config import TrainingConfig
from dflash_core.training.schedule import learning_rate


def curve(steps: int, **settings: object) -> list[float]:
    training = TrainingConfig(learning_rate=1.0, **settings)
    return [learning_rate(training, step, steps) for step in range(steps)]


def test_cosine_rises_to_the_peak_then_falls_to_nearly_nothing() -> None:
    rates = curve(100, schedule="cosine", warmup_fraction=0.1)
    assert rates[:3] == [0.1, 0.2, 0.3]
    assert rates[9] == rates[10] == 1.0
    assert rates[55] == 0.5
    assert 0.0 < rates[-1] < 0.001


def test_wsd_stays_at_the_peak_and_falls_linearly_over_the_last_part() -> None:
    rates = curve(100, schedule="wsd", warmup_fraction=0.1, decay_fraction=0.2, min_lr_fraction=0.5)
    assert set(rates[9:81]) == {1.0}
    assert rates[90] == 0.75
    assert 0.5 < rates[-1] < 0.53


@given(
    steps=st.integers(1, 400), schedule=st.sampled_from(["cosine", "wsd"]), warmup=st.floats(0, 0.5), decay=st.floats(0, 0.5), floor=st.floats(0, 1)
)
def test_every_schedule_stays_between_zero_and_its_peak_and_falls_after_warm_up(
    steps: int, schedule: str, warmup: float, decay: float, floor: float
) -> None:
    rates = curve(steps, schedule=schedule, warmup_fraction=warmup, decay_fraction=decay, min_lr_fraction=floor)
    peak = round(warmup * steps)
    assert all(0.0 < rate <= 1.0 + 1e-9 for rate in rates) or floor == 0.0
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert all(rate >= floor - 1e-9 for rate in rates[peak:])
