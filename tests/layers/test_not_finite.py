"""Numbers at their ends, through whole layers: scores of +-1e4, infinities and NaN go where stock sends them, in
results and gradients. A layer whose plan would send an infinity elsewhere runs as stock (AS_STOCK)."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch.nn import Identity, Linear, ReLU, Sequential

import stretto
from stretto import kernels
from stretto.layers import record_of

NODES, EDGES, IN, DIM = 20, 70, 6, 3
NAN, INF = float("nan"), float("inf")
PNA = (["mean", "min", "max", "std"], ["identity", "attenuation"], torch.tensor([1, 3, 8, 9]))

# name -> (layer, whether it takes edge attributes)
LAYERS: dict[str, tuple[Any, bool]] = {
    "GATConv": (lambda: pyg.GATConv(IN, 4, heads=2), False),
    "GATConv edges": (lambda: pyg.GATConv(IN, 4, heads=2, edge_dim=DIM), True),
    "GATConv wide": (lambda: pyg.GATConv(IN, 64, heads=2, add_self_loops=False), False),
    "GATConv averaged": (lambda: pyg.GATConv(IN, 64, heads=2, concat=False, add_self_loops=False), False),
    "GATv2Conv": (lambda: pyg.GATv2Conv(IN, 4, heads=2, edge_dim=DIM), True),
    "TransformerConv": (lambda: pyg.TransformerConv(IN, 4, heads=2), False),
    "TransformerConv edges": (lambda: pyg.TransformerConv(IN, 4, heads=2, edge_dim=DIM, root_weight=False), True),
    "AGNNConv": (lambda: pyg.AGNNConv(), False),
    "SuperGATConv": (lambda: pyg.SuperGATConv(IN, 4, heads=2), False),
    "SuperGATConv SD": (lambda: pyg.SuperGATConv(IN, 4, heads=2, attention_type="SD"), False),
    "GINEConv": (lambda: pyg.GINEConv(Linear(IN, 4), edge_dim=DIM), True),
    "ResGatedGraphConv": (lambda: pyg.ResGatedGraphConv(IN, 4), False),
    "ResGatedGraphConv edges": (lambda: pyg.ResGatedGraphConv(IN, 4, edge_dim=DIM), True),
    "CGConv": (lambda: pyg.CGConv(IN, DIM), True),
    "NNConv": (
        lambda: pyg.NNConv(IN, 4, Sequential(Linear(DIM, 8), ReLU(), Linear(8, 4 * IN)), root_weight=False),
        True,
    ),
    "GENConv": (lambda: pyg.GENConv(IN, IN, norm=None), False),
    "GENConv edges": (lambda: pyg.GENConv(IN, 4, edge_dim=DIM, norm=None), True),
    "PNAConv": (lambda: pyg.PNAConv(IN, 4, *PNA), False),
    "PNAConv edges": (lambda: pyg.PNAConv(IN, 4, *PNA, edge_dim=DIM), True),
    "EdgeConv": (lambda: pyg.EdgeConv(Linear(2 * IN, 4)), False),
    "EdgeConv sum": (lambda: pyg.EdgeConv(Linear(2 * IN, 4), aggr="sum"), False),
    "EdgeConv deep": (lambda: pyg.EdgeConv(Sequential(Linear(2 * IN, 8), ReLU(), Linear(8, 4))), False),
    "FiLMConv": (lambda: pyg.FiLMConv(IN, 4), False),
    "FiLMConv linear": (lambda: pyg.FiLMConv(IN, 4, act=None), False),
}


def _row(value: float) -> Any:
    return lambda x, attr: (x.index_fill(0, torch.tensor([3]), value), attr)


def _edge(value: float) -> Any:
    return lambda x, attr: (x, attr.index_fill(0, torch.tensor([5]), value))


def _entry(of: int, at: tuple[int, int], value: float) -> Any:
    """One number of x (of 0) or of the attributes (of 1)."""

    def change(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = [t.clone() for t in given]
        found[of][at] = value
        return tuple(found)

    return change


# name -> what becomes of x and of the edge attributes
CHANGES: dict[str, Any] = {
    "large x": lambda x, attr: (x * 1e4, attr),
    "NaN in x": _row(NAN),
    "+inf in x": _row(INF),
    "-inf in x": _row(-INF),
    "one +inf in x": _entry(0, (3, 2), INF),
    "one -inf in x": _entry(0, (5, 1), -INF),
    "large attributes": lambda x, attr: (x, attr * 1e4),
    "NaN in attributes": _edge(NAN),
    "-inf in attributes": _edge(-INF),
    "one +inf in attributes": _entry(1, (5, 1), INF),
    "one -inf in attributes": _entry(1, (8, 0), -INF),
}

# A sum or product of weights, or of gradients, would meet the infinity that stock meets with one after the other. These
# look for it in x and in the attributes, or in those alone.
AS_STOCK = {
    "GATConv edges": "attributes",
    "TransformerConv edges": "attributes",
    "ResGatedGraphConv": "both",
    "ResGatedGraphConv edges": "both",
    "CGConv": "both",
    "NNConv": "both",
    "PNAConv": "both",
    "PNAConv edges": "both",
    "EdgeConv": "both",
    "EdgeConv sum": "both",
    "EdgeConv deep": "both",
}

# What a layer's scores are proportional to.
SCORES = {
    "GATConv": ("att_src", "att_dst"),
    "GATConv edges": ("att_edge",),
    "GATConv wide": ("att_src",),
    "GATConv averaged": ("att_src", "att_dst"),
    "GATv2Conv": ("att",),
    "TransformerConv": ("lin_key.weight", "lin_key.bias"),
    "TransformerConv edges": ("lin_query.weight",),
    "AGNNConv": ("beta",),
    "SuperGATConv": ("att_l",),
}


@pytest.fixture(params=["native", "reference"])
def backend(request):
    with kernels.forced(kernels.REFERENCE) if request.param == "reference" else contextlib.nullcontext():
        yield


def inputs(takes_attr: bool, change: Any) -> list[torch.Tensor]:
    """Features, edges (three nodes receive none), attributes."""
    generator = torch.Generator().manual_seed(4)
    edges = torch.randint(NODES - 3, (2, EDGES), generator=generator)
    x = torch.randn(NODES, IN, generator=generator, dtype=torch.float64)
    attr = torch.randn(EDGES, DIM, generator=generator, dtype=torch.float64)
    x, attr = change(x, attr)
    return [x, edges, attr] if takes_attr else [x, edges]


def compare(
    stock: Any, given: list[torch.Tensor], *, gradients: bool = True, path: str = "fast", least: float = 1e-3
) -> None:
    """Results and gradients, NaN for NaN and infinity for infinity. least: their scale."""
    fast = stretto.accelerate(copy.deepcopy(stock))
    found = []
    for layer in (stock, fast):
        torch.manual_seed(2)
        leaves = [t.clone().requires_grad_() if t.is_floating_point() else t for t in given]
        out = layer(*leaves)
        values = [out.detach()]
        if gradients:
            wanted = [*(t for t in leaves if t.is_floating_point()), *layer.parameters()]
            values += torch.autograd.grad(out.sum(), wanted, allow_unused=True, materialize_grads=True)
        found.append(values)
    assert record_of(fast).path == path, record_of(fast).reason
    assert ("infinity" in record_of(fast).reason) == (path == "stock")
    for k, (theirs, ours) in enumerate(zip(*found, strict=True)):
        scale = float(theirs.nan_to_num(0, 0, 0).abs().max())
        torch.testing.assert_close(
            ours, theirs, rtol=1e-8, atol=1e-8 * max(scale, least), equal_nan=True, msg=lambda m, k=k: f"value {k}: {m}"
        )


def layer_of(name: str) -> Any:
    torch.manual_seed(0)
    layer = LAYERS[name][0]().double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def cases() -> Iterator[tuple[str, str]]:
    """Layers and what they may meet. Scores that grow with the inputs have a test of their own: there gradients are
    sums of large terms that cancel."""
    scored = {name.split()[0] for name in SCORES}
    for name, (_, takes_attr) in LAYERS.items():
        for change in CHANGES:
            if ("attributes" not in change or takes_attr) and not ("large" in change and name.split()[0] in scored):
                yield name, change


@pytest.mark.parametrize(("name", "change"), list(cases()))
def test_goes_where_stock_sends_it(name, change, backend):
    looked = AS_STOCK.get(name, "")
    path = "stock" if "inf" in change and (looked == "both" or (looked and looked in change)) else "fast"
    compare(layer_of(name), inputs(LAYERS[name][1], CHANGES[change]), path=path)


@pytest.mark.parametrize("name", SCORES)
def test_scores_of_ten_thousand(name, backend):
    layer = layer_of(name)
    scaled = [p for key, p in layer.named_parameters() if key in SCORES[name]]
    assert scaled
    with torch.no_grad():
        for parameter in scaled:
            parameter *= 1e4
    # Terms of 1e4 cancel in gradients that are 0, so that 1e-8 is twelve digits.
    compare(layer, inputs(LAYERS[name][1], lambda x, attr: (x, attr)), least=1.0)


@pytest.mark.parametrize("name", [n for n in LAYERS if n != "AGNNConv"])
def test_a_weight_that_is_nan_stays_out_of_isolated_nodes(name, backend):
    """Each parameter in turn: its first entry."""
    layer = layer_of(name)
    given = inputs(LAYERS[name][1], lambda x, attr: (x, attr))
    for parameter in layer.parameters():
        with torch.no_grad():
            kept = parameter.view(-1)[0].clone()
            parameter.view(-1)[0] = NAN
            compare(layer, given, gradients=False)
            parameter.view(-1)[0] = kept


@pytest.mark.parametrize("kind", ["GINEConv", "GENConv", "GENConv attributes"])
def test_relu_passes_nan_and_stops_nan(kind, backend):
    """Its slope is 1 at NaN, and where it is 0 not even a gradient of NaN passes."""
    edges = torch.tensor([[0, 1, 2], [1, 0, 0]])
    conv = pyg.GINEConv(Identity()) if kind == "GINEConv" else pyg.GENConv(2, 2, norm=None, aggr="softmax")
    stock = conv.double()
    attr = None if kind == "GENConv" else torch.zeros(3, 2, dtype=torch.float64)
    for x, up in (
        (torch.tensor([[NAN, 1.0], [1.0, -1.0], [-2.0, 3.0]]).double(), 1.0),
        (torch.tensor([[-1.0, 1.0], [1.0, -1.0], [-2.0, 3.0]]).double(), NAN),
    ):
        found = []
        for layer in (stock, stretto.accelerate(copy.deepcopy(stock))):
            leaves = [t.clone().requires_grad_() for t in ((x,) if attr is None else (x, attr))]
            out = layer(leaves[0], edges, *leaves[1:])
            found.append(torch.autograd.grad(out, leaves, torch.full_like(out, up)))
        for theirs, ours in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, equal_nan=True)
