"""Models of chemistry and of graph classification on mini-batches of real graphs, accelerated against stock: results
and gradients, by accelerate() and under patch()."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import torch_geometric.nn as pyg
from torch.nn import BatchNorm1d, Embedding, Linear, ReLU, Sequential
from torch_geometric.nn.models import dimenet, visnet
from torch_geometric.utils import scatter

import stretto
from stretto import datasets
from stretto.ops import segment_reduce
from stretto.plug import functional

GRAPHS = 24
MOLECULES = "qm9-20k"
COLLECTIONS = ("tu-mutag", "tu-enzymes", "tu-proteins", "tu-nci1")


def batch_of(name):
    """The first graphs of a collection as a PyG mini-batch: edge_index, node count, batch, extras."""
    if name not in datasets.names():
        pytest.skip(f"no {name}.npz in the data folder")
    data = datasets.load_graph(name)
    nodes, edges = (data.extras[key][: GRAPHS + 1].long() for key in ("node_ptr", "edge_ptr"))
    n, e = int(nodes[-1]), int(edges[-1])
    batch = torch.arange(GRAPHS).repeat_interleave(nodes.diff())
    extras = {k: v[:n] for k, v in data.extras.items() if k in ("z", "pos")}
    return data.edge_index[:, :e].contiguous(), n, batch, extras


def near(pos, r, batch=None, **options):
    """radius_graph in plain PyTorch."""
    distance = torch.cdist(pos, pos)
    close = (distance < r) & ~torch.eye(pos.size(0), dtype=torch.bool)
    if batch is not None:
        close &= batch.view(-1, 1) == batch
    index = close.nonzero().t().contiguous()
    if options.get("loop"):
        own = torch.arange(pos.size(0))
        index = torch.cat([index, torch.stack([own, own])], dim=1)
    return index


def triplets(edge_index, num_nodes):
    """DimeNet's k -> j -> i in plain PyTorch: its own needs a package that is not there."""
    row, col = edge_index
    follows = (col.view(-1, 1) == row) & (row.view(-1, 1) != col)  # edge k->j, then edge j->i, with k != i
    first, second = follows.nonzero().t()
    return col, row, col[second], row[second], row[first], first, second


def compare(make, call, inputs, rtol=1e-8, dtype=torch.float64):
    """Stock, accelerated, and stock under patch(): the same results and gradients. -> the accelerated model."""
    torch.manual_seed(0)
    stock = make().to(dtype)
    models = [stock, stretto.accelerate(copy.deepcopy(stock)), copy.deepcopy(stock)]
    found = []
    for place, model in enumerate(models):
        for parameter in model.parameters():
            parameter.grad = None
        leaves = [t.detach().clone().requires_grad_() if t.is_floating_point() else t for t in inputs]
        if place == 2:
            stretto.patch()
        try:
            torch.manual_seed(1)
            out = call(model, *leaves)
            learned = [t for t in leaves if t.is_floating_point()] + list(model.parameters())
            learned = [t for t in learned if t.requires_grad]
            flow = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=out.dtype)
            grads = torch.autograd.grad((out * flow).sum(), learned, allow_unused=True, materialize_grads=True)
        finally:
            if place == 2:
                stretto.unpatch()
        found.append([out.detach(), *grads])
    for other in found[1:]:
        for got, wanted in zip(other, found[0], strict=True):
            scale = max(float(wanted.abs().max()) if wanted.numel() else 0.0, 1e-3)
            torch.testing.assert_close(got, wanted, rtol=rtol, atol=rtol * scale)
    return models[1]


@pytest.fixture
def scattered(monkeypatch):
    """The reductions that PyG's scatter and softmax left to segment_reduce, which they do under patch() alone."""
    names = []

    def counted(src, index, *args, **options):
        names.append(options["reduce"])
        return segment_reduce(src, index, *args, **options)

    monkeypatch.setattr(functional, "segment_reduce", counted)
    return names


def fast_layers(model):
    return [row.conv for row in stretto.report(model).rows if row.path == "fast"]


def schnet():
    def graph(pos, batch):
        index = near(pos.detach(), 4.0, batch)
        return index, (pos[index[0]] - pos[index[1]]).norm(dim=-1)

    return pyg.SchNet(16, 16, 3, 10, 4.0, interaction_graph=graph)


def test_schnet():
    _, _, batch, extras = batch_of(MOLECULES)
    z, pos = extras["z"].long(), extras["pos"].double()
    model = compare(schnet, lambda m, pos: m(z, pos, batch), [pos])
    assert fast_layers(model) == ["CFConv"] * 3


def test_schnet_trained_on_forces():
    """The gradient of a gradient: d loss / d parameters, where the loss holds d energy / d positions."""
    _, _, batch, extras = batch_of(MOLECULES)
    z = extras["z"].long()

    def forces(model, pos):
        energy = model(z, pos, batch)
        return torch.autograd.grad(energy.sum(), pos, create_graph=True)[0]

    compare(schnet, forces, [extras["pos"].double()])


def test_dimenet(monkeypatch, scattered):
    _, _, batch, extras = batch_of(MOLECULES)
    z, pos = extras["z"][batch < 6].long(), extras["pos"][batch < 6].double()
    monkeypatch.setattr(dimenet, "radius_graph", near)
    monkeypatch.setattr(dimenet, "triplets", triplets)
    pytest.importorskip("sympy", reason="DimeNet's basis needs sympy")

    def make():
        return pyg.DimeNetPlusPlus(8, 1, 2, 8, 4, 8, num_spherical=3, num_radial=3, cutoff=3.0)

    model = compare(make, lambda m, pos: m(z, pos, batch[batch < 6]), [pos], rtol=1e-6)
    assert stretto.report(model).rows == []  # no layer of it is a MessagePassing: it is all scatter
    assert scattered.count("sum") >= 5  # two interactions over triplets, three outputs over edges


def test_visnet(monkeypatch, scattered):
    _, _, batch, extras = batch_of(MOLECULES)
    z, pos, small = extras["z"][batch < 6].long(), extras["pos"][batch < 6].float(), batch[batch < 6]
    if "radius_graph" not in inspect.getsource(visnet):
        pytest.skip("this ViSNet finds its neighbours in another way")
    monkeypatch.setattr(visnet, "radius_graph", near)

    def make():
        return pyg.ViSNet(lmax=1, num_heads=2, num_layers=2, hidden_channels=8, num_rbf=6, cutoff=3.0)

    def call(model, pos):
        return model(z, pos, small)[0]

    model = compare(make, call, [pos], rtol=1e-3, dtype=torch.float32)  # it makes arrays of floats itself
    assert fast_layers(model) == ["NeighborEmbedding"]
    assert all("its own" in row.reason for row in stretto.report(model).rows if row.path == "stock")
    assert scattered.count("sum") >= 4  # of scalars and of vectors, in the aggregate() of both such layers


def test_attentive_fp():
    index, n, batch, _ = batch_of(MOLECULES)
    x = torch.randn(n, 6, dtype=torch.float64)
    attr = torch.randn(index.size(1), 3, dtype=torch.float64)

    def make():
        return pyg.AttentiveFP(6, 16, 2, 3, num_layers=3, num_timesteps=2)

    model = compare(make, lambda m, x, attr: m(x, index, attr, batch), [x, attr])
    assert fast_layers(model) == ["GATEConv", "GATConv", "GATConv", "GATConv"]


def test_graph_unet():
    index, n, batch, _ = batch_of("tu-mutag")
    x = torch.randn(n, 6, dtype=torch.float64)
    model = compare(lambda: pyg.GraphUNet(6, 16, 4, 2, 0.5), lambda m, x: m(x, index, batch), [x])
    assert "GCNConv" in fast_layers(model)


class Crystals(torch.nn.Module):
    """CGConv with BatchNorm, pooled: the network of the CGCNN kind."""

    def __init__(self):
        super().__init__()
        self.embed = Embedding(20, 16)
        self.convs = torch.nn.ModuleList(pyg.CGConv(16, 8, batch_norm=True) for _ in range(3))
        self.out = Linear(16, 2)

    def forward(self, z, pos, index, batch):
        length = (pos[index[0]] - pos[index[1]]).norm(dim=-1, keepdim=True)
        attr = torch.exp(-((length - torch.linspace(0, 3, 8, dtype=pos.dtype)) ** 2))
        x = self.embed(z)
        for conv in self.convs:
            x = conv(x, index, attr).relu()
        return self.out(pyg.global_mean_pool(x, batch))


def test_crystal_net():
    index, _, batch, extras = batch_of(MOLECULES)
    model = compare(Crystals, lambda m, pos: m(extras["z"].long(), pos, index, batch), [extras["pos"].double()])
    assert fast_layers(model) == ["CGConv"] * 3


class EdgeModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = Sequential(Linear(6 + 6 + 3 + 4, 12), ReLU(), Linear(12, 3))

    def forward(self, src, dst, edge_attr, u, batch):
        return self.mlp(torch.cat([src, dst, edge_attr, u[batch]], 1))


class NodeModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Sequential(Linear(6 + 3, 12), ReLU(), Linear(12, 8))
        self.second = Sequential(Linear(6 + 8 + 4, 12), ReLU(), Linear(12, 6))

    def forward(self, x, edge_index, edge_attr, u, batch):
        row, col = edge_index
        message = self.first(torch.cat([x[row], edge_attr], dim=1))
        return self.second(torch.cat([x, scatter(message, col, 0, x.size(0), "mean"), u[batch]], dim=1))


class GlobalModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = Sequential(Linear(4 + 6, 12), ReLU(), Linear(12, 4))

    def forward(self, x, edge_index, edge_attr, u, batch):
        return self.mlp(torch.cat([u, scatter(x, batch, dim=0, reduce="max")], dim=1))


def test_meta_layer(scattered):
    index, n, batch, _ = batch_of(MOLECULES)
    inputs = [torch.randn(s, dtype=torch.float64) for s in ((n, 6), (index.size(1), 3), (GRAPHS, 4))]

    def make():
        return torch.nn.ModuleList(pyg.MetaLayer(EdgeModel(), NodeModel(), GlobalModel()) for _ in range(2))

    def call(layers, x, attr, u):
        for layer in layers:
            x, attr, u = layer(x, index, attr, u, batch)
        return u

    model = compare(make, call, inputs)
    assert fast_layers(model) == ["MetaLayer"] * 2
    for row in stretto.report(model).rows:
        assert row.plan.count("first Linear on nodes") == 2
    assert set(scattered) == {"max"}  # the global model's: those of the node model are made with its messages


class Classifier(torch.nn.Module):
    """Layers of one kind, pooled."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.convs = torch.nn.ModuleList({**LAYERS, **EDGE_LAYERS}[kind](i) for i in (6, 16))
        self.norms = torch.nn.ModuleList(BatchNorm1d(16) for _ in range(2))
        self.out = Linear(32, 3)

    def forward(self, x, index, batch, *attr):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x, index, *attr)).relu()
        return self.out(torch.cat([pyg.global_add_pool(x, batch), pyg.global_max_pool(x, batch)], dim=1))


DEGREES = torch.tensor([0, 5, 30, 20, 10, 4, 1])
LAYERS = {
    "GIN": lambda i: pyg.GINConv(Sequential(Linear(i, 16), ReLU(), Linear(16, 16))),
    "PNA": lambda i: pyg.PNAConv(i, 16, ["mean", "min", "max", "std"], ["identity", "amplification"], DEGREES),
    "Edge": lambda i: pyg.EdgeConv(Sequential(Linear(2 * i, 16), ReLU(), Linear(16, 16))),
    "GEN": lambda i: pyg.GENConv(i, 16),
    "FiLM": lambda i: pyg.FiLMConv(i, 16),
    "Gated": lambda i: pyg.ResGatedGraphConv(i, 16),
    "GAT": lambda i: pyg.GATConv(i, 4, heads=4),
    "GATv2": lambda i: pyg.GATv2Conv(i, 4, heads=4),
    "Transformer": lambda i: pyg.TransformerConv(i, 4, heads=4),
}
EDGE_LAYERS = {
    "GAT edges": lambda i: pyg.GATConv(i, 4, heads=4, edge_dim=3),
    "GATv2 edges": lambda i: pyg.GATv2Conv(i, 4, heads=4, edge_dim=3),
    "Transformer edges": lambda i: pyg.TransformerConv(i, 4, heads=4, edge_dim=3, beta=True),
    "GINE": lambda i: pyg.GINEConv(Sequential(Linear(i, 16), ReLU(), Linear(16, 16)), edge_dim=3),
    "NN": lambda i: pyg.NNConv(i, 16, Sequential(Linear(3, 8), ReLU(), Linear(8, 16 * i)), aggr="mean"),
    "NN of MLP": lambda i: pyg.NNConv(i, 16, pyg.MLP([3, 8, 16 * i], norm=None)),
    "PNA edges": lambda i: pyg.PNAConv(i, 16, ["mean", "min", "max", "std"], ["identity"], DEGREES, edge_dim=3),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("name", COLLECTIONS)
def test_graph_classifiers(kind, name):
    index, n, batch, _ = batch_of(name)
    x = torch.randn(n, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    model = compare(lambda: Classifier(kind), lambda m, x: m(x, index, batch), [x])
    assert len(fast_layers(model)) == 2


@pytest.mark.parametrize("kind", EDGE_LAYERS)
@pytest.mark.parametrize("name", [MOLECULES, "tu-enzymes"])
def test_graph_classifiers_with_edge_features(kind, name):
    """The same features both ways along an edge, as a bond or a distance has them; some nodes and edges without any."""
    index, n, batch, _ = batch_of(name)
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(n, 6, dtype=torch.float64, generator=generator)
    x[7] = 0
    low, high = index.sort(dim=0).values
    attr = torch.sin((low * 3.0 + high * 7.0).double().view(-1, 1) * torch.arange(1, 4))
    attr[low == 3] = 0
    model = compare(lambda: Classifier(kind), lambda m, x, attr: m(x, index, batch, attr), [x, attr])
    assert len(fast_layers(model)) == 2
