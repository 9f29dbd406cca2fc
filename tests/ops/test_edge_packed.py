"""Edge messages with terms side by side, with the node itself, and with features shared by both directions."""

import pytest
import torch

from stretto import Graph
from stretto.kernels import native, pairs
from stretto.layers.edges import pairs as edge_pairs
from stretto.layers.edges.pairs import _in_place, _pairs, _pairs_in_place, features_of
from stretto.ops.edge_packed import (
    gated_messages,
    linear_of_data,
    product_messages,
    rooted_messages,
    shifted_softplus,
)
from tests.graphs import graph_of, symmetric_edges

WIDTHS = (3, 16, 70)  # below a vector, whole vectors, tiles and a rest


def values(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()


def same(ours, theirs, leaves, dtype=torch.float64):
    limits = {"rtol": 1e-9, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 2e-4, "atol": 2e-4}
    cotangent = torch.randn_like(theirs)
    torch.testing.assert_close(ours, theirs, **limits)
    found = torch.autograd.grad(ours, leaves, cotangent)
    for a, b in zip(found, torch.autograd.grad(theirs, leaves, cotangent), strict=True):
        torch.testing.assert_close(a, b, **limits)


def summed(graph, message):
    return torch.zeros(graph.num_rows, message.size(1), dtype=message.dtype).index_add(0, graph.edge_index[1], message)


def both_ways(loops=True):
    """A graph with every edge in both directions, some self-loops among them."""
    pairs = torch.combinations(torch.arange(23))[::5]
    ends = [pairs, pairs.flip(1), *([torch.tensor([[4, 4], [9, 9]])] if loops else [])]
    edges = torch.cat(ends)
    order = torch.randperm(len(edges), generator=torch.Generator().manual_seed(0))
    return Graph.of(edges[order].t().contiguous(), 23)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["unsorted", "isolated", "hub", "empty", "one_node"])
@pytest.mark.parametrize("edges", [True, False])
def test_gated(name, width, dtype, edges):
    graph = graph_of(name)
    nodes = values(graph.num_rows, 4 * width, dtype=dtype)
    edge = values(graph.num_edges, 2 * width, dtype=dtype) if edges else None
    source, target = graph.edge_index
    row, row2, col, col2 = nodes.chunk(4, dim=1)
    gate, core = row[target] + col[source], row2[target] + col2[source]
    if edge is not None:
        first, second = edge.chunk(2, dim=1)
        gate, core = gate + first, core + second
    theirs = summed(graph, gate.sigmoid() * torch.nn.functional.softplus(core))
    ours = gated_messages(graph, nodes, edge, act="sigmoid", act2="softplus")
    if name == "hub" and dtype == torch.float32:
        return torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-1)  # a sum of 10,000 terms either way
    return same(ours, theirs, [nodes] if edge is None else [nodes, edge], dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("paired", [True, False])
def test_rooted_and_product(width, dtype, paired):
    graph = both_ways()
    found = _pairs(graph)
    assert found is not None
    first, second, ways = found
    pairs = ways if paired else None
    source, target = graph.edge_index
    assert torch.equal(source[first], target[second])
    x = values(23, width, dtype=dtype)
    features = values(len(first) if paired else graph.num_edges, width, dtype=dtype)

    def each():
        return features[ways.number] if paired else features

    theirs = summed(graph, (x[source] + each()).relu()) + 1.25 * x
    same(rooted_messages(graph, x, features, 1.25, pairs, act="relu"), theirs, [x, features], dtype)
    theirs = summed(graph, x[source] * each())
    same(product_messages(graph, x, features, pairs), theirs, [x, features], dtype)


@pytest.mark.parametrize("isa", native.isas() or ["none"])
def test_every_instruction_set(isa, needs_native):
    native.set_isa(isa)
    for width in WIDTHS:
        test_rooted_and_product(width, torch.float32, True)
        test_gated("unsorted", width, torch.float32, True)


def test_pairs_are_refused_where_an_edge_has_no_reverse_or_two():
    assert _pairs(Graph.of(torch.tensor([[0, 1, 1], [1, 0, 2]]), 3)) is None
    assert _pairs(Graph.of(torch.tensor([[0, 1, 0], [1, 0, 1]]), 2)) is None
    assert _pairs(both_ways(loops=False)) is not None


def test_gradients_of_gradients():
    graph = both_ways()
    *_, ways = _pairs(graph)
    x, pair, nodes, edge = (values(n, 2) for n in (23, ways.ends.size(1), 23, graph.num_edges))
    nodes, edge = values(23, 4), values(graph.num_edges, 2)
    smooth = torch.autograd.gradgradcheck
    assert smooth(lambda a, b: product_messages(graph, a, b, ways), (x, pair))
    assert smooth(lambda a, b: gated_messages(graph, a, b, act="sigmoid", act2="softplus"), (nodes, edge))
    assert torch.autograd.gradcheck(lambda a, b: product_messages(graph, a, b, ways), (x, pair))
    assert smooth(lambda a: shifted_softplus(a, 0.5), (x,))


def test_bits_do_not_depend_on_threads():
    graph = both_ways()
    *_, ways = _pairs(graph)
    x, pair = values(23, 40, dtype=torch.float32), values(ways.ends.size(1), 40, dtype=torch.float32)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        out = product_messages(graph, x, pair, ways)
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, pair])])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_shifted_softplus(dtype):
    x = torch.cat([torch.linspace(-200, 200, 4999), torch.tensor([torch.nan, torch.inf, -torch.inf])]).to(dtype)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    made, wanted = shifted_softplus(ours, 0.6931), torch.nn.functional.softplus(theirs) - 0.6931
    limits = {"rtol": 1e-6, "atol": 1e-6} if dtype != torch.bfloat16 else {}
    torch.testing.assert_close(made, wanted, equal_nan=True, **limits)
    made.backward(torch.ones_like(x))
    wanted.backward(torch.ones_like(x))
    torch.testing.assert_close(ours.grad[:-3], theirs.grad[:-3], **limits)


def test_linear_of_data():
    attr, weight, bias = torch.randn(11, 5, dtype=torch.float64), values(4, 5), values(4)
    data = torch.cat([attr, torch.ones(11, 1, dtype=torch.float64)], dim=1)
    same(linear_of_data(data, weight, bias), torch.nn.functional.linear(attr, weight, bias), [weight, bias])
    same(linear_of_data(data, weight, None), torch.nn.functional.linear(attr, weight), [weight])


@pytest.mark.parametrize("many", [1, 1 << 16])
def test_pairs_in_place_are_the_same_pairs(many, needs_native, monkeypatch):
    monkeypatch.setattr(pairs, "MANY", many)
    Graph.cache_clear()
    index = symmetric_edges(30, 80)
    loops = torch.tensor([[3, 8], [3, 8]])
    both = torch.cat([index, loops], dim=1)
    both = both[:, (both[0] * 30 + both[1]).unique(return_inverse=True)[1].argsort()]  # by source: unsorted by target
    for edges in (index, both[:, (both[0] * 30 + both[1]).argsort()]):
        graph = Graph.of(edges.contiguous(), 30)
        assert _in_place(graph)
        first, second, ways = _pairs_in_place(graph)
        source, target = graph.edge_index
        assert torch.equal(source[first], target[second])
        assert torch.equal(target[first], source[second])
        assert torch.equal(ways.ends, torch.stack([source[first], target[first]]))
        number = torch.arange(len(first))
        assert torch.equal(ways.number[first].long(), number)
        assert torch.equal(ways.number[second].long(), number)
        assert torch.equal(torch.cat([first, second]).unique(), torch.arange(graph.num_edges))
        x, pair = values(30, 9), values(len(first), 9)
        theirs = summed(graph, x[source] * pair[ways.number.long()])
        same(product_messages(graph, x, pair, ways), theirs, [x, pair])
    assert not _in_place(Graph.of(torch.tensor([[0, 1], [1, 2]]), 3))


def test_rows_are_alike_bit_by_bit(needs_native):
    rows = torch.randn(6, 5)
    first, second = torch.tensor([0, 2]), torch.tensor([1, 5])
    rows[1], rows[5] = rows[0], rows[2]
    assert torch.equal(pairs.alike(rows, first, second), rows[first])
    rows[5, 4] += 1e-6
    assert pairs.alike(rows, first, second) is None


def test_pairs_of_unsorted_edges_are_looked_for_the_second_time(monkeypatch):
    monkeypatch.setattr(edge_pairs, "MANY", 1)
    graph = both_ways()
    attr = torch.ones(graph.num_edges, 2)
    assert not edge_pairs._in_place(graph)
    assert features_of(graph, attr).pairs is None
    found = features_of(graph, attr)
    assert found.pairs is not None
    assert found.attr.size(0) == found.data.size(0) < graph.num_edges
    assert features_of(graph, attr.clone()).pairs is None
