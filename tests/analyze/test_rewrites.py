"""Rewrites that the analyzer finds, applied: equal outputs, and the work falls by what was predicted."""

import pytest
import torch
from torch_geometric import nn as pyg
from torch_geometric.data import Data
from torch_geometric.utils import softmax

import stretto.analyze
from stretto import datasets
from stretto.analyze import Machine
from stretto.observe.models import as_data
from stretto.observe.workload import Workload

K, C = 24, 16


def graph() -> Data:
    data = as_data(datasets.load_graph("er:200:800"), width=K)
    data.y = data.y % 4
    return data


class Layer(pyg.MessagePassing):
    """A layer with `once` (per node) and `each` (per edge) for its learnable maps."""

    def __init__(self, hoisted: bool, aggr: str = "add") -> None:
        super().__init__(aggr=aggr)
        torch.manual_seed(0)
        self.hoisted = hoisted
        self.lin, self.left, self.right = (torch.nn.Linear(K, C) for _ in range(3))
        self.score = torch.nn.Parameter(torch.randn(C))

    def once(self, lin, x):
        return lin(x) if self.hoisted else x

    def each(self, lin, x):
        return x if self.hoisted else lin(x)


class Pool(Layer):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, h=self.once(self.lin, x))

    def message(self, h_j):
        return self.each(self.lin, h_j).relu()


class Gated(Layer):
    def forward(self, x, edge_index):
        ends = [self.once(lin, x) for lin in (self.lin, self.left, self.right)]
        return self.propagate(edge_index, v=ends[0], a=ends[1], b=ends[2])

    def message(self, v_j, a_i, b_j):
        return self.each(self.lin, v_j) * (self.each(self.left, a_i) + self.each(self.right, b_j)).sigmoid()


class Attend(Layer):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, h=self.once(self.lin, x))

    def message(self, h_j, index, size_i):
        h = self.each(self.lin, h_j)
        alpha = softmax((h * self.score).sum(-1), index, num_nodes=size_i)
        return h * alpha[:, None]


class EdgeLinear(Layer):
    """EdgeConv, choice 1: a linear map of the difference."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, h=self.once(self.lin, x))

    def message(self, h_i, h_j):
        return (h_j - h_i) if self.hoisted else (self.lin(h_j - h_i) - self.lin.bias)


CASES = {"pool": (Pool, "max"), "gated": (Gated, "add"), "attention": (Attend, "add"), "edge": (EdgeLinear, "max")}


def find(layer, rule, data):
    found = stretto.analyze(layer, data, machine=Machine(), mode="infer", procs=[1]).rewrites
    return [r for r in found if r.rule == rule]


@pytest.mark.parametrize("name", CASES)
def test_hoisting(name):
    kind, aggr = CASES[name]
    data = graph()
    edges, nodes = kind(False, aggr), kind(True, aggr)
    torch.testing.assert_close(edges(data.x, data.edge_index), nodes(data.x, data.edge_index), rtol=1e-4, atol=1e-5)
    (hoist,) = find(edges, "hoist", data)
    assert hoist.law == "(A X) W = A (X W)"  # as the planner has it
    assert find(nodes, "hoist", data) == []
    fewer = [float(Workload(layer, data, "infer").trace().flops) for layer in (edges, nodes)]
    assert fewer[0] - fewer[1] == pytest.approx(hoist.flops, rel=0.06)  # differences move from k to c values


def test_what_is_not_linear_is_not_hoisted():
    class Bent(Layer):
        def forward(self, x, edge_index):
            return self.propagate(edge_index, h=x)

        def message(self, h_i, h_j):
            return self.lin((h_i * h_j).relu())

    assert find(Bent(False), "hoist", graph()) == []


def with_values(width):
    data = graph()
    data.edge_attr, data.edge_type = torch.randn(data.num_edges, width), torch.arange(data.num_edges) % 3
    return data


NOT_HOISTED = {
    "values of edges": lambda: pyg.GATConv(K, C, edge_dim=4),
    "a weight for every edge": lambda: pyg.FastRGCNConv(K, C, 3),
    "a weight for every edge, attention": lambda: pyg.RGATConv(K, C, 3, edge_dim=4),
}


@pytest.mark.parametrize("name", NOT_HOISTED)
def test_what_is_not_of_nodes_is_not_hoisted(name):
    assert find(NOT_HOISTED[name](), "hoist", with_values(4)) == []


def test_columns_of_nodes_are_hoisted_and_those_of_edges_stay():
    """[x_i, x_j, e_ij] W: the first two thirds can be done per node."""
    data = with_values(K)
    (hoist,) = find(pyg.CGConv(K, K), "hoist", data)
    products = 2 * data.num_edges * (2 * 3 * K * K + K)  # a gate and a value, each with a bias
    assert hoist.flops == pytest.approx(products * (2 / 3) * (1 - data.num_nodes / data.num_edges))
    assert "67% of the columns" in hoist.sentence
    (cost,) = stretto.analyze(pyg.CGConv(K, K), data, machine=Machine(), mode="infer", procs=[1]).costs
    edges, nodes = 2 * (2 * K * K + K // 3), 2 * (4 * K * K + 2 * K // 3)  # of the products, biases with them
    assert cost.best_formula == f"{edges + 4 * K} m + {nodes + K} n"


class Before(torch.nn.Module):
    """GCNConv's own propagation of X, then W: for a layer that widens."""

    def __init__(self, conv):
        super().__init__()
        self.conv, self.hop = conv, pyg.SGConv(K, 1, K=1)

    def forward(self, x, edge_index):
        self.hop.lin = torch.nn.Identity()
        return self.hop(x, edge_index) @ self.conv.lin.weight.T + self.conv.bias


def test_a_layer_that_widens_aggregates_first():
    data, conv = graph(), pyg.GCNConv(K, 4 * K)
    first = Before(conv)
    torch.testing.assert_close(conv(data.x, data.edge_index), first(data.x, data.edge_index), rtol=1e-4, atol=1e-5)
    (order,) = find(conv, "order", data)
    assert order.sentence.startswith(f"aggregate first: rows of {K} instead of {4 * K}")
    fewer = [float(Workload(layer, data, "infer").trace().flops) for layer in (conv, first)]
    assert fewer[0] - fewer[1] == pytest.approx(order.flops)


def network(*sizes):
    return torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in sizes))


NO_ORDER = {
    "the first of two maps widens": lambda: pyg.GINConv(network((K, 4 * K), (4 * K, 4))),
    "something bent before the map": lambda: pyg.GINConv(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(K, 4))),
    "a map for every degree": lambda: pyg.MFConv(K, 4),
    "products of neighbours": lambda: pyg.SAGEConv(K, 4, aggr="mul"),
    "narrow already": lambda: pyg.GCNConv(K, 4),
}


@pytest.mark.parametrize("name", NO_ORDER)
def test_order_is_left_where_another_does_not_help_or_is_not_equal(name):
    assert find(NO_ORDER[name](), "order", graph()) == []


def test_the_mean_is_divided_at_the_width_of_the_product():
    data = graph()
    (order,) = find(pyg.SAGEConv(K, C, root_weight=False), "order", data)
    assert order.flops == pytest.approx((data.num_edges + data.num_nodes) * (K - C))


def test_keeping_a_x_saves_what_it_says():
    data = graph()
    plain, kept = (pyg.SGConv(K, C, K=3, cached=cached) for cached in (False, True))
    kept.load_state_dict(plain.state_dict())
    kept(data.x, data.edge_index)  # A X is made here
    torch.testing.assert_close(plain(data.x, data.edge_index), kept(data.x, data.edge_index))
    fewer = [float(Workload(layer, data, "infer").trace().flops) for layer in (plain, kept)]
    (cached,) = find(plain, "cache A X", data)
    assert cached.flops == pytest.approx(fewer[0] - fewer[1], rel=0.05)  # the normalisation goes with it
