"""Break-even density: the formula, the crossing, and that both products are equal where they are timed."""

import pytest

from stretto.analyze import Machine
from stretto.bench import breakeven
from stretto.bench.breakeven import BreakEven, crossing, predicted, run
from stretto.tune.timing import Timing


def test_the_formula_of_the_reference_page():
    cpu = Machine(spmm=[(256, 1e7, 20e9)], gemm=[(1e6, 64, 100e9), (1e9, 64, 100e9)])
    assert predicted(cpu) == pytest.approx(0.10)  # 20 GB/s and 100 GFLOP/s: about 10 %


def test_crossing():
    assert crossing({0.01: 0.1, 0.1: 1.0, 1.0: 10.0}) == pytest.approx(0.1)
    assert crossing({0.01: 0.1, 1.0: 10.0}) == pytest.approx(0.1)
    assert crossing({0.01: 2.0, 1.0: 3.0}) == 0.01
    assert crossing({0.01: 0.1, 1.0: 0.2}) is None


def test_within_twice():
    for measured, holds in ((0.1, True), (0.19, True), (0.21, False), (0.051, True), (0.049, False), (None, False)):
        assert BreakEven(0.1, measured, {}).holds is holds


def test_ratios_are_of_sparse_over_dense(monkeypatch):
    taken = {"sparse": Timing((3.0,) * 3), "dense": Timing((2.0,) * 3)}
    monkeypatch.setattr(breakeven, "measure", lambda calls, **_: {name: taken[name] for name in calls})
    found = run(Machine(), side=48, width=8)
    assert set(found.ratios.values()) == {1.5}
    assert found.measured == 0.01


def test_run():
    found = run(Machine(), side=48, width=8, repeats=2)
    assert set(found.ratios) == {0.01, 0.03, 0.1, 0.3, 1.0}
    assert "density" in str(found)
