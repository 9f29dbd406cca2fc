"""edge_mlp in pieces: rows longer than a block, every reduction of them, several terms, 16 bits, random numbers."""

from __future__ import annotations

import pytest
import torch
from torch_geometric.nn.resolver import aggregation_resolver

from stretto import StrettoError
from stretto.graph import Graph
from stretto.observe.peak_memory import peak_bytes
from stretto.ops import attention, edge_mlp
from stretto.ops.edge_blocks import _bounds

NODES, EDGES = 12, 260


def hub(num_edges=EDGES, num_nodes=NODES):
    """Three quarters of the edges go to node 5, the last node gets none."""
    generator = torch.Generator().manual_seed(0)
    source, target = torch.randint(num_nodes - 1, (2, num_edges), generator=generator)
    target = torch.where(torch.rand(num_edges, generator=generator) < 0.75, 5, target)
    return Graph.of(torch.stack([source, target]), num_nodes)


def values(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()


def same_gradients(ours, theirs, leaves):
    weight = torch.randn_like(theirs)
    torch.testing.assert_close(ours, theirs)
    got, wanted = (torch.autograd.grad((o * weight).sum(), leaves, retain_graph=True) for o in (ours, theirs))
    for mine, stock in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, stock)


@pytest.mark.parametrize("block", [1, 3, 64, 1000])
def test_no_block_is_longer_than_asked(block):
    graph = hub()
    bounds = _bounds(graph.csr.rowptr, block)
    assert max(end - begin for _, _, begin, end, _, _ in bounds) <= block
    assert [b[2] for b in bounds[1:]] == [b[3] for b in bounds[:-1]]
    assert (bounds[0][2], bounds[-1][3], bounds[-1][1]) == (0, EDGES, NODES)
    pointers = graph.csr.rowptr.tolist()
    for first, last, begin, end, opens, closes in bounds:
        assert (begin == pointers[first], end == pointers[last]) == (opens, closes)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min", "square"])
@pytest.mark.parametrize("block", [1, 16, 1000])
def test_every_reduction_of_a_cut_row(reduce, block):
    graph = hub()
    source, target = graph.edge_index
    row, col, weight = values(NODES, 3), values(NODES, 3), values(3, 4)
    first, second = values(EDGES, 3), values(EDGES)

    def message(own, other, edge, scale):
        made = ((own + other) * edge * scale.unsqueeze(1)) @ weight
        return (4 * made).detach().round() / 4 + (made - made.detach())  # many ties

    ours = edge_mlp(graph, message, row, col, (first, second), parameters=[weight], reduce=reduce, block=block)
    made = message(row[target], col[source], first, second)
    stock = aggregation_resolver("mean" if reduce == "square" else reduce)
    theirs = stock(made * made if reduce == "square" else made, target, dim_size=NODES)
    same_gradients(ours, theirs, [row, col, first, second, weight])


@pytest.mark.parametrize("block", [7, 1000])
def test_messages_themselves(block):
    graph = hub()
    source, target = graph.edge_index
    row, col, edge, weight = values(NODES, 2, 3), values(NODES, 2, 3), values(EDGES, 2), values(2, 3)

    def score(own, other, value):
        return ((own + other).tanh() * weight).sum(-1) * value

    ours = edge_mlp(graph, score, row, col, edge, parameters=[weight], reduce="each", block=block)
    same_gradients(ours, score(row[target], col[source], edge), [row, col, edge, weight])


@pytest.mark.parametrize("block", [7, 1000])
def test_functions_that_sum_by_themselves(block):
    graph = hub()
    source, target = graph.edge_index
    x, edge, weight = values(NODES, 3), values(EDGES, 2), values(2, 4)

    def outer(part, other, value):
        return attention(part, other.unsqueeze(1), edge=(value @ weight).tanh(), form="weight")

    ours = edge_mlp(graph, outer, None, x, edge, parameters=[weight], reduce="function", block=block)
    made = torch.einsum("ek,ei->eki", (edge @ weight).tanh(), x[source])
    theirs = torch.zeros(NODES, 4, 3, dtype=torch.float64).index_add(0, target, made)
    same_gradients(ours, theirs, [x, edge, weight])
    (slope,) = torch.autograd.grad(ours.pow(2).sum(), x, create_graph=True)
    (stock,) = torch.autograd.grad(theirs.pow(2).sum(), x, create_graph=True)
    same_gradients(slope, stock, [x, edge, weight])


def test_what_all_edges_share_may_depend_on_the_rest():
    """On the terms and on a parameter, of which it is a function; twice differentiable."""
    graph = hub(40)
    row, col, weight = values(NODES, 3), values(NODES, 3), values(3)
    source, target = graph.edge_index

    def message(a, b, scale):
        return (a * b + weight).tanh() * scale

    def ours(row, col, weight):
        scale = (row.mean(0) * weight).exp()
        return edge_mlp(graph, message, row, col, shared=[scale], parameters=[weight], block=7)

    def theirs(row, col, weight):
        each = message(row[target], col[source], (row.mean(0) * weight).exp())
        return torch.zeros(NODES, 3, dtype=torch.float64).index_add(0, target, each)

    leaves = (row, col, weight)
    same_gradients(ours(*leaves), theirs(*leaves), leaves)
    second = []
    for function in (ours, theirs):
        first = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
        second.append(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))
    for mine, stock in zip(*second, strict=True):
        torch.testing.assert_close(mine, stock)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_summed_wide(dtype, reduce):
    """Pieces and blocks add up in fp32 and are rounded once; more ties than fp16 can count."""
    num_edges = 70000
    graph = Graph.of(torch.stack([torch.zeros(num_edges).long(), torch.ones(num_edges).long()]), 2)
    x = torch.full((2, 1), 0.25, dtype=dtype, requires_grad=True)
    out = edge_mlp(graph, lambda other: other * 0.5, None, x, reduce=reduce, block=500)
    assert float(out[1].detach()) == float(torch.tensor(num_edges / 8 if reduce == "sum" else 0.125, dtype=dtype))
    (grad,) = torch.autograd.grad(out[1, 0] * (1 / 16 if reduce == "sum" else 1), x)
    exact = num_edges / 32 if reduce == "sum" else 0.5
    assert abs(float(grad[0]) - exact) <= 0.01 * exact  # an edge's own part, 1 / 70000, has few digits in fp16


def test_memory_of_a_hub_is_that_of_a_block():
    num_edges, width, block = 40000, 32, 500
    x = torch.randn(50, width, requires_grad=True)
    weight = torch.randn(width, width, requires_grad=True)
    graph = hub(num_edges, 50)

    def step():
        options = {"parameters": [weight], "reduce": ("sum", "mean", "max", "min", "square"), "block": block}
        outs = edge_mlp(graph, lambda own, other: ((own + other) @ weight).relu(), x, x, **options)
        sum(out.sum() for out in outs).backward()
        x.grad = weight.grad = None

    assert peak_bytes(step) < num_edges * width * 4 / 4


def test_random_numbers_are_the_same_in_second_derivatives():
    graph, x = hub(), values(NODES, 4)
    drop = torch.nn.Dropout(0.5)

    def slope():
        torch.manual_seed(3)
        out = edge_mlp(graph, lambda own, other: drop(own * other), x, x, block=16)
        torch.manual_seed(17)
        return out, torch.autograd.grad(out.sum(), x, create_graph=True)[0]

    out, found = slope()
    torch.testing.assert_close((found * x).sum(), 2 * out.sum())  # of degree two in x, for these very masks
    (plain,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(found, plain)


def test_own_stands_alone():
    with pytest.raises(StrettoError, match="wanted 'function' by itself"):
        edge_mlp(hub(), torch.add, values(NODES, 2), values(NODES, 2), reduce=("function", "sum"))
