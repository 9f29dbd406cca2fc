"""Laws that hold for every graph: adjoints, linearity, and independence of names and order."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch_geometric.utils import scatter

from stretto import Graph
from stretto.ops import edge_softmax, gather_rows, scatter_rows, sddmm, segment_reduce, spmm

DOUBLE = torch.float64
law = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def problems(draw):
    """A graph of any shape, and a generator for the values on it."""
    num_src, num_dst = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    num_edges = draw(st.integers(0, 60))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    source = torch.randint(num_src, (num_edges,), generator=generator)
    target = torch.randint(num_dst, (num_edges,), generator=generator)
    return torch.stack([source, target]), (num_src, num_dst), draw(st.integers(1, 20)), generator


def values(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=DOUBLE)


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@law
@given(problems())
def test_transpose_is_the_adjoint(problem):
    """<A x, y> = <x, A' y>, weighted and scaled, and the adjoint of the adjoint is the graph itself."""
    edge_index, sizes, width, generator = problem
    graph = Graph.of(edge_index, sizes)
    x, y = values(generator, sizes[0], width), values(generator, sizes[1], width)
    weight, rows, cols = values(generator, edge_index.size(1)), values(generator, sizes[1]), values(generator, sizes[0])
    forward = spmm(graph, x, weight, row_scale=rows, col_scale=cols)
    backward = spmm(graph.T, y, weight, row_scale=cols, col_scale=rows)
    close((forward * y).sum(), (x * backward).sum())
    assert graph.T.T is graph


@law
@given(problems())
def test_sddmm_is_the_derivative_by_the_weight(problem):
    """<A(w) x, y> = <w, sddmm(y, x)>."""
    edge_index, sizes, width, generator = problem
    graph = Graph.of(edge_index, sizes)
    x, y = values(generator, sizes[0], width), values(generator, sizes[1], width)
    weight = values(generator, edge_index.size(1))
    close((spmm(graph, x, weight) * y).sum(), (weight * sddmm(graph, y, x)).sum())


@law
@given(problems())
def test_gather_and_scatter_are_adjoint(problem):
    edge_index, (num_src, _), width, generator = problem
    index = edge_index[0]
    x, y = values(generator, num_src, width), values(generator, index.numel(), width)
    close((gather_rows(x, index) * y).sum(), (x * scatter_rows(y, index, num_src)).sum())


@law
@given(problems(), st.floats(-3, 3), st.floats(-3, 3))
def test_sum_and_mean_are_linear(problem, a, b):
    edge_index, sizes, width, generator = problem
    graph = Graph.of(edge_index, sizes)
    x, z = values(generator, sizes[0], width), values(generator, sizes[0], width)
    for reduce in ("sum", "mean"):
        both = spmm(graph, a * x + b * z, reduce=reduce)
        close(both, a * spmm(graph, x, reduce=reduce) + b * spmm(graph, z, reduce=reduce))
    weight = values(generator, edge_index.size(1))
    close(spmm(graph, x, a * weight), a * spmm(graph, x, weight))


@law
@given(problems())
def test_names_of_nodes_do_not_matter(problem):
    edge_index, (num_src, num_dst), width, generator = problem
    new_src, new_dst = torch.randperm(num_src, generator=generator), torch.randperm(num_dst, generator=generator)
    renamed = torch.stack([new_src[edge_index[0]], new_dst[edge_index[1]]])
    x, moved = values(generator, num_src, width), torch.empty(num_src, width, dtype=DOUBLE)
    moved[new_src] = x
    weight = values(generator, edge_index.size(1))
    for reduce in ("sum", "mean", "max", "min"):
        before = spmm(Graph.of(edge_index, (num_src, num_dst)), x, weight, reduce=reduce)
        after = spmm(Graph.of(renamed, (num_src, num_dst)), moved, weight, reduce=reduce)
        close(after[new_dst], before)


@law
@given(problems())
def test_order_of_edges_does_not_matter(problem):
    edge_index, sizes, width, generator = problem
    order = torch.randperm(edge_index.size(1), generator=generator)
    graph, shuffled = Graph.of(edge_index, sizes), Graph.of(edge_index[:, order].contiguous(), sizes)
    x, y = values(generator, sizes[0], width), values(generator, sizes[1], width)
    weight = values(generator, edge_index.size(1))
    for reduce in ("sum", "mean", "max", "min"):
        close(spmm(shuffled, x, weight[order], reduce=reduce), spmm(graph, x, weight, reduce=reduce))
    close(sddmm(shuffled, y, x), sddmm(graph, y, x)[order])
    close(edge_softmax(shuffled, weight[order]), edge_softmax(graph, weight)[order])


@law
@given(problems())
def test_segment_reduce_is_scatter(problem):
    edge_index, (_, num_dst), width, generator = problem
    src, index = values(generator, edge_index.size(1), width), edge_index[1]
    for reduce in ("sum", "mean", "max", "min", "mul"):
        ours, theirs = src.clone().requires_grad_(), src.clone().requires_grad_()
        out, expected = segment_reduce(ours, index, num_dst, reduce=reduce), scatter(theirs, index, 0, num_dst, reduce)
        close(out, expected)
        cotangent = values(generator, *out.shape)
        out.backward(cotangent)
        expected.backward(cotangent)
        close(ours.grad, theirs.grad)


@law
@given(problems())
def test_softmax_sums_to_one_and_ignores_a_shift(problem):
    edge_index, sizes, width, generator = problem
    graph, score = Graph.of(edge_index, sizes), values(generator, edge_index.size(1), width)
    alpha = edge_softmax(graph, score)
    total = segment_reduce(alpha, graph)
    close(total, (graph.degree > 0).to(DOUBLE).unsqueeze(1).expand_as(total))
    shift = values(generator, sizes[1], width)[edge_index[1]] * 50
    close(edge_softmax(graph, score + shift), alpha)
