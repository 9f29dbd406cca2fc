"""explain(): every plan of a layer, one of them chosen, with the kernels that run it and the memory it avoids."""

import json

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv

import stretto
from stretto.layers import CONVS, gat
from stretto.ops.variants import VARIANTS
from stretto.plug import messages
from stretto.plug.explain import explain
from tests.layers.options import SPECS
from tests.layers.test_convs import data_for

NODES, EDGES, WIDE, NARROW = 2000, 20000, 64, 16


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = GCNConv(WIDE, NARROW), GATConv(NARROW, 4), GATv2Conv(4, 4)

    def forward(self, x, edge_index):
        return self.third(self.second(self.first(x, edge_index).relu(), edge_index), edge_index)


@pytest.fixture
def explained(monkeypatch, tmp_path):
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path))
    torch.manual_seed(0)
    edge_index = torch.randint(NODES, (2, EDGES))
    x = torch.randn(NODES, WIDE, requires_grad=True)  # not constant: nothing is hoisted, every order stays open
    net = stretto.accelerate(Net())
    for _ in range(40):  # plans and kernels are tried in the first steps
        net(x, edge_index).sum().backward()
    return explain(net, x, edge_index)


def test_every_plan_is_told_and_one_is_chosen(explained):
    first, second, third = explained.layers
    assert first.conv == "GCNConv"
    assert sum(candidate.chosen for candidate in first.candidates) == 1
    assert {width for c in first.candidates for width in c.spmm_widths} == {WIDE, NARROW}
    assert all(candidate.predicted_ms > 0 for candidate in first.candidates)
    assert first.avoided_bytes >= EDGES * NARROW * 4
    assert {c.plan for c in second.candidates} == {gat.REUSE, gat.FOLDED}
    assert [c.plan for c in second.candidates if c.chosen] == [gat.REUSE]
    assert not any(c.kernels for c in second.candidates)  # attention is a kernel of its own
    (only,) = third.candidates  # it has one way to run
    assert only.chosen
    assert only.plan.startswith("alpha (X W')")
    assert only.predicted_ms is None
    assert only.measured_ms == third.forward_ms > 0


def test_the_chosen_plan_names_its_kernels(explained):
    names = {variant.name for variant in VARIANTS["spmm"]["cpu"]}
    chosen = next(c for c in explained.layers[0].candidates if c.chosen)
    if stretto.kernels.name_of(torch.device("cpu")) == "reference":
        pytest.skip("without the native library there is one kernel")
    assert chosen.kernels
    assert set(chosen.kernels) <= names
    assert all(not c.kernels for c in explained.layers[0].candidates if not c.chosen)


def test_as_text_and_as_json(explained):
    text = str(explained)
    assert "messages never built" in text
    assert "->" in text
    assert explained.to_dict() == json.loads(explained.to_json())
    layers = explained.to_dict()["layers"]
    assert [layer["layer"] for layer in layers] == ["first", "second", "third"]
    assert layers[0]["backend"] == explained.layers[0].backend != ""


def test_attention_tells_what_it_does_not_build():
    conv = stretto.accelerate(GATConv(8, 16, heads=2))
    told = stretto.explain(conv, torch.randn(50, 8), torch.randint(0, 50, (2, 900)))
    (layer,) = told.layers
    assert layer.avoided_bytes >= 850 * 32 * 4
    assert layer.backend
    assert "never built" in str(told)


IN, OUT, E = 8, 16, 900


def edges():
    return torch.randint(0, 50, (2, E), generator=torch.Generator().manual_seed(0))


DEGREES = torch.tensor([0, 3, 5, 9])
NETWORK = torch.nn.Sequential
# how the layer is made, what stands behind edge_index, the width of stock's messages
LAYERS = {
    "GCN": (lambda: pyg.GCNConv(IN, OUT), (), OUT),
    "SAGE": (lambda: pyg.SAGEConv(IN, OUT), (), IN),
    "APPNP": (lambda: pyg.APPNP(3, 0.1), (), IN),
    "SSG": (lambda: pyg.SSGConv(IN, OUT, 0.1, K=2), (), IN),
    "SGC": (lambda: pyg.SGConv(IN, OUT, K=2), (), IN),
    "RGCN": (lambda: pyg.RGCNConv(IN, OUT, 3), (torch.arange(E) % 3,), IN),
    "EdgeConv": (lambda: pyg.EdgeConv(torch.nn.Linear(2 * IN, OUT)), (), OUT),
    "PNA": (lambda: pyg.PNAConv(IN, OUT, ["mean", "max"], ["identity"], DEGREES), (), IN),
    "SuperGAT": (lambda: pyg.SuperGATConv(IN, OUT, heads=2), (), 2 * OUT),
    "ResGated": (lambda: pyg.ResGatedGraphConv(IN, OUT), (), OUT),
    "CGConv": (lambda: pyg.CGConv(IN), (), IN),
    "ResGated, built": (lambda: pyg.ResGatedGraphConv(IN, OUT, act=torch.nn.Tanh()), (), 0),
    "EdgeConv, built": (
        lambda: pyg.EdgeConv(NETWORK(torch.nn.Linear(2 * IN, OUT), torch.nn.ReLU(), torch.nn.Linear(OUT, OUT))),
        (),
        0,
    ),
}


class Edges(pyg.MessagePassing):
    """Computes a weight on every edge, then propagates: a product by that weight."""

    def forward(self, x, edge_index):
        w = self.edge_updater(edge_index, x=x)
        return self.propagate(edge_index, x=x, w=w)

    def edge_update(self, x_i, x_j):
        return (x_i * x_j).sum(-1, keepdim=True)

    def message(self, x_j, w):
        return w * x_j


class Updated(Edges):
    def update(self, out):
        return out + 1


class Aggregated(Edges):
    def aggregate(self, inputs, index, dim_size):
        return super().aggregate(inputs, index, dim_size=dim_size) + 1


def test_what_runs_on_edges_before_the_product_is_told():
    x = torch.randn(50, IN)
    for kind, path in ((Edges, "fast"), (Updated, "fast"), (Aggregated, "stock")):
        conv = stretto.accelerate(kind())
        torch.testing.assert_close(conv(x, edges()), kind()(x, edges()))
        (row,) = stretto.report(conv).rows
        assert row.path == path
        assert "edge_updater() runs as stock: edge_update() is its own" in row.reason
    gat = stretto.accelerate(pyg.GATConv(IN, OUT))  # whose edge_update() is part of our kernel
    gat(x, edges())
    (row,) = stretto.report(gat).rows
    assert (row.path, row.reason) == ("fast", "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_tells_plan_time_and_bytes(name, dtype):
    make, behind, width = LAYERS[name]
    conv = stretto.accelerate(make().to(dtype))
    before = {kind: kind.forward for kind in type(conv).__mro__[:-1] if hasattr(kind, "forward")}
    (layer,) = stretto.explain(conv, torch.randn(50, IN, dtype=dtype), edges(), *behind).layers
    assert sum(c.chosen for c in layer.candidates) == 1
    assert all(c.plan for c in layer.candidates)
    assert layer.forward_ms > 0
    assert layer.avoided_bytes == E * width * dtype.itemsize
    assert {kind: kind.forward for kind in before} == before
    assert "forward" not in conv.__dict__


def test_arguments_by_name_count_like_those_by_place():
    conv = stretto.accelerate(pyg.SAGEConv(IN, OUT).double())
    x = torch.randn(50, IN, dtype=torch.float64)
    by_place = stretto.explain(conv, x.clone(), edges())  # the same object again would be a constant: other plans
    by_name = stretto.explain(conv, x=x.clone(), edge_index=edges())
    assert by_place.layers[0].avoided_bytes == by_name.layers[0].avoided_bytes == E * IN * 8
    kept = [[c.kept_bytes for c in told.layers[0].candidates] for told in (by_place, by_name)]
    assert kept[0] == kept[1]


def test_relations_side_by_side_are_told():
    kinds = [("a", "to", "b"), ("b", "to", "b")]
    conv = stretto.accelerate(pyg.HeteroConv({kind: pyg.SAGEConv((IN, IN), OUT) for kind in kinds}))
    x = {"a": torch.randn(50, IN), "b": torch.randn(50, IN)}
    told = stretto.explain(conv, x, dict.fromkeys(kinds, edges()))
    whole, *inner = told.layers
    assert (whole.conv, whole.candidates[0].plan) == ("HeteroConv", "2 of 2 relations side by side")
    assert whole.avoided_bytes == 2 * E * IN * 4
    assert whole.forward_ms > 0
    assert [layer.forward_ms for layer in inner] == [None, None]  # they ran inside of it
    assert all(layer.candidates[0].plan.startswith("side by side") for layer in inner)


def test_a_layer_of_a_users_own_is_told():
    class Own(pyg.MessagePassing):
        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

        def message(self, x_j):
            return x_j

    conv = stretto.accelerate(Own())
    (layer,) = stretto.explain(conv, torch.randn(50, IN), edges()).layers
    assert layer.candidates[0].plan == "sum(A, X)"
    assert layer.avoided_bytes == E * IN * 4


def test_a_layer_that_runs_as_stock_has_a_reason_and_no_plan():
    conv = stretto.accelerate(pyg.SAGEConv(IN, OUT, aggr="median"))
    (layer,) = stretto.explain(conv, torch.randn(50, IN), edges()).layers
    assert (layer.candidates, layer.avoided_bytes, layer.reason) == ([], 0, "aggr is median")


def test_a_plan_nobody_decided_on_is_not_hidden_by_an_earlier_decision():
    conv = stretto.accelerate(pyg.SAGEConv(IN, OUT))
    x, edge_index = torch.randn(50, IN), edges()
    stretto.explain(conv, x, edge_index)
    conv.aggr = "max"
    conv.aggr_module = pyg.MaxAggregation()
    (layer,) = stretto.explain(conv, x, edge_index).layers
    assert [c.plan for c in layer.candidates] == ["(max A X) W' + X V'"]


def test_a_compiled_model_is_run_as_it_is():
    conv = stretto.accelerate(pyg.SAGEConv(IN, OUT))
    torch._dynamo.reset()
    (layer,) = stretto.explain(torch.compile(conv, backend="eager"), torch.randn(50, IN), edges()).layers
    assert (layer.how, layer.forward_ms) == ("compiled", None)


@pytest.mark.parametrize(
    "kind", [kind for kind, layer in CONVS.items() if layer.message], ids=lambda kind: kind.__name__
)
def test_the_width_of_stocks_messages(kind):
    spec = SPECS[kind]
    conv, seen = spec.make(**dict(spec.options[0])).double(), []
    data = data_for(spec, spec.options[0], "unsorted", spec.takes[0])
    conv.register_message_forward_hook(lambda layer, inputs, out: seen.append((inputs[0].get("x_j"), out)))
    out = conv(*data.args)
    made = seen[-1][0] if kind is pyg.GMMConv else seen[-1][1]  # its x_j holds every kernel, its message their sum
    x = next(t for t in messages._tensors(data.args) if t.is_floating_point())
    wide = next(messages._tensors(out)).size(-1)
    assert CONVS[kind].message(conv, x.size(-1), wide) == made.numel() // made.size(conv.node_dim)
