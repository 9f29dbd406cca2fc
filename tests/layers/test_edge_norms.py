"""A BatchNorm in training inside a network on edges, with edges in blocks: results, gradients and running statistics
are those of stock, and no array of all edges is made."""

from __future__ import annotations

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch.nn import BatchNorm1d, Dropout, Linear, PReLU, ReLU, Sequential, Tanh

import stretto
from stretto.layers import record_of
from stretto.layers.edges import norms, streaming
from stretto.observe.peak_memory import peak_bytes
from tests.compare import judge
from tests.layers.edge_layers import Mesh, same
from tests.layers.edge_layers import inputs as mesh_inputs
from tests.layers.edge_layers import pair as mesh_pair
from tests.layers.meta_models import EdgeModel, NodeModel
from tests.layers.spec import DIM, IN

WIDTH = 6


@pytest.fixture(autouse=True)
def blocks(monkeypatch):
    """Every graph counts as large, and a block holds a few edges."""
    monkeypatch.setattr(streaming, "LARGE", 0)
    monkeypatch.setattr(streaming, "BLOCK", 5)


def _net(*inner):
    return Sequential(Linear(2 * WIDTH, 5), *inner, Linear(5, 4))


NETWORKS = {
    "one": lambda: _net(BatchNorm1d(5), ReLU()),
    "two": lambda: _net(BatchNorm1d(5), Tanh()).append(BatchNorm1d(4)),
    "pyg": lambda: _net(ReLU(inplace=True), pyg.BatchNorm(5)),
    "not affine": lambda: _net(BatchNorm1d(5, affine=False), PReLU()),
    "cumulative": lambda: _net(BatchNorm1d(5, momentum=None), ReLU()),
    "not tracked": lambda: _net(BatchNorm1d(5, track_running_stats=False), ReLU()),
    "one of two in eval": lambda: _net(BatchNorm1d(5).eval(), Linear(5, 5), BatchNorm1d(5)),
    "nested": lambda: Sequential(Linear(2 * WIDTH, 5), Sequential(BatchNorm1d(5), ReLU()), Linear(5, 4)),
    "MLP": lambda: pyg.MLP([2 * WIDTH, 5, 7, 4]),
    "MLP act first": lambda: pyg.MLP([2 * WIDTH, 5, 4], act="prelu", act_first=True, plain_last=False),
}


def pair(make, dtype=torch.float64, **options):
    torch.manual_seed(0)
    stock = pyg.EdgeConv(make(), **options).to(dtype)
    for parameter in stock.parameters():
        nn.init.normal_(parameter, std=0.5)
    return stock, stretto.accelerate(copy.deepcopy(stock))


def inputs(dtype=torch.float64, edges=70):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20, WIDTH, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    return x, torch.randint(18, (2, edges), generator=generator)


def step(layer, x, index):
    """Result, gradients, buffers."""
    out = layer(x, index)
    flow = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(out.dtype)
    grads = torch.autograd.grad((out * flow).sum(), [x, *layer.parameters()])
    return [out.detach(), *grads, *(b.clone() for b in layer.buffers())]


@pytest.mark.parametrize("aggr", ["max", "sum", "mean"])
@pytest.mark.parametrize("name", NETWORKS)
def test_as_stock(name, aggr):
    stock, fast = pair(NETWORKS[name], aggr=aggr)
    x, index = inputs()
    for train in (True, True, False):
        if name != "one of two in eval":
            stock.train(train), fast.train(train)
        for wanted, got in zip(step(stock, x, index), step(fast, x, index), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
        assert record_of(fast).path == "fast"
        assert "in blocks" in record_of(fast).plan


def test_backward_after_eval():
    """What was computed in training is differentiated as such, whatever mode the layer is in by then."""
    found = []
    for layer in pair(NETWORKS["MLP"]):
        x, index = inputs()
        out = layer(x, index)
        layer.eval()
        found.append(torch.autograd.grad(out.square().sum(), [x, *layer.parameters()]))
    for wanted, got in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["one", "MLP"])
def test_second_derivatives(name):
    results = []
    for layer in pair(NETWORKS[name], aggr="sum"):
        x, index = inputs()
        (first,) = torch.autograd.grad(layer(x, index).square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), [x, *layer.parameters()], materialize_grads=True))
    # By the largest of all: that of a bias before a norm is 0, where terms as large as the others cancel.
    scale = max(float(wanted.abs().max()) for wanted in results[0])
    for wanted, got in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-11 * scale)


def test_values_far_from_zero_keep_their_digits(monkeypatch):
    """The variance of values of 1000 +- 1, in fp32: no worse than twice stock's error."""
    monkeypatch.setattr(streaming, "BLOCK", 64)
    stock, fast = pair(NETWORKS["MLP"], torch.float32, aggr="sum")
    with torch.no_grad():
        for layer in (stock, fast):
            layer.nn.lins[0].bias += 1000
    x, index = inputs(torch.float32, 3000)
    truth = step(copy.deepcopy(stock).double(), x.detach().double().requires_grad_(), index)
    scale = max(float(t.abs().max()) for t in truth[1:-6])
    for at, (mine, theirs, true) in enumerate(zip(step(fast, x, index), step(stock, x, index), truth, strict=True)):
        if mine.is_floating_point():
            judge(mine, theirs, true.double(), f"value {at}", terms=3000, scale=scale)


def test_user_networks_and_meta_layers():
    stock, fast = mesh_pair(lambda: Mesh(lambda i: Sequential(Linear(i, 4), BatchNorm1d(4), ReLU(), Linear(4, 3))))
    for graph in ("unsorted", "duplicates", "self_loops"):
        for train in (True, False):
            same(stock, fast, mesh_inputs(graph), train, how="in blocks")
    torch.manual_seed(0)
    stock = pyg.MetaLayer(EdgeModel(norm=True), NodeModel(norm=True)).double()
    fast = stretto.accelerate(copy.deepcopy(stock))
    index = torch.randint(20, (2, 70))
    given = [torch.randn(*size, dtype=torch.float64).requires_grad_() for size in ((20, IN), (70, DIM), (2, 4))]
    found = []
    for layer in (stock, fast):
        x, attr, _ = layer(given[0], index, given[1], given[2], torch.arange(20) % 2)
        grads = torch.autograd.grad(x.square().sum() + attr.pow(3).sum(), [*given, *layer.parameters()])
        found.append([x, attr, *grads, *layer.buffers()])
    assert record_of(fast).plan.count("in blocks") == 2
    for wanted, got in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


def test_networks_that_make_matrices():
    """NNConv with PyG's MLP as it comes, and with a Sequential."""
    x, index = inputs()
    attr = torch.randn(70, 3, dtype=torch.float64, requires_grad=True)
    for make in (
        lambda: pyg.MLP([3, 5, 4 * WIDTH]),
        lambda: Sequential(Linear(3, 5), Sequential(BatchNorm1d(5), Tanh()), Linear(5, 4 * WIDTH)),
    ):
        torch.manual_seed(0)
        stock = pyg.NNConv(WIDTH, 4, make()).double()
        fast = stretto.accelerate(copy.deepcopy(stock))
        found = []
        for layer in (stock, fast):
            out = layer(x, index, attr)
            grads = torch.autograd.grad(out.square().sum(), [x, attr, *layer.parameters()])
            found.append([out, *grads, *layer.buffers()])
        assert "in blocks" in record_of(fast).plan
        for wanted, got in zip(*found, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


def test_what_still_needs_all_edges_at_once():
    """Somebody who watches, one norm in two places."""
    x, index = inputs()
    tied = BatchNorm1d(5)
    for make, watch in ((NETWORKS["one"], True), (lambda: _net(tied, ReLU(), tied), False)):
        stock, fast = pair(make)
        for layer in (stock, fast):
            if watch:
                layer.nn[1].register_forward_hook(lambda *given: None)
        for got, want in zip(step(fast, x, index), step(stock, x, index), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
        assert "at once" in record_of(fast).plan


DROPPING = {
    "before": lambda: _net(Dropout(0.5), BatchNorm1d(5), ReLU()),
    "after": lambda: _net(BatchNorm1d(5), Dropout(0.25), ReLU()),
    "between": lambda: _net(BatchNorm1d(5), Tanh(), Dropout(0.5, inplace=True)).append(BatchNorm1d(4)),
    "MLP": lambda: pyg.MLP([2 * WIDTH, 5, 7, 4], act="tanh", dropout=0.5),
    "all": lambda: _net(Dropout(1.0), BatchNorm1d(5)),
}


class Twice(nn.Module):
    """In the place of a Dropout: what it does to rows can be told."""

    def forward(self, x):
        return x * 2


@pytest.mark.parametrize("name", DROPPING)
def test_dropout_beside_a_norm_is_differentiated_as_it_was_drawn(name, monkeypatch):
    """By finite differences: statistics, results and gradients come from one and the same draw."""
    monkeypatch.setattr(streaming, "BLOCK", 9)
    _, fast = pair(DROPPING[name], aggr="sum")
    x, index = inputs(edges=40)

    def drawn(x):
        torch.manual_seed(5)
        return fast(x, index)

    assert torch.autograd.gradcheck(drawn, x)
    assert torch.autograd.gradgradcheck(drawn, x, atol=1e-4)
    assert record_of(fast).path == "fast"
    assert "in blocks" in record_of(fast).plan


@pytest.mark.parametrize("name", DROPPING)
def test_a_norm_sees_what_is_left(name, monkeypatch):
    """With a known function where values are dropped: what stock gives with that function in the Dropout's place."""
    monkeypatch.setattr(norms, "_drop", lambda generator, p, x: x * 2)
    stock, fast = pair(DROPPING[name], aggr="sum")
    if name == "MLP":
        monkeypatch.setattr(torch.nn.functional, "dropout", lambda x, p, training: x * 2 if p else x)
    else:
        stock.nn = Sequential(*(Twice() if type(m) is Dropout else m for m in stock.nn))
    x, index = inputs()
    for wanted, got in zip(step(stock, x, index), step(fast, x, index), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


def test_dropout_beside_a_norm_drops_its_share():
    """Of every block other values, as many as it is to, and those left are scaled; another seed drops others."""
    layer = pyg.EdgeConv(Sequential(Linear(2 * WIDTH, 64), BatchNorm1d(64), Dropout(0.25)), aggr="sum")
    fast = stretto.accelerate(layer.double())
    x = torch.randn(400, WIDTH, dtype=torch.float64)
    index = torch.stack([torch.randint(400, (400,)), torch.arange(400)])  # one edge a row: results are messages
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(fast(x, index))
    kept = found[0] != 0
    assert abs(float(kept.double().mean()) - 0.75) < 5 * (0.75 * 0.25 / kept.numel()) ** 0.5
    assert len({tuple(row) for row in kept.view(80, -1).tolist()}) == 80
    assert torch.equal(found[0], found[1])
    assert not torch.equal(kept, found[2] != 0)
    fast.nn[2].p = 0.0
    torch.testing.assert_close(found[0], torch.where(kept, fast(x, index) / 0.75, 0.0))


def test_users_networks_and_matrices_with_dropout():
    """A layer of a user's, with a norm and without; NNConv with PyG's MLP."""
    for norm in ([], [BatchNorm1d(4)]):
        _, fast = mesh_pair(lambda n=norm: Mesh(lambda i: Sequential(Linear(i, 4), *n, Dropout(0.5), Linear(4, 3))))
        args = mesh_inputs("unsorted")

        def drawn(x, layer=fast, args=args):
            torch.manual_seed(5)
            return layer(x, *args[1:])

        assert torch.autograd.gradcheck(drawn, args[0].requires_grad_())
        assert "in blocks" in record_of(fast).plan
    x, index = inputs()
    attr = torch.randn(70, 3, dtype=torch.float64, requires_grad=True)
    conv = stretto.accelerate(pyg.NNConv(WIDTH, 4, pyg.MLP([3, 5, 4 * WIDTH], dropout=[0.5, 0.0])).double())

    def made(x, attr):
        torch.manual_seed(5)
        return conv(x, index, attr)

    assert torch.autograd.gradcheck(made, (x, attr))
    assert "in blocks" in record_of(conv).plan


def test_one_edge_is_refused_as_in_stock():
    for layer in pair(NETWORKS["one"]):
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            layer(*inputs(edges=1))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_no_array_of_edges_by_channels(dropout, monkeypatch):
    monkeypatch.setattr(streaming, "BLOCK", 250)
    torch.manual_seed(0)
    fast = stretto.accelerate(pyg.EdgeConv(pyg.MLP([64, 32, 32, 32], dropout=dropout)))
    x, index = torch.randn(100, 32, requires_grad=True), torch.randint(100, (2, 20000))
    assert peak_bytes(lambda: fast(x, index).sum().backward()) < 20000 * 32 * 4
