"""Numbers without a full mantissa count as zero in attention and edge messages, as in spmm's sums; 16-bit ones stay."""

import pytest
import torch

from stretto import Graph, ops
from stretto.kernels import native
from stretto.ops.attention import attention
from stretto.ops.edge_messages import edge_messages
from stretto.ops.edge_softmax_sum import softmax_sum

pytestmark = pytest.mark.skipif(native.library() is None, reason="libstretto is not loaded")
EDGES = torch.tensor([[0, 1], [2, 2]])
TINY = torch.tensor([[1e-40], [2e-40], [1.0]])


def bits(x: torch.Tensor) -> int:
    return int(x.contiguous().view(torch.int32).count_nonzero())


@pytest.fixture
def graph():
    return Graph.of(EDGES, num_nodes=3)


def test_attention(graph):
    assert bits(attention(graph, TINY.unsqueeze(1), edge=torch.ones(2, 1), form="weight")) == 0
    assert bits(attention(graph, TINY.unsqueeze(1), edge=torch.zeros(2, 1), form="given")) == 0


def test_gradients_of_attention(graph):
    v, edge = TINY.clone().requires_grad_(), torch.ones(2, 1, requires_grad=True)
    out = attention(graph, v.unsqueeze(1), edge=edge, form="weight")
    dv, dedge = torch.autograd.grad(out, [v, edge], torch.full_like(out, 1e-40))
    assert bits(dv) == 0
    assert bits(dedge) == 0


def test_messages(graph):
    x = TINY.clone().requires_grad_()
    out = edge_messages(graph, None, x, act="relu")
    assert bits(out.detach()) == 0
    x2 = TINY.abs().add(1).requires_grad_()
    out = edge_messages(graph, None, x2, act="relu")
    (grad,) = torch.autograd.grad(out, x2, torch.full_like(out, 1e-40))
    assert bits(grad) == 0


def test_softmax_sum(graph):
    assert bits(softmax_sum(graph, TINY)) == 0


def test_sixteen_bits_stay(graph):
    half = torch.tensor([[6e-8], [1.2e-7], [1.0]], dtype=torch.float16)  # ordinary numbers once they are fp32
    assert edge_messages(graph, None, half, act="relu")[2].item() == pytest.approx(1.8e-7, rel=0.1)
    weighted = attention(graph, half.unsqueeze(1), edge=torch.ones(2, 1), form="weight")
    assert weighted[2].item() == pytest.approx(1.8e-7, rel=0.1)


def test_the_users_own_operations_are_not_touched(graph):
    edge_messages(graph, None, TINY, act="relu")
    ops.spmm(graph, TINY)
    assert bits(torch.full((1000,), 1e-40) * 0.5) == 1000
