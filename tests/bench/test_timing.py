"""The timing helper that serves tuner and benchmarks."""

import itertools

import pytest

from stretto.errors import StrettoError
from stretto.machine import timing
from stretto.machine.timing import Timing, measure, ratio


class Clock:
    """A clock that only candidates advance, so that tests do not depend on the machine."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        self.log = []
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def candidate(self, name, *seconds):
        durations = itertools.chain(seconds, itertools.repeat(seconds[-1]))

        def call():
            self.log.append(name)
            self.now += next(durations)

        return call


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_interleaved_and_complete(clock):
    result = measure({"a": clock.candidate("a", 1.0), "b": clock.candidate("b", 2.0)}, repeats=5, warmup=2)
    assert len(result["a"].samples) == len(result["b"].samples) == 5
    assert result["a"].median == pytest.approx(1.0)
    assert result["b"].median == pytest.approx(2.0)
    rounds = [set(clock.log[i : i + 2]) for i in range(0, len(clock.log), 2)]
    assert rounds == [{"a", "b"}] * 7


def test_warmup_is_not_counted(clock):
    result = measure({"a": clock.candidate("a", 50.0, 1.0)}, repeats=3, warmup=1)
    assert result["a"].quantile(1.0) == pytest.approx(1.0)


def test_budget_stops_and_falls_back_to_the_warmup_call(clock):
    table = {name: clock.candidate(name, 1.0) for name in "abc"}
    assert list(measure(table, budget=0.0)) == []
    assert len(measure(table, budget=1.5)) == 2
    whole = measure(table, budget=5.5, repeats=9)
    assert sum(len(t.samples) for t in whole.values()) == 3  # three warm-up calls, then one sample of each


def test_short_calls_are_repeated_inside_a_sample(clock):
    result = measure({"a": clock.candidate("a", 0.001)}, repeats=2, sample_seconds=0.01)
    assert result["a"].median == pytest.approx(0.001)
    assert len(clock.log) == 1 + 2 * 10


def test_after_follows_every_call(clock):
    seen = []
    measure({"a": clock.candidate("a", 1.0), "b": clock.candidate("b", 1.0)}, repeats=2, after=seen.append)
    assert sorted(seen) == ["a"] * 3 + ["b"] * 3


def test_quantiles():
    t = Timing((4.0, 1.0, 3.0, 2.0, 5.0))
    assert [t.quantile(q) for q in (0.0, 0.25, 0.5, 1.0)] == [1.0, 2.0, 3.0, 5.0]
    assert t.best == 1.0
    assert t.to_dict()["median_ms"] == 3000.0
    assert t.to_dict()["repeats"] == 5
    assert Timing((7.0,)).quantile(0.8) == 7.0


def test_ratio_cancels_a_common_drift():
    drift = [1.0, 1.5, 1.1, 1.4, 1.2, 1.3, 1.0]
    point, low, high = ratio(Timing(tuple(2 * d for d in drift)), Timing(tuple(drift)))
    assert point == low == high == pytest.approx(2.0)
    point, low, high = ratio(Timing((2.0, 4.0, 3.0)), Timing((1.0, 1.0, 1.0)))
    assert low <= point <= high
    assert low < high


def test_wrong_arguments():
    with pytest.raises(StrettoError, match="'candidates' is empty"):
        measure({})
    with pytest.raises(StrettoError, match="repeats >= 1"):
        measure({"a": lambda: None}, repeats=0)
    with pytest.raises(StrettoError, match="needs warmup"):
        measure({"a": lambda: None}, warmup=0, sample_seconds=1.0)
