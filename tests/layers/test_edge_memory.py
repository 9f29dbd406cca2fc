"""No array of edges x channels: every layer that makes messages on edges, counted byte by byte, and equal to stock.

On edges spread over all nodes, and on a hub: all edges into one node, which is then cut into pieces.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch.nn import Dropout, Linear, ReLU, Sequential, Tanh
from torch_geometric.nn.models.schnet import CFConv, ShiftedSoftplus

import stretto
from stretto.layers import record_of
from stretto.layers.edges import streaming
from stretto.observe.peak_memory import peak_bytes, tensor_bytes

NODES, EDGES, WIDTH, DIM, BLOCK = 100, 20000, 32, 4, 250
IN_BLOCKS, FROM_NODES = "in blocks", "(A, relu(X))"


def _mlp(*inner):
    return Sequential(Linear(2 * WIDTH, WIDTH), ReLU(), *inner, Linear(WIDTH, WIDTH))


def _filters():
    return Sequential(Linear(DIM, WIDTH), ShiftedSoftplus(), Linear(WIDTH, WIDTH))


def _matrices():
    return Sequential(Linear(DIM, WIDTH), ReLU(), Linear(WIDTH, 8 * 8))


# make(); features of an edge (0: none) and of a node; what the plan says
LAYERS = {
    "GATv2": (lambda: pyg.GATv2Conv(WIDTH, 8, heads=4, edge_dim=DIM), DIM, WIDTH, IN_BLOCKS),
    "GATv2 no loops": (
        lambda: pyg.GATv2Conv(WIDTH, 8, heads=4, edge_dim=DIM, concat=False, add_self_loops=False),
        DIM,
        WIDTH,
        IN_BLOCKS,
    ),
    "ResGated tanh": (lambda: pyg.ResGatedGraphConv(WIDTH, WIDTH, act=Tanh()), 0, WIDTH, IN_BLOCKS),
    "ResGated max": (lambda: pyg.ResGatedGraphConv(WIDTH, WIDTH, aggr="max"), 0, WIDTH, IN_BLOCKS),
    "CGConv": (lambda: pyg.CGConv(WIDTH, DIM), DIM, WIDTH, IN_BLOCKS),
    "CFConv": (lambda: CFConv(WIDTH, WIDTH, WIDTH, _filters(), 4.0), DIM, WIDTH, IN_BLOCKS),
    "NNConv": (lambda: pyg.NNConv(8, 8, _matrices()), DIM, 8, IN_BLOCKS),
    "NNConv MLP": (lambda: pyg.NNConv(8, 8, pyg.MLP([DIM, WIDTH, 8 * 8], norm=None)), DIM, 8, IN_BLOCKS),
    "NNConv max": (lambda: pyg.NNConv(8, 8, _matrices(), aggr="max"), DIM, 8, IN_BLOCKS),
    "NNConv mean": (lambda: pyg.NNConv(8, 8, _matrices(), aggr="mean"), DIM, 8, IN_BLOCKS),
    "GEN softmax": (lambda: pyg.GENConv(WIDTH, WIDTH, edge_dim=DIM, learn_t=True), DIM, WIDTH, IN_BLOCKS),
    "GEN softmax_sg": (lambda: pyg.GENConv(WIDTH, WIDTH, "softmax_sg", t=-0.5, edge_dim=DIM), DIM, WIDTH, IN_BLOCKS),
    "GEN max": (lambda: pyg.GENConv(WIDTH, WIDTH, "max", edge_dim=DIM), DIM, WIDTH, IN_BLOCKS),
    "GEN powermean": (
        lambda: pyg.GENConv(WIDTH, WIDTH, "powermean", p=2.0, learn_p=True, edge_dim=DIM),
        DIM,
        WIDTH,
        IN_BLOCKS,
    ),
    "GEN several": (lambda: pyg.GENConv(WIDTH, WIDTH, ["mean", "max", "sum"], edge_dim=DIM), DIM, WIDTH, IN_BLOCKS),
    "GEN several of nodes": (lambda: pyg.GENConv(WIDTH, WIDTH, ["mean", "max"]), 0, WIDTH, FROM_NODES),
    "GINE": (lambda: pyg.GINEConv(Linear(WIDTH, WIDTH), edge_dim=DIM), DIM, WIDTH, IN_BLOCKS),
    "GINE max": (lambda: pyg.GINEConv(Linear(WIDTH, WIDTH), aggr="max"), WIDTH, WIDTH, IN_BLOCKS),
    "EdgeConv": (lambda: pyg.EdgeConv(_mlp()), 0, WIDTH, IN_BLOCKS),
    "EdgeConv mean": (lambda: pyg.EdgeConv(_mlp(), aggr="mean"), 0, WIDTH, IN_BLOCKS),
    "PNA": (
        lambda: pyg.PNAConv(
            WIDTH, WIDTH, ["mean", "min", "max", "std"], ["identity"], torch.ones(9).long(), edge_dim=DIM
        ),
        DIM,
        WIDTH,
        IN_BLOCKS,
    ),
}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(streaming, "LARGE", 0)
    monkeypatch.setattr(streaming, "BLOCK", BLOCK)


def inputs(name, shape, dtype, num_edges=EDGES):
    _, dim, width, _ = LAYERS[name]
    generator = torch.Generator().manual_seed(1)
    source, target = torch.randint(NODES, (2, num_edges), generator=generator)
    if shape == "hub":
        target = torch.where(torch.arange(num_edges) % 50 == 0, target, 3)

    def values(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    args = [values(NODES, width), torch.stack([source, target])]
    if name == "CFConv":
        args.append(values(num_edges))
    return args if dim == 0 else [*args, values(num_edges, dim)]


def pair(name, dtype):
    torch.manual_seed(0)
    stock = LAYERS[name][0]().to(dtype)
    return stock, stretto.accelerate(copy.deepcopy(stock))


@pytest.mark.parametrize("shape", ["spread", "hub"])
@pytest.mark.parametrize("name", LAYERS)
def test_results_and_gradients_are_those_of_stock(name, shape):
    args = inputs(name, shape, torch.float64, 3000)
    leaves = [a for a in args if a.is_floating_point()]
    found = []
    for layer in pair(name, torch.float64):
        out = layer(*args)
        weight = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(2))
        grads = torch.autograd.grad((out * weight).sum(), [*leaves, *layer.parameters()])
        found.append([out, *grads])
    assert record_of(layer).path == "fast"
    assert LAYERS[name][3] in record_of(layer).plan
    for wanted, got in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9 * max(float(wanted.detach().abs().max()), 1e-3))


@pytest.mark.parametrize("shape", ["spread", "hub"])
@pytest.mark.parametrize("name", LAYERS)
def test_no_array_of_edges_by_channels(name, shape):
    args = inputs(name, shape, torch.float32)
    _, fast = pair(name, torch.float32)
    step_of_edges = tensor_bytes(*(a for a in args[2:]))  # their gradients are asked for
    heads = 4 * 4 * EDGES * 4 if name.startswith("GATv2") else 0  # numbers per edge and head may be kept
    loops = tensor_bytes(args[-1]) * 3 if name == "GATv2" else 0  # features with those of the loops, and gradients

    def step():
        fast(*args).sum().backward()
        for tensor in (*args, *fast.parameters()):
            tensor.grad = None

    assert peak_bytes(step) < EDGES * WIDTH * 4 + step_of_edges + heads + loops


def test_dropout_is_streamed_and_drawn_again_in_backward():
    """Not the bits of stock: equal in eval, reproducible by seed, and the gradient is that of the values drawn."""
    torch.manual_seed(0)
    stock = pyg.EdgeConv(_mlp(Dropout(0.4))).double()
    fast = stretto.accelerate(copy.deepcopy(stock))
    x, index = inputs("EdgeConv", "hub", torch.float64, 700)
    torch.testing.assert_close(fast.eval()(x, index), stock.eval()(x, index))
    fast.train()

    def drawn(value, weight):
        torch.manual_seed(5)
        return (fast(value, index) * weight).sum()

    torch.manual_seed(1)
    weight, direction = torch.randn(2, NODES, WIDTH, dtype=torch.float64)
    value = drawn(x, weight)
    assert IN_BLOCKS in record_of(fast).plan
    assert value == drawn(x, weight)
    assert value != (fast.eval()(x, index) * weight).sum()
    fast.train()
    torch.manual_seed(99)  # backward must not draw from here, nor move it
    before = torch.get_rng_state()
    (slope,) = torch.autograd.grad(value, x, create_graph=True)
    (plain,) = torch.autograd.grad(drawn(x, weight), x)
    torch.testing.assert_close(slope, plain)
    torch.manual_seed(99)
    assert torch.equal(torch.get_rng_state(), before)
    step = 1e-6
    with torch.no_grad():
        change = drawn(x + step * direction, weight) - drawn(x - step * direction, weight)
    torch.testing.assert_close((plain * direction).sum(), change / (2 * step), rtol=1e-5, atol=1e-7)


def test_blocks_do_not_depend_on_threads():
    threads = torch.get_num_threads()
    for name in ("EdgeConv", "ResGated max", "GATv2", "CFConv"):
        _, fast = pair(name, torch.float32)
        found = []
        for count in (1, 2):
            torch.set_num_threads(count)
            args = inputs(name, "hub", torch.float32)
            out = fast(*args)
            found.append([out, *torch.autograd.grad(out.sum(), [a for a in args if a.is_floating_point()])])
        torch.set_num_threads(threads)
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), name
