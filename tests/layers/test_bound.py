"""Steps that are written down: the same as stock's in every case, and only as long as what decided them holds."""

import copy
import gc
import weakref

import pytest
import torch
import torch_geometric.nn as pyg
from torch.nn import Linear, ReLU, Sequential

import stretto
from stretto.plug import bound
from tests.layers.options import SPECS
from tests.layers.test_convs import data_for, pair_of, run

NODES, EDGES, WIDTH = 50, 300, 8


def network():
    return Sequential(Linear(WIDTH, 12), ReLU(), Linear(12, WIDTH))


LAYERS = {
    "GCN": lambda: pyg.GCNConv(WIDTH, 6),
    "SAGE": lambda: pyg.SAGEConv(WIDTH, 6),
    "SAGE max": lambda: pyg.SAGEConv(WIDTH, 6, aggr="max"),
    "TAG": lambda: pyg.TAGConv(WIDTH, 6),
    "GIN": lambda: pyg.GINConv(network()),
    "GAT": lambda: pyg.GATConv(WIDTH, 4, heads=2),
    "GATv2": lambda: pyg.GATv2Conv(WIDTH, 4, heads=2),
    "Transformer": lambda: pyg.TransformerConv(WIDTH, 4, heads=2),
    "EdgeConv": lambda: pyg.EdgeConv(Sequential(Linear(2 * WIDTH, 12), ReLU(), Linear(12, 6))),
    "ResGated": lambda: pyg.ResGatedGraphConv(WIDTH, 6),
}


def graph(seed=0):
    """The last nodes have no edges."""
    return torch.randint(NODES - 8, (2, EDGES), generator=torch.Generator().manual_seed(seed))


def features(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(NODES, WIDTH, dtype=torch.float64, generator=generator, requires_grad=True)


def is_bound(layer):
    known = bound._layers.get(id(layer))
    return known is not None and known.conv() is layer and any(met.cell[0] for met in known.met.values())


def settled(make, edge_index, x=None):
    """A stock layer and ours, which has met the graph often enough to be bound."""
    torch.manual_seed(0)
    stock = make().double()
    fast = stretto.accelerate(copy.deepcopy(stock))
    for k in range(bound.WRITTEN_AT[1] + 1):
        fast(features(k) if x is None else x, edge_index).sum().backward()
    return stock, fast


def compare(stock, fast, *args, flow=None):
    results = []
    for layer in (stock, fast):
        out = layer(*args)
        leaves = [t for t in (*args, *layer.parameters()) if t.requires_grad]
        flow = torch.randn_like(out) if flow is None else flow
        results.append([out, *torch.autograd.grad(out, leaves, flow, allow_unused=True)])
    for wanted, got in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("name", LAYERS)
def test_bound_and_as_stock(name):
    edge_index = graph()
    stock, fast = settled(LAYERS[name], edge_index)
    assert is_bound(fast), name
    calls = stretto.report(fast).rows[0]
    assert calls.path == "fast"
    assert calls.plan
    for seed in range(3):
        compare(stock, fast, features(seed), edge_index)
    with torch.no_grad():
        torch.testing.assert_close(fast(features(), edge_index), stock(features(), edge_index))
    compare(stock, fast, features(), graph(7))  # another graph takes the long way


@pytest.mark.parametrize("name", LAYERS)
def test_not_finite_second_derivatives_and_results_edited_in_place(name):
    edge_index = graph()
    stock, fast = settled(LAYERS[name], edge_index)
    for row, value in ((NODES - 2, torch.nan), (3, torch.nan), (4, torch.inf)):
        x = features().detach()
        x[row] = value  # as in a layer that is not bound: what differs from stock is in docs/all_of_stretto.md
        compare(stretto.accelerate(copy.deepcopy(stock)), fast, x.requires_grad_(), edge_index)
    twice, edited, expanded = [], [], []
    for layer in (stock, fast):
        x = features()
        (first,) = torch.autograd.grad(layer(x, edge_index).pow(2).sum(), x, create_graph=True)
        twice.append(torch.autograd.grad(first.pow(2).sum(), x)[0])
        if "max" not in name and name != "EdgeConv":  # torch's scatter refuses it
            edited.append(torch.autograd.grad(torch.relu_(layer(x, edge_index)).pow(2).sum(), x)[0])
        expanded.append(torch.autograd.grad(layer(x, edge_index).sum(), x)[0])
    for one in filter(None, (twice, edited, expanded)):
        torch.testing.assert_close(*one, rtol=1e-8, atol=1e-8)


def fused(layer):
    parameters = [p for p in layer.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.1, fused=True)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def other_data(layer):
    for parameter in layer.parameters():
        parameter.data = parameter.data * 2


def replaced(layer):
    for module in layer.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                setattr(module, name, torch.nn.Parameter(parameter.detach() * 3))


def frozen(layer):
    next(layer.parameters()).requires_grad_(False)


def loaded(layer):
    layer.load_state_dict({name: value + 1 for name, value in layer.state_dict().items()})


def watched(layer):
    layer.register_forward_hook(lambda module, args, out: out * 2)


def watched_inside(layer):
    layer.register_propagate_forward_hook(lambda module, args, out: out * 3)


def wider_messages(layer):
    layer.message = lambda x_j, *args, **kwargs: 2 * x_j


def single(layer):
    layer.float().double()


CHANGES = (fused, other_data, replaced, frozen, loaded, watched, watched_inside, single)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("name", ["GCN", "SAGE", "GIN", "GAT"])
def test_changes_of_the_layer_are_seen(name, change):
    edge_index = graph()
    stock, fast = settled(LAYERS[name], edge_index)
    for layer in (stock, fast):
        change(layer)
    compare(stock, fast, features(), edge_index)


def test_a_class_that_is_changed_is_seen(monkeypatch):
    edge_index = graph()
    stock, fast = settled(LAYERS["SAGE"], edge_index)
    monkeypatch.setattr(pyg.SAGEConv, "message", lambda self, x_j: 2 * x_j)
    compare(stock, fast, features(), edge_index)


@pytest.mark.parametrize("name", ["GCN", "SAGE", "GAT"])
def test_an_edited_graph_is_seen(name):
    edge_index = graph()
    stock, fast = settled(LAYERS[name], edge_index)
    edge_index[1, :50] = 3
    compare(stock, fast, features(), edge_index)
    edge_index.data = graph(5)
    compare(stock, fast, features(), edge_index)


def test_constants_that_are_edited_are_seen():
    edge_index, x = graph(), features().detach()
    stock, fast = settled(LAYERS["SAGE"], edge_index, x)
    compare(stock, fast, x, edge_index)
    x.mul_(2)
    compare(stock, fast, x, edge_index)
    conv, weight = pyg.GCNConv(WIDTH, 6).double(), torch.rand(EDGES, dtype=torch.float64)
    ours = stretto.accelerate(copy.deepcopy(conv))
    for _ in range(20):
        ours(features(), edge_index, weight)
    weight.mul_(3)
    compare(conv, ours, features(), edge_index, weight)
    compare(conv, ours, features(), edge_index, weight.clone().requires_grad_())


def test_autocast_threads_and_modes_take_the_long_way():
    edge_index = graph()
    stock, fast = settled(lambda: pyg.GCNConv(WIDTH, 6), edge_index)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        assert fast(features(), edge_index).dtype == torch.float64
    torch.set_num_threads(torch.get_num_threads() + 1)
    compare(stock, fast, features(), edge_index)
    with torch.inference_mode():
        torch.testing.assert_close(fast(features().detach(), edge_index), stock(features().detach(), edge_index))


def test_dropout_draws_anew():
    edge_index = graph()
    _, fast = settled(lambda: pyg.GATConv(WIDTH, 4, heads=2, dropout=0.5), edge_index)
    x = features()
    torch.manual_seed(3)
    first, second = fast(x, edge_index), fast(x, edge_index)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(fast(x, edge_index), first)


def test_a_module_of_a_user_inside_is_not_bound():
    class Users(torch.nn.Module):
        def forward(self, x):
            return x * SCALE[0]

    edge_index = graph()
    stock, fast = settled(lambda: pyg.GINConv(Users()), edge_index)
    assert not is_bound(fast)
    SCALE[0] = 5.0
    try:
        compare(stock, fast, features(), edge_index)
    finally:
        SCALE[0] = 1.0


SCALE = [1.0]


def test_nothing_is_kept_of_what_is_gone():
    edge_index = graph()
    _, fast = settled(LAYERS["GCN"], edge_index)
    assert is_bound(fast)
    gc.disable()
    try:
        (met,) = bound._layers[id(fast)].met.values()
        program = weakref.ref(next(iter(met.cell[0].values())))
        del edge_index
        assert program() is None
        number, gone = id(fast), weakref.ref(fast)
        del fast
        assert gone() is None
        assert number not in bound._layers or bound._layers[number].conv() is not None
    finally:
        gc.enable()


def test_forget_unbinds():
    _, fast = settled(LAYERS["GCN"], edge_index := graph())
    stretto.forget()
    assert not is_bound(fast)
    assert edge_index.numel()


@pytest.mark.parametrize("conv", SPECS, ids=lambda c: c.__name__)
def test_every_layer_many_times_on_one_graph(conv):
    """Bound or not: results and gradients as stock's, in every mode it may be in."""
    spec = SPECS[conv]
    for options in spec.options[:3]:
        for kind in spec.takes[:2]:
            stock, fast = pair_of(spec, options, kind)
            data = data_for(spec, options, "unsorted", kind)
            wanted = run(stock.eval(), data)
            if isinstance(wanted, Exception):
                continue
            fast.eval()
            for call in range(bound.WRITTEN_AT[1] + 2):
                got = run(fast, data)
                assert len(got) == len(wanted)
                for mine, theirs in zip(got, wanted, strict=True):
                    scale = float(theirs.abs().nan_to_num(0, 0).max()) if theirs.numel() else 0.0
                    limit = spec.rtol * max(scale, 1e-3)
                    torch.testing.assert_close(
                        mine, theirs, rtol=spec.rtol, atol=limit, equal_nan=True, msg=lambda m, n=call: f"call {n}: {m}"
                    )
