"""Break-even density: the formula, the crossing, and that both products are equal where they are timed."""

import pytest

from stretto.analyze import Machine
from stretto.bench.breakeven import crossing, predicted, run


def test_the_formula_of_the_reference_page():
    cpu = Machine(spmm=[(256, 1e7, 20e9)], gemm=[(1e6, 64, 100e9), (1e9, 64, 100e9)])
    assert predicted(cpu) == pytest.approx(0.10)  # 20 GB/s and 100 GFLOP/s: about 10 %


def test_crossing():
    assert crossing({0.01: 0.1, 0.1: 1.0, 1.0: 10.0}) == pytest.approx(0.1)
    assert crossing({0.01: 0.1, 1.0: 10.0}) == pytest.approx(0.1)
    assert crossing({0.01: 2.0, 1.0: 3.0}) == 0.01
    assert crossing({0.01: 0.1, 1.0: 0.2}) is None


def test_run():
    found = run(Machine(), side=48, width=8, repeats=2)
    assert set(found.ratios) == {0.01, 0.03, 0.1, 0.3, 1.0}
    assert "density" in str(found)
