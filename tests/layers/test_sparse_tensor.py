"""torch_sparse's SparseTensor in the place of edge_index: every layer that takes a torch sparse matrix, every option,
with values and without. PyG raises for some layers; where it does not, ours gives the same."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg

import stretto
from stretto.layers import record_of
from tests.layers.inputs import Data
from tests.layers.options import SPECS
from tests.layers.test_convs import cases, data_for, pair_of, run

sparse = pytest.importorskip("torch_sparse", reason="torch_sparse is not installed")
# A layer that adds the loops itself asks torch_sparse for the diagonal; what declines says why.
GRAPHS = ("unsorted", "isolated", "self_loops", "directed")


def stored(data: Data) -> Data:
    """The same call with a SparseTensor for the torch sparse matrix."""

    def change(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.layout != torch.strided:
            return sparse.SparseTensor.from_torch_sparse_coo_tensor(value.coalesce())
        return value

    return replace(data, args=tuple(map(change, data.args)))


def plain_values(data: Data) -> Data:
    """Without values: a SparseTensor may have none."""
    return replace(
        data,
        args=tuple(a.set_value(None, layout="coo") if isinstance(a, sparse.SparseTensor) else a for a in data.args),
    )


def untied(data: Data) -> Data:
    """No row of zeros: among equal messages stock's product of a sparse matrix gives one the whole gradient of a
    maximum, its scatter, and ours for every format, each a share."""
    x = data.args[0].clone()
    x[1:2] = 0.5 + torch.arange(x.size(1), dtype=x.dtype) / 7
    return replace(data, args=(x, *data.args[1:]))


@pytest.mark.parametrize(("conv", "number"), [p for p in cases(covered=True) if "coo" in SPECS[p.values[0]].takes])
def test_a_sparse_tensor_gives_what_stock_gives(conv, number):
    spec = SPECS[conv]
    ran = 0
    for kind in [k for k in ("coo", "coo_values") if k in spec.takes]:
        for graph in GRAPHS:
            stock, fast = pair_of(spec, spec.options[number])
            data = stored(data_for(spec, spec.options[number], graph, kind))
            data = plain_values(data) if kind == "coo" else data
            data = untied(data) if spec.options[number].get("aggr") in ("max", "min") else data
            for train in (True, False):
                wanted, got = run(stock.train(train), data), run(fast.train(train), data)
                if isinstance(wanted, Exception):
                    assert isinstance(got, type(wanted)), f"stock raises {wanted!r}, ours gives {got!r}"
                    continue
                if isinstance(got, Exception):
                    raise got
                ran += 1
                record = record_of(fast)
                assert (record.path == "stock") == bool(record.reason)
                for mine, theirs in zip(got, wanted, strict=True):
                    scale = float(theirs.abs().max()) if theirs.numel() else 0.0
                    torch.testing.assert_close(mine, theirs, rtol=spec.rtol, atol=spec.rtol * max(scale, 1e-3))
    if not ran:
        pytest.skip("stock raises for a SparseTensor")


@pytest.mark.parametrize("make", [lambda: pyg.SAGEConv(5, 3), lambda: pyg.GraphConv(5, 3), lambda: pyg.GATConv(5, 3)])
@pytest.mark.parametrize("both", [True, False])
def test_between_two_sets_of_nodes(make, both):
    torch.manual_seed(0)
    stock = make().double()
    fast = stretto.accelerate(copy.deepcopy(stock))
    x = torch.randn(6, 5, dtype=torch.float64)
    row, col = torch.tensor([0, 0, 1, 2, 3, 3]), torch.tensor([1, 2, 0, 5, 0, 1])
    adj = sparse.SparseTensor(row=row, col=col, sparse_sizes=(4, 6))
    data = Data(((x, x[:4] if both else None), adj))
    wanted, got = run(stock, data), run(fast, data)
    if isinstance(wanted, Exception):
        assert isinstance(got, type(wanted)), f"stock raises {wanted!r}, ours gives {got!r}"
        return
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)


VECTORS = {
    "CGConv": lambda: pyg.CGConv(5, dim=3),
    "GENConv": lambda: pyg.GENConv(5, 3, edge_dim=3),
    "NNConv": lambda: pyg.NNConv(5, 3, torch.nn.Linear(3, 15)),
    "GINEConv": lambda: pyg.GINEConv(torch.nn.Linear(5, 3), edge_dim=3),
    "PNAConv": lambda: pyg.PNAConv(5, 3, ["mean"], ["identity"], torch.tensor([1, 2, 3]), edge_dim=3),
}


@pytest.mark.parametrize("name", VECTORS)
def test_vectors_of_values_are_edge_features(name):
    """PyG hands them to message(): what does not read them there must not run fast."""
    torch.manual_seed(0)
    stock = VECTORS[name]().double()
    fast = stretto.accelerate(copy.deepcopy(stock))
    x = torch.randn(4, 5, dtype=torch.float64)
    row, col = torch.tensor([0, 0, 1, 2, 3, 3]), torch.tensor([1, 2, 0, 3, 0, 1])
    adj = sparse.SparseTensor(row=row, col=col, value=torch.randn(6, 3, dtype=torch.float64), sparse_sizes=(4, 4))
    wanted, got = run(stock, Data((x, adj))), run(fast, Data((x, adj)))
    assert not isinstance(wanted, Exception), wanted
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("normalise", [True, False])
def test_values_set_anew_are_seen(normalise):
    torch.manual_seed(0)
    stock = pyg.GCNConv(5, 3, normalize=normalise).double()
    fast = stretto.accelerate(copy.deepcopy(stock))
    row, col = torch.tensor([0, 0, 1, 2, 3, 3]), torch.tensor([1, 2, 0, 3, 0, 1])
    x = torch.randn(4, 5, dtype=torch.float64)
    adj = sparse.SparseTensor(row=row, col=col, value=torch.ones(6, dtype=torch.float64), sparse_sizes=(4, 4))
    for step in range(4):
        if step == 2:
            adj.set_value_(torch.linspace(0.5, 2, 6, dtype=torch.float64), layout="coo")
        if step == 3:
            adj.storage.value().mul_(3)
        torch.testing.assert_close(fast(x, adj), stock(x, adj), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("make", [lambda: pyg.GraphConv(5, 3), lambda: pyg.GCNConv(5, 3, normalize=False)])
def test_values_of_a_sparse_tensor_learn(make):
    torch.manual_seed(0)
    row, col = torch.tensor([0, 0, 1, 2, 3, 3]), torch.tensor([1, 2, 0, 3, 0, 1])
    x = torch.randn(4, 5, dtype=torch.float64)
    conv = make().double()
    grads = []
    for layer in (conv, stretto.accelerate(copy.deepcopy(conv))):
        value = torch.linspace(0.5, 2, 6, dtype=torch.float64, requires_grad=True)
        adj = sparse.SparseTensor(row=row, col=col, value=value, sparse_sizes=(4, 4))
        (grad,) = torch.autograd.grad(layer(x, adj).square().sum(), value)
        grads.append(grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-9, atol=1e-12)
