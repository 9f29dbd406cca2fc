"""What changes at every step is not collected: live graphs and bytes held stay flat, without the garbage collector."""

import gc

import pytest
import torch
import torch_geometric.nn as pyg

import stretto
from stretto import Graph
from stretto.compile import HOIST
from stretto.graph import memo
from stretto.graph.graph import _by_number
from tests.layers.test_caches import LAYERS as WEIGHTED

N, EDGES, ATTR, RELATIONS = 200, 1200, 4, 3
PLAIN = {
    "SAGE": lambda: pyg.SAGEConv(6, 6),
    "GAT": lambda: pyg.GATConv(6, 6),
    "GATv2": lambda: pyg.GATv2Conv(6, 6),
    "GIN": lambda: pyg.GINConv(torch.nn.Linear(6, 6)),
    "Cluster": lambda: pyg.ClusterGCNConv(6, 6),
    "MF": lambda: pyg.MFConv(6, 6),
    "PNA": lambda: pyg.PNAConv(6, 6, ["mean", "max"], ["identity"], torch.tensor([0, 3, 5])),
    "Edge": lambda: pyg.EdgeConv(torch.nn.Sequential(torch.nn.Linear(12, 6), torch.nn.ReLU())),
    "Transformer": lambda: pyg.TransformerConv(6, 6),
    "GEN": lambda: pyg.GENConv(6, 6),
    "AGNN": lambda: pyg.AGNNConv(),
}
ATTRIBUTED = {
    "GINE": lambda: pyg.GINEConv(torch.nn.Linear(6, 6), edge_dim=ATTR),
    "CG": lambda: pyg.CGConv(6, ATTR),
    "NN": lambda: pyg.NNConv(6, 6, torch.nn.Linear(ATTR, 36)),
    "GAT edges": lambda: pyg.GATConv(6, 6, edge_dim=ATTR),
}
RELATIONAL = {
    "RGCN": lambda: pyg.RGCNConv(6, 6, RELATIONS),
    "FiLM": lambda: pyg.FiLMConv(6, 6, RELATIONS),
}
FILTERED = {"CF": lambda: pyg.models.schnet.CFConv(6, 6, 6, torch.nn.Linear(ATTR, 6), 5.0)}
LAYERS = {**WEIGHTED, **PLAIN, **ATTRIBUTED, **RELATIONAL, **FILTERED}
HELD = memo.FEW * (1 + RELATIONS)  # and what derives from each


@pytest.fixture(autouse=True)
def _uncollected(fresh_memo):
    """Reference counts alone free what is no longer used: a cycle would wait for the collector, for long."""
    stretto.forget()
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    stretto.forget()


def _edges():
    half = torch.randint(N, (2, EDGES // 2))
    return torch.cat([half, half.flip(0)], dim=1)


def _rest(name):
    """What a layer takes besides x and edge_index, made anew."""
    if name in FILTERED:
        return torch.rand(EDGES), torch.rand(EDGES, ATTR)
    if name in ATTRIBUTED:
        return (torch.rand(EDGES, ATTR),)
    if name in RELATIONAL:
        return (torch.randint(RELATIONS, (EDGES,)),)
    return (torch.rand(EDGES),) if name in WEIGHTED else ()


def _step(conv, x, *inputs, twice):
    for _ in range(1 + twice):  # as two layers of one model do
        out = conv(x, *inputs)
        if out.requires_grad:
            out.sum().backward()


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_a_constant_x_on_a_new_graph_each_step(name, twice):
    conv, x, seen = stretto.accelerate(LAYERS[name]()), torch.rand(N, 6), []
    before = len(_by_number)
    for step in range(100):
        with torch.set_grad_enabled(step % 2 == 0):
            _step(conv, x, _edges(), *(() if name in WEIGHTED else _rest(name)), twice=twice)
        seen.append((len(_by_number) - before, HOIST.nbytes()))
    assert seen[-1] <= max(seen[20:30])
    assert seen[-1][0] <= 5 * HELD
    assert seen[-1][1] <= HELD * 3 * x.nbytes
    assert len(HOIST._entries) <= 1


@pytest.mark.parametrize("name", LAYERS)
def test_a_constant_graph_with_all_else_new_each_step(name, monkeypatch):
    conv, edge_index, seen = stretto.accelerate(LAYERS[name]()), _edges(), []
    for _ in range(60):
        _step(conv, torch.rand(N, 6), edge_index, *_rest(name), twice=False)
        seen.append((Graph.of(edge_index, N).nbytes, len(_by_number), HOIST.nbytes()))
    assert seen[-1] == seen[20]
    assert not HOIST._entries


@pytest.mark.parametrize("name", WEIGHTED)
def test_nothing_piles_up_by_torchs_kernels(name, monkeypatch):
    """Layers whose scalings are made at every call keep the values of edges for as long as those live."""
    monkeypatch.setenv("STRETTO_BACKEND", "torch")
    conv, edge_index, seen = stretto.accelerate(WEIGHTED[name]()), _edges(), []
    for _ in range(30):
        _step(conv, torch.rand(N, 6, requires_grad=True), edge_index, twice=False)
        seen.append(Graph.of(edge_index, N).nbytes)
    assert seen[-1] == seen[10]


def test_other_numbers_of_nodes_on_the_same_edges_are_not_collected():
    edge_index, before = _edges(), len(_by_number)
    for extra in range(100):
        Graph.of(edge_index, N + extra)
    assert len(_by_number) - before <= memo.MOST_KEYS + memo.FEW


def test_a_product_counts_and_keeps_no_graph_alive():
    conv, x = stretto.accelerate(pyg.LGConv()), torch.rand(N, 6)
    before = set(_by_number)  # other tests' that something of theirs still holds
    edges = [_edges() for _ in range(5)]
    for _ in range(3):
        for edge_index in edges:
            conv(x, edge_index)
    assert HOIST.nbytes() == 5 * x.nbytes
    graphs = [Graph.of(edge_index, N) for edge_index in edges]
    assert sum(graph.nbytes for graph in graphs) > 5 * x.nbytes  # what the products would have kept alive
    del edges, edge_index, graphs
    Graph.cache_clear()
    assert HOIST.nbytes() == 0
    assert not set(_by_number) - before


def test_nonzeros_count():
    x = torch.zeros(1 << 12, 1 << 8)
    x[::7, 3] = 1.0
    conv, edge_index = stretto.accelerate(pyg.GCNConv(1 << 8, 8)), torch.randint(1 << 12, (2, EDGES))
    for _ in range(4):
        conv(x, edge_index)
    nonzeros = HOIST._entry(x).nonzeros
    assert nonzeros is not None
    assert HOIST.nbytes() >= nonzeros[0].nbytes + nonzeros[1].nbytes > 0


def test_what_is_remembered_counts_with_all_that_derives_from_it(monkeypatch):
    """A budget that two graphs fit into, but not with their transposes, self-loops and normalisations."""
    monkeypatch.setattr(memo, "SMALL", 0)
    conv, x = stretto.accelerate(pyg.GCNConv(6, 6)), torch.rand(5000, 6)
    made = [torch.randint(5000, (2, 40_000)) for _ in range(3)]
    bare = Graph.of(made[0], 5000).nbytes
    conv(x, made[0]).sum().backward()
    full = Graph.of(made[0], 5000).nbytes
    assert full > 2 * bare
    monkeypatch.setenv("STRETTO_GRAPH_CACHE_MB", str((full + 2 * bare) >> 20))
    Graph.of(made[1], 5000)
    Graph.of(made[2], 5000)
    assert Graph.cache_info().graphs < 3
