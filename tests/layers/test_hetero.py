"""Layers over several types of nodes beyond the table of all layers: dropout, changed graphs, real data."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch_geometric.nn as pyg

import stretto
from stretto import datasets
from stretto.layers import record_of
from tests.layers.inputs import hetero
from tests.layers.options import SPECS
from tests.layers.options_attention import CHANNELS, METADATA


def test_dropout_of_han():
    """Equal in eval, reproducible by a seed in training, and right on average."""
    torch.manual_seed(0)
    stock = pyg.HANConv(CHANNELS, 4, METADATA, heads=2, dropout=0.4).double()
    fast = stretto.accelerate(copy.deepcopy(stock))
    args = hetero("unsorted", SPECS[pyg.HANConv], torch.float64).args
    exact = stock.eval()(*args)
    for kind, value in fast.eval()(*args).items():
        torch.testing.assert_close(value, exact[kind])
    fast.train()
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        runs.append(fast(*args))
    assert record_of(fast).path == "fast"
    for kind in exact:
        torch.testing.assert_close(runs[0][kind], runs[1][kind])
        assert not torch.equal(runs[0][kind], exact[kind])


@pytest.mark.parametrize("make", [pyg.HGTConv, pyg.HANConv], ids=lambda c: c.__name__)
def test_all_relations_are_one_pass(make, monkeypatch):
    """Relations of unlike sizes and one without edges: one call of attention for all of them."""
    from stretto.layers import hetero as module

    calls, before = [], module.attention
    monkeypatch.setattr(module, "attention", lambda *args, **options: calls.append(1) or before(*args, **options))
    sizes = {"a": 30, "b": 20, "c": 10}
    counts = {
        ("a", "to", "b"): 90,
        ("b", "to", "a"): 70,
        ("a", "self", "a"): 60,
        ("a", "two", "b"): 40,
        ("b", "x", "c"): 0,
    }
    torch.manual_seed(0)
    edges = {
        kind: torch.stack([torch.randint(sizes[kind[0]], (count,)), torch.randint(sizes[kind[2]], (count,))])
        for kind, count in counts.items()
    }
    x = {kind: torch.randn(count, 5, dtype=torch.float64, requires_grad=True) for kind, count in sizes.items()}
    stock = make(5, 4, (list(sizes), list(edges)), heads=2).double()
    fast = stretto.accelerate(copy.deepcopy(stock))
    for step in range(2):
        found = []
        for layer in (stock, fast):
            out = [value for value in layer(x, edges).values() if value is not None]
            total = sum(value.pow(2).sum() for value in out)
            leaves = [*x.values(), *layer.parameters()]
            found.append([*out, *torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)])
        assert len(calls) == step + 1
        for wanted, got in zip(*found, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
        edges["a", "two", "b"] = edges["a", "two", "b"].flip(1)  # the same graph in another order
    assert record_of(fast).path == "fast"


def test_a_changed_relation_is_seen():
    torch.manual_seed(0)
    stock = pyg.HGTConv(CHANNELS, 4, METADATA, heads=2).double()
    fast = stretto.accelerate(copy.deepcopy(stock))
    x, relations = hetero("unsorted", SPECS[pyg.HGTConv], torch.float64).args
    for change in range(3):
        for kind, value in stock(x, relations).items():
            torch.testing.assert_close(fast(x, relations)[kind], value)
        if change == 0:
            relations["a", "to", "b"][0, 0] = 1 - relations["a", "to", "b"][0, 0].clamp(max=1)
        else:
            relations["b", "among", "b"] = relations["b", "among", "b"].flip(0)
    assert record_of(fast).path == "fast"


def kept_on(graph):
    """How many of the results that were kept on a graph for others are still there."""
    return sum(bool(entry[0]) for key, entry in graph._derived.items() if key != "met")


@pytest.mark.parametrize("make", [pyg.HGTConv, pyg.HANConv], ids=lambda c: c.__name__)
def test_a_relation_that_stays_does_not_collect_those_that_change(make):
    conv = stretto.accelerate(make(4, 4, (["a"], [("a", "stays", "a"), ("a", "changes", "a")])))
    x, stays = {"a": torch.randn(20, 4)}, torch.randint(20, (2, 50))
    known = stretto.Graph.of(stays, (20, 20))
    for step in range(100):
        conv(x, {("a", "stays", "a"): stays, ("a", "changes", "a"): torch.randint(20, (2, 60))})
        if step == 4:
            few = kept_on(known)
    stretto.Graph.cache_clear()  # which remembers a number of graphs by their content
    gc.collect()
    assert few > 0
    assert kept_on(known) < few


@pytest.mark.parametrize("name", ["hetero-acm", "hetero-dblp"])
@pytest.mark.parametrize("make", [pyg.HGTConv, pyg.HANConv], ids=lambda c: c.__name__)
def test_real_relations(name, make):
    if name not in datasets.names():
        pytest.skip(f"no {name}.npz in the data folder")
    data = datasets.load(name)
    generator = torch.Generator().manual_seed(0)
    kinds = list(data.num_nodes)
    x = {k: torch.randn(n, 8, generator=generator, dtype=torch.float64) for k, n in data.num_nodes.items()}
    torch.manual_seed(0)
    stock = make(8, 8, (kinds, list(data.edge_index)), heads=2).double()
    fast = stretto.accelerate(copy.deepcopy(stock))
    found = []
    for layer in (stock, fast):
        leaves = {k: v.clone().requires_grad_() for k, v in x.items()}
        out = {k: v for k, v in layer(leaves, data.edge_index).items() if v is not None}
        total = sum((v * v).sum() for v in out.values())
        wanted = [*leaves.values(), *layer.parameters()]
        grads = torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True)
        found.append([*out.values(), *grads])
    assert record_of(fast).path == "fast"
    for got, wanted in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-8 * max(float(wanted.abs().max()), 1.0))


def _three_into_one():
    torch.manual_seed(0)
    layers = {
        ("a", "one", "b"): pyg.SAGEConv((5, 3), 4),
        ("a", "two", "b"): pyg.GraphConv((5, 3), 4),
        ("b", "three", "b"): pyg.SAGEConv(3, 4, aggr="sum"),
    }
    x = {"a": torch.randn(12, 5).double(), "b": torch.randn(9, 3).double()}
    sizes = {"a": 12, "b": 9}
    edges = {
        kind: torch.stack([torch.randint(sizes[kind[0]], (30,)), torch.randint(sizes[kind[2]], (30,))])
        for kind in layers
    }
    with pytest.warns(UserWarning, match="do not get updated"):
        return pyg.HeteroConv(layers).double(), x, edges


def test_relations_side_by_side_multiply_the_destination_once():
    """Root terms of three relations are one product; the stack of results is never made."""
    stock, x, edges = _three_into_one()
    fast = stretto.accelerate(copy.deepcopy(stock))
    weights = {("a", "two", "b"): torch.rand(30).double()}
    wanted = stock(x, edges, edge_weight_dict=weights)["b"]
    fast(x, edges, edge_weight_dict=weights)  # calibrates
    with torch.profiler.profile() as seen:
        got = fast(x, edges, edge_weight_dict=weights)["b"]
    torch.testing.assert_close(got, wanted)
    counts = {event.key: event.count for event in seen.key_averages()}
    assert counts.get("aten::mm", 0) + counts.get("aten::addmm", 0) + counts.get("aten::addmm_", 0) == 4
    assert "3 of 3 relations side by side" in record_of(fast).plan
    rows = {row.conv: row.path for row in stretto.report(fast).rows}
    assert rows == {"HeteroConv": "fast", "SAGEConv": "fast", "GraphConv": "fast"}
    first = fast.convs["a", "one", "b"]
    seen_by_hook = []
    first.register_forward_hook(lambda *args: seen_by_hook.append(1))
    torch.testing.assert_close(fast(x, edges, edge_weight_dict=weights)["b"], wanted)
    assert seen_by_hook
    assert "2 of 3" in record_of(fast).plan


def test_relations_side_by_side_twice_differentiable_and_patched():
    stock, x, edges = _three_into_one()
    found = []
    for patched in (False, True):
        leaf = x["a"].clone().requires_grad_()
        if patched:
            stretto.patch()
        try:
            out = stock({"a": leaf, "b": x["b"]}, edges)["b"]
            (slope,) = torch.autograd.grad(out.pow(3).sum(), leaf, create_graph=True)
            (curve,) = torch.autograd.grad(slope.pow(2).sum(), leaf)
        finally:
            if patched:
                stretto.unpatch()
        found.append((out, slope, curve))
    for got, wanted in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, wanted)
    assert "3 of 3" in record_of(stock).plan


class _Two(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.one, self.two = kind((-1, -1), 5), kind((-1, -1), 3)

    def forward(self, x, edge_index):
        return self.two(self.one(x, edge_index).relu(), edge_index)


@pytest.mark.parametrize("aggr", ["sum", "mean", "max"])
@pytest.mark.parametrize("kind", [pyg.SAGEConv, pyg.GraphConv], ids=lambda c: c.__name__)
def test_models_of_to_hetero_add_relations_side_by_side(kind, aggr):
    torch.manual_seed(0)
    sizes = {"a": 12, "b": 9}
    kinds = [("a", "one", "b"), ("b", "back", "a"), ("b", "three", "b"), ("a", "two", "b"), ("a", "own", "a")]
    x = {"a": torch.randn(12, 5).double(), "b": torch.randn(9, 3).double()}
    edges = {k: torch.stack([torch.randint(sizes[k[0]], (30,)), torch.randint(sizes[k[2]], (30,))]) for k in kinds}
    stock = pyg.to_hetero(_Two(kind), (["a", "b"], kinds), aggr=aggr).double()
    with torch.no_grad():
        stock(x, edges)
    fast = copy.deepcopy(stock)
    before = {name: type(m) for name, m in fast.named_modules()}, list(fast.state_dict()), fast.code
    stretto.accelerate(stretto.accelerate(fast))
    found = []
    for model in (stock, fast):
        leaves = {k: v.clone().requires_grad_() for k, v in x.items()}
        out = model(leaves, edges)
        total = sum((v * v).sum() for v in out.values())
        found.append([*out.values(), *torch.autograd.grad(total, [*leaves.values(), *model.parameters()])])
    for got, wanted in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
    if aggr == "max":
        assert type(fast) is before[0][""]
    else:
        assert "10 relations side by side in 4 sums" in record_of(fast).plan
        assert all("side by side" in row.plan for row in stretto.report(fast).rows)
        copied = copy.deepcopy(fast)
        torch.testing.assert_close(copied(x, edges)["b"], found[0][1])
        seen = []
        fast.one["a__one__b"].register_forward_hook(lambda *args: seen.append(1))
        torch.testing.assert_close(fast(x, edges)["b"], found[0][1])
        assert seen
        fast.two["a__one__b"] = copy.deepcopy(fast.two["a__one__b"])  # no longer the layer the sum was made of
        torch.nn.init.zeros_(next(fast.two["a__one__b"].parameters()))
        assert not torch.allclose(fast(x, edges)["b"], found[0][1])
    stretto.restore(fast)
    assert ({name: type(m) for name, m in fast.named_modules()}, list(fast.state_dict()), fast.code) == before
