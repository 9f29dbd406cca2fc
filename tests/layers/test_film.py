"""FiLMConv's rectified messages: every size of gamma against beta, also those a random layer never has."""

from __future__ import annotations

import pytest
import torch

from stretto.layers import film
from tests.compare import judge
from tests.graphs import ZOO, graph_of


def _plain(graph, h, gamma, beta, reduce):
    source, target = graph.edge_index
    messages = torch.relu(gamma[target] * h[source] + beta[target])
    out = torch.zeros_like(gamma).index_add(0, target, messages)
    return out if reduce == "sum" else out / graph.degree.clamp(min=1).unsqueeze(1)


def _gradients(function, graph, values, reduce, cotangent):
    leaves = [v.clone().requires_grad_() for v in values]
    out = function(graph, *leaves, reduce)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent.to(out.dtype))]


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("name", [n for n in ZOO if ZOO[n]()[0].numel()])
def test_every_size_of_gamma(name, reduce):
    graph = graph_of(name)
    torch.manual_seed(0)
    n, k = graph.num_rows, 12
    h, cotangent = torch.randn(graph.num_cols, k).double(), torch.randn(n, k).double()
    gamma = torch.randn(n, k).double() * torch.tensor([1, 1, 1e-3, 1e-6, 1e-12, 1e3, 0, 0, 0, 1e-30, 1, 1]).double()
    beta = torch.randn(n, k).double()
    beta[:, 7], beta[:, 8], beta[:, 10], beta[:, 11] = 0, beta[:, 8].abs(), 0, 1e4
    values = (h, gamma, beta)
    wanted = _gradients(_plain, graph, values, reduce, cotangent)
    got = _gradients(film._rectified, graph, values, reduce, cotangent)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9 * max(1.0, float(theirs.abs().max())))
    single = [v.float() for v in values]
    truth = _gradients(_plain, graph, [v.double() for v in single], reduce, cotangent)
    stock = _gradients(_plain, graph, single, reduce, cotangent)
    ours = _gradients(film._rectified, graph, single, reduce, cotangent)
    terms = int(max(graph.degree.max(), graph.T.degree.max()))
    for mine, theirs, true in zip(ours, stock, truth, strict=True):
        judge(mine, theirs, true, terms=terms, scale=1.0)


def test_a_node_that_is_not_a_number_reaches_its_neighbours_only():
    graph = graph_of("isolated")
    h, gamma, beta = torch.randn(9, 3).double(), torch.randn(9, 3).double(), torch.randn(9, 3).double()
    h[5, 1] = float("nan")
    wanted, got = _plain(graph, h, gamma, beta, "sum"), film._rectified(graph, h, gamma, beta, "sum")
    torch.testing.assert_close(got, wanted, equal_nan=True)
