"""What a simulation came to, in words."""

from __future__ import annotations

from millrace_sim.compare import Comparison, Interval, verdict


class GivenComparison(Comparison):
    """Figures by hand."""

    def __init__(self, name: str, rate: float, half: float = 0.0, trainer: float = 0.95) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "results", ())
        found = {"trained_tokens_per_s": Interval(rate, half), "trainer_busy": Interval(trainer, 0)}
        found |= {"replica_busy": Interval(0.5, 0), "staleness_mean": Interval(1.5, 0)}
        object.__setattr__(self, "_found", found)

    __slots__ = ("_found",)

    def estimate(self, quantity: str) -> Interval:
        return self._found[quantity]


def test_one_schedule_is_told_with_its_slower_side() -> None:
    first, second = verdict([GivenComparison("areal", 1000)])
    assert first == "`areal` trains 1,000 tokens/s at a mean staleness of 1.50."
    assert second.startswith("The trainer is the slower side")


def test_the_fastest_is_named_with_its_lead_and_how_sure_that_is() -> None:
    sentences = list(verdict([GivenComparison("areal", 1000), GivenComparison("millrace", 1100)]))
    assert "`millrace` is the fastest" in sentences[0] and "10.0% more tokens/s than `areal`" in sentences[0]
    assert sentences[1].startswith("One seed each")
    sentences = list(verdict([GivenComparison("areal", 1000, 80), GivenComparison("millrace", 1100, 80)]))
    assert sentences[1].startswith("Their 95 % intervals overlap")
    assert len(list(verdict([GivenComparison("areal", 1000, 8), GivenComparison("millrace", 1100, 8)]))) == 2
