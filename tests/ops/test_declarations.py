"""What each op declares beside itself: samples, cost, and a reference that can be differentiated."""

import pytest
import torch

from stretto.ops import OPS
from tests.graphs import graph_of


@pytest.mark.parametrize("name", ["hub", "empty", "wide"])
@pytest.mark.parametrize("op", OPS)
def test_cost_is_counted(op, name):
    for sample in OPS[op].samples(graph_of(name), torch.float32):
        flops, moved = OPS[op].flops(*sample.args, **sample.kwargs), OPS[op].bytes(*sample.args, **sample.kwargs)
        assert isinstance(flops, int)
        assert isinstance(moved, int)
        assert flops >= 0
        assert moved >= (0 if name == "empty" else 1)
        assert str(sample)


@pytest.mark.parametrize("op", OPS)
def test_cost_grows_with_the_graph(op):
    def total(name):
        samples = list(OPS[op].samples(graph_of(name), torch.float32))
        return sum(OPS[op].bytes(*s.args, **s.kwargs) for s in samples)

    assert total("hub") > total("isolated")


@pytest.mark.parametrize(
    ("op", "reductions"),
    [
        ("spmm", {"sum", "mean", "max", "min"}),
        ("segment_reduce", {"sum", "mean", "max", "min", "mul", "std", "var", "softmax", "median"}),
    ],
)
def test_samples_reach_every_reduction(op, reductions):
    found = {s.kwargs.get("reduce", "sum") for s in OPS[op].samples(graph_of("wide"), torch.float32)}
    assert found == reductions
