"""How a training goes of late: loss and accuracy as means over the last steps, since those of a single step jump about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

RECENT_STEPS = 20
_MEANS = ("loss", "token_accuracy")


class RecentMetrics:
    """Takes the records of a training, or of its evaluations, as they come.

    recent = RecentMetrics()
    recent.add(step, metrics)
    recent.words()              # "loss 2.683, accuracy 52.1% (mean of 20 steps), 1,298 tokens/s"
    """

    def __init__(self) -> None:
        self._records: list[tuple[int, Mapping[str, float]]] = []
        self._last: dict[str, float] = {}

    @classmethod
    def of(cls, records: Iterable[Mapping[str, float]]) -> RecentMetrics:
        """From what ``read_metrics`` returns."""
        recent = cls()
        for record in records:
            recent.add(int(record["step"]), record)
        return recent

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take in a record: means over the steps since the record before it."""
        self._last |= metrics
        if any(name in metrics for name in _MEANS):
            self._records.append((step, metrics))
            while len(self._records) > 1 and self._records[1][0] <= step - RECENT_STEPS:
                self._records.pop(0)  # one of earlier steps stays: it says where the next one begins

    def means(self) -> dict[str, float]:
        """``loss`` and ``token_accuracy`` over ``steps``, of which a record counts for as many as it has."""
        parts = self._parts()
        found = {}
        for name in _MEANS:
            values = [(length, metrics[name]) for length, metrics in parts if name in metrics]
            if values:
                found[name] = sum(length * value for length, value in values) / sum(length for length, _ in values)
        return found

    @property
    def steps(self) -> int:
        """Over how many steps the means are; 0 while there is one record, of which nobody has said how many steps it has."""
        return sum(length for length, _ in self._parts()) if len(self._records) > 1 else 0

    def words(self) -> str:
        """The few metrics that say whether a training goes well; the speed is that of the last record. Empty where there is none."""
        means = self.means()
        named = [("loss", "loss {:.3f}"), ("token_accuracy", "accuracy {:.1%}")]
        words = ", ".join(text.format(means[name]) for name, text in named if name in means)
        parts = [f"{words} (mean of {self.steps} steps)" if self.steps > 1 else words] if words else []
        named = [("tokens_per_second", "{:,.0f} tokens/s"), ("eval/acceptance_length", "acceptance length {:.2f}")]
        return ", ".join([*parts, *(text.format(self._last[name]) for name, text in named if name in self._last)])

    def _parts(self) -> list[tuple[int, Mapping[str, float]]]:
        """The records of the last steps, each with how many steps it has among them."""
        records = tuple(self._records)  # another thread may add to them
        ends = [step for step, _ in records]
        if len(ends) < 2:
            return [(1, metrics) for _, metrics in records]
        first = 2 * ends[0] - ends[1]  # the first record is taken to be as long as the second
        begins = [max(begin, ends[-1] - RECENT_STEPS) for begin in (first, *ends)]
        return [(end - begin, metrics) for begin, (end, metrics) in zip(begins, records, strict=False) if end > begin]
