"""Sums of a million terms of one sign, in fp32 and forward and backward: each errs no more than a short one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stretto import Graph, ops
from stretto.kernels import cpu_attention, tall
from stretto.ops.dense import dense, dense_of_sums, plus_dense
from stretto.ops.edge_mlp import edge_mlp
from stretto.ops.relu_dense import relu_dense

MANY = 1 << 20
UNIT = torch.finfo(torch.float32).eps


def values(*shape: int) -> Tensor:
    """Nearly alike: what one addition loses the next one loses too."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0)) / 1024 + 1 / 3


def close(found: Tensor, true: Tensor) -> None:
    error = float(((found.double() - true) / true).abs().max())
    assert error <= 4 * UNIT, f"{error:.1e}"


@pytest.mark.parametrize("width", [1, 4, 20, 70])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_row(width, weighted):
    """Of two nodes one hears of all edges, in no order."""
    count = MANY // 4
    index = torch.randint(50, (count,), generator=torch.Generator().manual_seed(1))
    graph = Graph.of(torch.stack([index, torch.ones_like(index)]), (50, 2))
    x, weight = values(50, width), values(count) if weighted else None
    factors = torch.ones(count, dtype=torch.float64) if weight is None else weight.double()
    true = (torch.zeros(50, dtype=torch.float64).index_add_(0, index, factors).unsqueeze(1) * x.double()).sum(0)
    close(ops.spmm(graph, x, weight)[1], true)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_a_segment(reduce):
    x, index = values(MANY, 3), torch.zeros(MANY, dtype=torch.long)
    close(ops.segment_reduce(x, index, 1, reduce=reduce)[0], getattr(x.double(), reduce)(0))


def test_rows_gathered_from_one():
    x = values(2, 5).requires_grad_()
    grad = values(MANY // 4, 5)
    ops.gather_rows(x, torch.zeros(MANY // 4, dtype=torch.long)).backward(grad)
    close(x.grad[0], grad.double().sum(0))


@pytest.mark.parametrize("width", [3, 40, 300])
def test_biases_of_relu_dense(width):
    """By our kernel, and in blocks where rows are too wide for it."""
    rows = MANY // width
    z, z_bias = values(rows, width).requires_grad_(), values(width).requires_grad_()
    weight, bias = values(4, width), values(4).requires_grad_()
    grad = values(rows, 4)
    relu_dense(z, weight, bias, z_bias).backward(grad)
    close(bias.grad, grad.double().sum(0))
    close(z_bias.grad, (grad.double() @ weight.double()).sum(0))


def test_rows_and_their_product():
    x, w = values(MANY // 4, 5), values(MANY // 4, 20)
    product, sums = tall.sum_product(x.t(), w, sums=True)
    close(sums, x.double().sum(0))
    close(product, x.double().t() @ w.double())


def test_row_dots():
    a = values(MANY // 4, 2, 3)
    close(cpu_attention.row_dot(a, a, sums=True)[1], a.double().sum(0).flatten())


@pytest.mark.parametrize("shape", [(3, 64), (64, 3), (8, 8), (16, 32), (4096, 2)])
def test_a_narrow_weight(shape):
    """torch's GEMM adds up such a gradient one row after the other."""
    o, i = shape
    x, weight = values(MANY // 16, i), values(o, i).requires_grad_()
    grad = values(MANY // 16, o)
    true = grad.double().t() @ x.double()
    for out in (dense(x, weight), plus_dense(torch.zeros_like(grad), x, weight)):
        weight.grad = None
        out.backward(grad)
        close(weight.grad, true)


@pytest.mark.parametrize("learns", [False, True])
def test_a_narrow_product_of_sums(learns):
    """Of few columns torch's GEMM adds up all terms one after the other, forward too."""
    x, weight = values(1000, 4096), values(4, 4096).requires_grad_(learns)
    close(dense_of_sums(x, weight).detach(), x.double() @ weight.detach().double().t())


@pytest.mark.parametrize("every", [1, 4, 128])
@pytest.mark.parametrize("shape", [(3,), (2, 3)])
def test_sources_over_many_blocks(every, shape):
    """Of every so many edges one leaves node 0: they come in the order of their destinations."""
    count = MANY // 8
    number = torch.arange(count)
    source = torch.where(number % every == 0, 0, 1 + number % 1000)
    graph = Graph.of(torch.stack([source, number // 8]), (1001, count // 8))
    x, grad = values(1001, *shape).requires_grad_(), values(count, *shape)
    edge_mlp(graph, lambda other: other * 1, None, x, reduce="each").backward(grad)
    close(x.grad[0], grad[source == 0].double().sum(0))


def test_a_destination_over_many_blocks():
    """Whose own term is a matrix."""
    count = MANY // 8
    graph = Graph.of(torch.zeros(2, count, dtype=torch.long), (1, 1))
    x, grad = values(1, 2, 3).requires_grad_(), values(count, 2, 3)
    edge_mlp(graph, lambda own: own * 1, x, None, reduce="each").backward(grad)
    close(x.grad[0], grad.double().sum(0))


def test_parameters_over_many_blocks():
    """In pieces of one row of 256 edges each."""
    count = 1 << 16
    graph = Graph.of(torch.zeros(2, count, dtype=torch.long), (1, 1))
    attr, bias = values(count, 3), values(3).requires_grad_()
    out = edge_mlp(graph, lambda e: e + bias, None, None, attr, parameters=[bias], reduce="each", block=256)
    grad = values(count, 3)
    out.backward(grad)
    close(bias.grad, grad.double().sum(0))


def test_temperature_of_a_softmax():
    """Of rows of two edges: what it gets from each is positive."""
    rows = 1 << 17
    index = torch.arange(2 * rows)
    graph = Graph.of(torch.stack([index, index // 2]), (2 * rows, rows))
    x = values(2 * rows, 3) + (index % 2).unsqueeze(1)
    found = []
    for dtype in (torch.float32, torch.float64):
        t = torch.ones(3, dtype=dtype, requires_grad=True)
        ops.softmax_sum(graph, x.to(dtype), temperature=t, act="identity").sum().backward()
        found.append(t.grad)
    close(*found)


def test_vector_of_gatv2():
    """Of rows of two edges."""
    rows = 1 << 17
    index = torch.arange(2 * rows)
    graph = Graph.of(torch.stack([index, index // 2]), (2 * rows, rows))
    x = values(2 * rows, 1, 4) + (index % 2).view(-1, 1, 1)
    found = []
    for dtype in (torch.float32, torch.float64):
        att = torch.ones(1, 4, dtype=dtype, requires_grad=True)
        own = torch.zeros(rows, 1, 4, dtype=dtype)
        ops.attention(graph, None, own, x.to(dtype), att=att, form="gatv2").sum().backward()
        found.append(att.grad)
    close(*found)
