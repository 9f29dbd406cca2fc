"""First derivatives of every op by finite differences; second ones where they exist, a clear error where not."""

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from stretto import Graph
from stretto.ops import (
    OPS,
    Sample,
    edge_softmax,
    gather_rows,
    scatter_rows,
    sddmm,
    segment_matmul,
    segment_reduce,
    spmm,
)
from tests.graphs import random_edges

GRAPHS = {
    "bipartite": lambda: Graph.of(random_edges(4, 5, 9, 1), (4, 5)),
    "isolated": lambda: Graph.of(torch.tensor([[0, 2, 2, 0], [1, 1, 1, 3]]), 4),
    "empty": lambda: Graph.of(torch.empty(2, 0, dtype=torch.long), 3),
}


def leaves_of(op: str, sample: Sample):
    """function(*leaves) and its leaves: every floating tensor of the call carries a gradient, scales too."""
    leaves: list[Tensor] = []

    def take(value):
        if isinstance(value, Tensor) and value.is_floating_point():
            leaves.append(value.detach().clone().requires_grad_())
            return len(leaves) - 1
        return None

    args, kwargs = [take(a) for a in sample.args], {k: take(v) for k, v in sample.kwargs.items()}

    def function(*given):
        return OPS[op].function(
            *(a if at is None else given[at] for a, at in zip(sample.args, args, strict=True)),
            **{k: v if kwargs[k] is None else given[kwargs[k]] for k, v in sample.kwargs.items()},
        )

    return function, tuple(leaves)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("op", OPS)
def test_first_derivatives(op, name):
    for sample in OPS[op].samples(GRAPHS[name](), torch.float64):
        function, leaves = leaves_of(op, sample)
        assert gradcheck(function, leaves, fast_mode=name != "bipartite"), str(sample)


@pytest.mark.parametrize("op", OPS)
def test_second_derivatives(op):
    for sample in OPS[op].samples(GRAPHS["bipartite"](), torch.float64):
        function, leaves = leaves_of(op, sample)
        assert gradgradcheck(function, leaves, fast_mode=True), str(sample)


def test_product_gradient_is_right_at_zeros():
    index = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3, 3])
    values = torch.tensor([2.0, 0.0, 3.0, 0.0, 0.0, 5.0, 1.5, -2.0, 4.0], dtype=torch.float64)
    ours, theirs = values.clone().requires_grad_(), values.clone().requires_grad_()
    segment_reduce(ours, index, 5, reduce="mul").sum().backward()
    torch.ones(5, dtype=torch.float64).scatter_reduce(0, index, theirs, "prod", include_self=True).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min", "mul", "var", "std", "softmax", "median"])
def test_sorted_and_unsorted_messages_agree(reduce):
    index = random_edges(6, 6, 40)[0]
    order = index.argsort(stable=True)
    src = torch.randn(40, 3, dtype=torch.float64)
    a, b = src.clone().requires_grad_(), src[order].clone().requires_grad_()
    out_a, out_b = segment_reduce(a, index, 6, reduce=reduce), segment_reduce(b, index[order], 6, reduce=reduce)
    torch.testing.assert_close(out_a[order] if reduce == "softmax" else out_a, out_b)
    cotangent = torch.randn_like(out_a)
    out_a.backward(cotangent)
    out_b.backward(cotangent[order] if reduce == "softmax" else cotangent)
    torch.testing.assert_close(a.grad[order], b.grad)


def test_only_what_is_asked_for_is_computed():
    """No gradient for x: no transpose is made. No gradient for the weight: x is not kept alive."""
    graph = Graph.of(random_edges(10, 10, 30, 5), 10)
    x, weight = torch.randn(10, 4), torch.rand(30, requires_grad=True)
    spmm(graph, x, weight).sum().backward()
    assert graph._T is None
    x.requires_grad_()
    out = spmm(graph, x, weight.detach())
    assert out.grad_fn.saved_tensors[0] is None


def test_weights_changed_in_place_or_replaced_are_followed():
    graph = Graph.of(random_edges(10, 10, 30, 6), 10)
    x, weight = torch.randn(10, 4, requires_grad=True), torch.rand(30)
    for _ in range(3):
        weight.mul_(1.5)
        spmm(graph, x, weight).sum().backward()
        expected = torch.zeros(10).index_add_(0, graph.edge_index[0], weight)
        torch.testing.assert_close(x.grad, expected.unsqueeze(1).expand(-1, 4))
        x.grad = None
        weight = weight.clone()


def test_a_weight_edited_between_forward_and_backward_is_noticed():
    graph = Graph.of(random_edges(10, 10, 30, 7), 10)
    x, weight = torch.randn(10, 4, requires_grad=True), torch.rand(30)
    out = spmm(graph, x, weight)
    weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("op", ["gather", "scatter"])
def test_an_index_edited_between_forward_and_backward_is_noticed(op):
    index = torch.tensor([0, 2, 2, 1])
    x = torch.randn(4, 3, requires_grad=True)
    out = gather_rows(x, index) if op == "gather" else scatter_rows(x, index, 3)
    index[0] = 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_an_edge_index_edited_after_forward_does_not_disturb_backward():
    edge_index = random_edges(10, 10, 30, 8)
    before = edge_index.clone()
    x = torch.randn(10, 4, requires_grad=True)
    out = spmm(Graph.of(edge_index, 10), x)
    edge_index.zero_()
    out.sum().backward()
    expected = torch.bincount(before[0], minlength=10).float()
    torch.testing.assert_close(x.grad, expected.unsqueeze(1).expand(-1, 4))


@pytest.mark.parametrize(
    "function",
    [
        lambda g, x: spmm(g, x),
        lambda g, x: spmm(g, x, reduce="mean"),
        lambda g, x: spmm(g, x, reduce="max"),
        lambda g, x: sddmm(g, x, x),
        lambda g, x: edge_softmax(g, x.new_ones(g.num_edges, 1) * x.sum()),
        lambda g, x: gather_rows(x, g.edge_index[0]),
        lambda g, x: scatter_rows(x, torch.zeros(10, dtype=torch.long), 2),
        lambda g, x: segment_reduce(x, torch.zeros(10, dtype=torch.long), 2, reduce="mul"),
        lambda g, x: segment_matmul(x, [0, 10], torch.ones(1, 4, 2)),
    ],
)
def test_forward_mode_is_refused_aloud(function):
    """No tangent is ever dropped in silence."""
    graph = Graph.of(random_edges(10, 10, 30, 9), 10)
    x = torch.randn(10, 4)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward mode AD"):
        function(graph, forward_ad.make_dual(x, torch.ones_like(x)))
