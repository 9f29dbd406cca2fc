"""max and min as PyG's scatter has them: ties, isolated rows, NaN and infinity; and the mean that iSpLib got wrong."""

import pytest
import torch
from torch_geometric.utils import scatter

from stretto import Graph
from stretto.ops import segment_reduce, spmm
from stretto.ops.extremum import extremum
from tests.graphs import ZOO, random_edges

LOW = (torch.bfloat16, torch.float16)


def ours_and_pygs(edge_index, sizes, x, weight, reduce):
    """Results and gradients of spmm and of gather, multiply, scatter."""
    results = []
    for run in ("ours", "pyg"):
        a = x.clone().requires_grad_()
        w = None if weight is None else weight.clone().requires_grad_()
        if run == "ours":
            out = spmm(Graph.of(edge_index, sizes), a, w, reduce=reduce)
        else:
            messages = a[edge_index[0]]
            messages = messages if w is None else messages * w.view(-1, *[1] * (x.dim() - 1))
            out = scatter(messages, edge_index[1], 0, sizes[1], reduce)
        cotangent = torch.arange(1, out.numel() + 1, dtype=torch.float64).remainder(7).to(x.dtype).view(out.shape)
        wanted = [a] if w is None else [a, w]
        results.append([out.detach(), *torch.autograd.grad(out, wanted, cotangent)])
    return zip(*results, strict=True)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("name", ZOO)
def test_ties_share_the_gradient_as_in_pyg(name, reduce, weighted):
    """What ReLU leaves: many equal zeros, and small integers besides."""
    edge_index, sizes = ZOO[name]()
    x = torch.randint(-2, 3, (sizes[0], 6), dtype=torch.float64).relu()
    weight = torch.randint(0, 3, (edge_index.size(1),), dtype=torch.float64) if weighted else None
    for ours, pygs in ours_and_pygs(edge_index, sizes, x, weight, reduce):
        torch.testing.assert_close(ours, pygs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(6,), (2, 3)], ids=["rows", "heads"])
@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("name", ZOO)
def test_what_a_row_adds_is_part_of_the_message(name, reduce, shape):
    """x_j + own_i: ties, sums of exactly 0, and NaN on either side."""
    edge_index, sizes = ZOO[name]()
    source, target = edge_index
    x = torch.randint(-2, 3, (sizes[0], *shape), dtype=torch.float64)
    own = torch.randint(-1, 2, (sizes[1], *shape), dtype=torch.float64)
    if sizes[1] > 3:
        own[3] = torch.nan
    if sizes[0] > 4:
        x[4, 1] = torch.nan
    results = []
    for run in ("ours", "pyg"):
        a, b = x.clone().requires_grad_(), own.clone().requires_grad_()
        if run == "ours":
            out = extremum(Graph.of(edge_index, sizes), a, None, reduce, b)
        else:
            out = scatter(a[source] + b[target], target, 0, sizes[1], reduce)
        cotangent = torch.arange(1, out.numel() + 1, dtype=torch.float64).remainder(7).add(1).view(out.shape)
        results.append([out.detach(), *torch.autograd.grad(out, [a, b], cotangent)])
    for ours, pygs in zip(*results, strict=True):
        torch.testing.assert_close(ours, pygs, rtol=1e-12, atol=1e-12, equal_nan=True)
    plain = extremum(Graph.of(edge_index, sizes), x, None, reduce, own)
    torch.testing.assert_close(plain, results[0][0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", LOW, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("reduce", ["max", "min"])
def test_ties_made_by_rounding_share_the_gradient(reduce, dtype):
    """Products that differ in fp32 and are equal once stored: every one of them gets its share, none a double one."""
    edge_index, sizes = random_edges(40, 6, 300, 3), (40, 6)
    x, weight = (torch.randint(1, 9, (40, 5)) / 8).to(dtype), (1 + torch.randint(0, 64, (300,)) / 512).to(dtype)
    (out, their_out), (dx, their_dx), _ = ours_and_pygs(edge_index, sizes, x, weight, reduce)
    assert torch.equal(out, their_out)
    torch.testing.assert_close(dx, their_dx, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_rows_without_neighbours_give_zero_and_no_gradient(reduce):
    graph = Graph.of(torch.tensor([[0, 1], [2, 2]]), 5)
    x = torch.full((5, 3), -7.0 if reduce == "max" else 7.0, requires_grad=True)
    out = spmm(graph, x, reduce=reduce)
    assert out[[0, 1, 3, 4]].eq(0).all()
    assert out[2].eq(x[0]).all()
    out.sum().backward()
    assert x.grad[[2, 3, 4]].eq(0).all()
    assert segment_reduce(x.detach(), torch.tensor([1, 1, 1, 1, 1]), 3, reduce=reduce)[[0, 2]].eq(0).all()


SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan")])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *LOW])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_nan_and_infinity_go_where_torch_sends_them(reduce, dtype):
    generator = torch.Generator().manual_seed(1)
    x = SPECIAL[torch.randint(7, (20, 33), generator=generator)].to(dtype)
    edge_index = random_edges(20, 12, 60, 4)
    for weight in (None, SPECIAL[torch.randint(7, (60,), generator=generator)].to(dtype)):
        messages = x[edge_index[0]] if weight is None else x[edge_index[0]] * weight.unsqueeze(1)
        expected = scatter(messages, edge_index[1], 0, 12, reduce)
        out = spmm(Graph.of(edge_index, (20, 12)), x, weight, reduce=reduce)
        torch.testing.assert_close(out, expected, equal_nan=True)


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_nan_reaches_the_gradient_as_in_torch(reduce):
    x = torch.randn(20, 9)
    x[3], x[11, 4], x[12, 5] = float("nan"), float("inf"), float("-inf")
    edge_index = random_edges(20, 12, 60, 4)
    for weight in (None, torch.randn(60)):
        for ours, pygs in ours_and_pygs(edge_index, (20, 12), x, weight, reduce):
            assert torch.equal(ours.isnan(), pygs.isnan())
            torch.testing.assert_close(ours.nan_to_num(0, 0, 0), pygs.nan_to_num(0, 0, 0))


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min", "mul", "softmax", "var"])
def test_segment_reduce_passes_nan_and_infinity_on(reduce):
    generator = torch.Generator().manual_seed(2)
    src = SPECIAL[torch.randint(7, (40, 5), generator=generator)]
    index = random_edges(9, 9, 40, 5)[0]
    out = segment_reduce(src, index, 9, reduce=reduce)
    pieces = [src[index == s] for s in range(9)]
    if reduce == "softmax":
        expected = torch.empty_like(src)
        for s in range(9):
            expected[index == s] = pieces[s].softmax(0)
    elif reduce == "var":
        expected = torch.stack([p.var(0, correction=0) if len(p) else torch.zeros(5) for p in pieces])
    else:
        expected = scatter(src, index, 0, 9, reduce)
    torch.testing.assert_close(out, expected, equal_nan=True)


def test_mean_of_the_five_node_case():
    """0-1, 0-2, 0-3, 3-4 undirected, upstream gradient 1..5: [7, 1/3, 1/3, 16/3, 2]. iSpLib gives [3, 1, 1, 3, 4]."""
    pairs = torch.tensor([[0, 0, 0, 3], [1, 2, 3, 4]])
    edge_index = torch.cat([pairs, pairs.flip(0)], dim=1)
    x = torch.zeros(5, 1, dtype=torch.float64, requires_grad=True)
    spmm(Graph.of(edge_index, 5), x, reduce="mean").backward(torch.arange(1.0, 6.0, dtype=torch.float64).unsqueeze(1))
    expected = torch.tensor([7, 1 / 3, 1 / 3, 16 / 3, 2], dtype=torch.float64)
    torch.testing.assert_close(x.grad.squeeze(1), expected, rtol=1e-14, atol=0)


def test_all_reductions_mixed_on_one_graph():
    edge_index, sizes = ZOO["self_loops"]()
    graph = Graph.of(edge_index, sizes)
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    a = x.detach().clone().requires_grad_()
    for reduce in ("mean", "sum", "max", "mean", "min", "sum"):
        spmm(graph, x, reduce=reduce).square().sum().backward()
        scatter(a[edge_index[0]], edge_index[1], 0, 6, reduce).square().sum().backward()
    torch.testing.assert_close(x.grad, a.grad)


def test_mean_of_many_halves_does_not_overflow():
    """The sum of 30,000 tens is beyond fp16; their mean is not."""
    index = torch.zeros(30_000, dtype=torch.long)
    src = torch.full((30_000, 2), 10.0, dtype=torch.float16)
    assert segment_reduce(src, index, 1, reduce="mean").eq(10).all()
    graph = Graph.of(torch.stack([torch.arange(30_000), index]), (30_000, 1))
    assert spmm(graph, src, reduce="mean").eq(10).all()
