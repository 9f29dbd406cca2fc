"""Bad input is told before any kernel runs: the message names the argument, what was wanted and what came."""

import pytest
import torch
import torch_geometric.nn as pyg

import stretto
from stretto import Graph, StrettoError
from stretto.ops import edge_softmax, gather_rows, scatter_rows, sddmm, segment_matmul, segment_reduce, spmm
from tests.graphs import random_edges

GRAPH = Graph.of(random_edges(7, 9, 20, 1), (7, 9))
X = torch.randn(7, 4)

BAD = {
    "too few rows": (lambda: spmm(GRAPH, torch.randn(5, 4)), ["'x' has 5 rows", "7 columns", "graph 9x7, x 5x4"]),
    "no dimensions": (lambda: spmm(GRAPH, torch.tensor(1.0)), ["'x'", "7 columns"]),
    "four dimensions": (lambda: spmm(GRAPH, torch.randn(7, 2, 2, 2)), ["'x'", "7x2x2x2"]),
    "integers": (lambda: spmm(GRAPH, torch.ones(7, 4, dtype=torch.long)), ["'x' is torch.int64", "float32"]),
    "weight too short": (lambda: spmm(GRAPH, X, torch.rand(3)), ["'weight' has shape [3]", "[20]"]),
    "weight of other heads": (
        lambda: spmm(GRAPH, torch.randn(7, 2, 3), torch.rand(20, 5)),
        ["'weight' has shape [20, 5]", "[20, 2]"],
    ),
    "integer weight": (lambda: spmm(GRAPH, X, torch.ones(20, dtype=torch.long)), ["'weight' is torch.int64"]),
    "row_scale": (lambda: spmm(GRAPH, X, row_scale=torch.rand(7)), ["'row_scale' has shape [7]", "[9]"]),
    "col_scale": (lambda: spmm(GRAPH, X, col_scale=torch.rand(9)), ["'col_scale' has shape [9]", "[7]"]),
    "y": (lambda: spmm(GRAPH, X, y=torch.rand(9, 5)), ["'y' has shape [9, 5]", "[9, 4]"]),
    "reduce": (lambda: spmm(GRAPH, X, reduce="average"), ["'reduce' is 'average'", "sum, mean, max, min"]),
    "reduce of segments only": (lambda: spmm(GRAPH, X, reduce="median"), ["'reduce' is 'median'"]),
    "sddmm rows": (lambda: sddmm(GRAPH, X, X), ["'a' has shape [7, 4]", "9 rows"]),
    "sddmm widths": (lambda: sddmm(GRAPH, torch.randn(9, 3), X), ["[3]", "[4]", "the same"]),
    "sddmm op": (lambda: sddmm(GRAPH, torch.randn(9, 4), X, op="sub"), ["'op' is 'sub'", "'dot' or 'add'"]),
    "sddmm type": (lambda: sddmm(GRAPH, torch.ones(9, 4, dtype=torch.int), X), ["'a' is torch.int32"]),
    "softmax rows": (lambda: edge_softmax(GRAPH, torch.randn(19, 2)), ["'score' has shape [19, 2]", "20 rows"]),
    "softmax type": (lambda: edge_softmax(GRAPH, torch.ones(20, dtype=torch.int)), ["'score' is torch.int32"]),
    "segment rows": (lambda: segment_reduce(X, torch.zeros(6, dtype=torch.long), 2), ["'src' has shape [7, 4]", "6"]),
    "segment type": (
        lambda: segment_reduce(X.long(), torch.zeros(7, dtype=torch.long), 2),
        ["'src' is torch.int64", "float32"],
    ),
    "segment index type": (lambda: segment_reduce(X, torch.zeros(7), 2), ["'index' is torch.float32", "int64"]),
    "segment index range": (
        lambda: segment_reduce(X, torch.tensor([0, 1, 2, 3, 4, 5, 9]), 4),
        ["segment index 9", "0 <= index < 4"],
    ),
    "negative segment": (lambda: segment_reduce(X, torch.tensor([0, 1, 2, 3, -1, 0, 0]), 4), ["segment index -1"]),
    "segment reduce": (lambda: segment_reduce(X, torch.zeros(7).long(), 1, reduce="any"), ["'reduce' is 'any'"]),
    "gather range": (lambda: gather_rows(X, torch.tensor([0, 7])), ["index 7", "0 <= index < 7"]),
    "gather from a number": (lambda: gather_rows(X[0, 0], torch.tensor([0])), ["index 0", "0 <= index < 0"]),
    "gather negative": (lambda: gather_rows(X, torch.tensor([0, -1])), ["index -1"]),
    "gather index type": (lambda: gather_rows(X, torch.tensor([0.0])), ["'index' is torch.float32"]),
    "gather index shape": (lambda: gather_rows(X, torch.zeros(2, 2).long()), ["shape [2, 2]", "[E]"]),
    "scatter length": (lambda: scatter_rows(X, torch.zeros(3).long(), 2), ["'index' has shape [3]", "[7]"]),
    "scatter type": (lambda: scatter_rows(X.long(), torch.zeros(7).long(), 2), ["'src' is torch.int64"]),
    "scatter range": (lambda: scatter_rows(X, torch.full((7,), 2), 2), ["index 2", "< 2"]),
    "matmul shapes": (lambda: segment_matmul(X, [0, 7], torch.randn(1, 3, 2)), ["[7, 4]", "[1, 3, 2]"]),
    "matmul bounds": (lambda: segment_matmul(X, [0, 5, 3, 7], torch.randn(3, 4, 2)), ["'ptr' is [0, 5, 3, 7]"]),
    "matmul end": (lambda: segment_matmul(X, [0, 6], torch.randn(1, 4, 2)), ["'ptr'", "from 0 to 7"]),
}


@pytest.mark.parametrize("name", BAD)
def test_message(name):
    call, words = BAD[name]
    with pytest.raises(StrettoError) as caught:
        call()
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_a_graph_elsewhere():
    with pytest.raises(StrettoError, match="'x' is on meta, but the graph is on cpu"):
        spmm(GRAPH, torch.empty(7, 4, device="meta"))


@pytest.mark.parametrize("wrong", [-1, 7])
def test_an_index_out_of_range_is_an_index_error_too(wrong):
    edge_index = torch.tensor([[0, wrong], [1, 2]])
    calls = [
        lambda: Graph.of(edge_index, 7),
        lambda: stretto.accelerate(pyg.GCNConv(4, 2))(torch.randn(7, 4), edge_index),
        lambda: gather_rows(torch.randn(7, 4), torch.tensor([0, wrong])),
        lambda: segment_reduce(torch.randn(2, 4), torch.tensor([0, wrong]), 7),
    ]
    for call in calls:
        with pytest.raises(IndexError, match="out of range") as told:
            call()
        assert isinstance(told.value, StrettoError)


def test_an_aggregation_names_the_size_it_was_given_as_stock_does():
    x, index = torch.randn(600, 4), torch.arange(600) % 9
    for aggregation in (pyg.SumAggregation(), stretto.accelerate(pyg.SumAggregation())):
        with pytest.raises(ValueError, match="Encountered invalid 'dim_size'"):
            aggregation(x, index, dim_size=5)
