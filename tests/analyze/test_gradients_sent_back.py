"""Which rounds of a step send gradients back: of what learns, and of hops inside a layer that multiplies first."""

import pytest
import torch
from torch_geometric import nn as pyg

import stretto
import stretto.analyze
from stretto import datasets
from stretto.analyze import Machine
from stretto.observe.models import Propagate, as_data, make

MACHINE = Machine(memory=1e10)
WIDTH, HOPS = 12, 3


def problem_of(model, **options):
    data = as_data(datasets.load_graph("er:200:800"), width=WIDTH)
    return stretto.analyze(model, data, machine=MACHINE, procs=[1], **options).problem


# conv -> what its hops read: rows, and whether they depend on its parameters
INSIDE = {
    "ARMAConv": (lambda: pyg.ARMAConv(WIDTH, 8, num_stacks=2, num_layers=HOPS), [WIDTH, 16, 16], [16, 16]),
    "GatedGraphConv": (lambda: pyg.GatedGraphConv(16, HOPS), [WIDTH, 16, 16], [16, 16]),
    "SGConv": (lambda: pyg.SGConv(WIDTH, 8, K=HOPS), [WIDTH] * HOPS, []),
    "TAGConv": (lambda: pyg.TAGConv(WIDTH, 8, K=HOPS), [WIDTH] * HOPS, []),
    "ChebConv": (lambda: pyg.ChebConv(WIDTH, 8, K=HOPS + 1), [WIDTH] * HOPS, []),
    "APPNP": (lambda: pyg.APPNP(HOPS, 0.1), [WIDTH] * HOPS, []),
}


@pytest.mark.parametrize("name", INSIDE)
def test_hops_after_a_product_send_gradients_back(name):
    make_conv, forward, backward = INSIDE[name]
    problem = problem_of(make_conv())
    assert problem.forward_widths == forward
    assert problem.backward_widths == backward


def frozen(module):
    return module.requires_grad_(False)


class Apart(torch.nn.Module):
    """Rows of an encoder, cut off from it."""

    def __init__(self, cut):
        super().__init__()
        self.encoder, self.conv, self.cut = torch.nn.Linear(WIDTH, WIDTH), pyg.SAGEConv(WIDTH, 8), cut

    def forward(self, x, edge_index):
        return self.conv(self.cut(self.encoder, x), edge_index)


def ungraded(encoder, x):
    with torch.no_grad():
        return encoder(x)


NONE_BACK = {
    "frozen encoder": lambda: Propagate(frozen(torch.nn.Linear(WIDTH, WIDTH)), pyg.SAGEConv(WIDTH, 8)),
    "frozen layer before": lambda: pyg.Sequential(
        "x, edge_index",
        [
            (frozen(pyg.GCNConv(WIDTH, WIDTH)), "x, edge_index -> x"),
            (pyg.SAGEConv(WIDTH, 8), "x, edge_index -> x"),
        ],
    ),
    "detached": lambda: Apart(lambda encoder, x: encoder(x).detach()),
    "without gradients": lambda: Apart(ungraded),
}


@pytest.mark.parametrize("name", NONE_BACK)
def test_what_does_not_learn_gets_no_gradients(name):
    assert problem_of(NONE_BACK[name]()).backward_widths == []


def test_a_frozen_layer_passes_gradients_on():
    model = Propagate(torch.nn.Linear(WIDTH, WIDTH), frozen(pyg.SAGEConv(WIDTH, 8)))
    assert problem_of(model).backward_widths == [WIDTH]


def test_what_does_not_learn_has_no_memory_of_gradients():
    data = as_data(datasets.load_graph("er:200:800"), width=WIDTH)
    model = NONE_BACK["frozen encoder"]()
    memory = stretto.analyze(model, data, machine=MACHINE, procs=[1]).memory
    values = sum(p.numel() for p in model.parameters())
    assert memory["parameters"] == 4 * values
    assert memory["gradients"] == 4 * (values - WIDTH * (WIDTH + 1))


def test_a_frozen_layer_has_its_class():
    for conv, name in ((pyg.GATConv, "A, L"), (pyg.SAGEConv, "C, L")):
        model = Propagate(torch.nn.Linear(WIDTH, WIDTH), frozen(conv(WIDTH, 8)))
        data = as_data(datasets.load_graph("er:200:800"), width=WIDTH)
        assert [cost.name for cost in stretto.analyze(model, data, machine=MACHINE, procs=[1]).costs] == [name]


def test_accelerated_layers_send_the_same_back():
    model = make("gcn", WIDTH, 16, 8)
    plain = problem_of(model)
    assert plain.backward_widths == [16]
    assert problem_of(stretto.accelerate(model)).backward_widths == plain.backward_widths
