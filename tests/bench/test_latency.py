"""stretto bench latency: Python calls of a layer, counted; the counts are the house's promise, the times are not."""

import pytest

from benchmarks.suites import latency, results

# layer -> the most calls of Python functions, forward and backward
LIMITS = {"gcn": (40, 30), "sage": (45, 35), "gin": (45, 35), "gat": (45, 35)}


@pytest.mark.parametrize("name", LIMITS)
def test_a_layer_on_a_small_graph_makes_few_python_calls(name, needs_native):
    row = latency.run(name, 1, "")
    forward, backward = LIMITS[name]
    assert int(row["forward calls"]) <= forward
    assert int(row["backward calls"]) <= backward
    assert results.number(row, "ratio") > 0


def test_calls_are_counted():
    def inner():
        return 1

    assert latency.python_calls(lambda: inner() + inner()) == (2, 2)
