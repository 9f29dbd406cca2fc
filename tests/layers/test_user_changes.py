"""What users do to a layer between its construction, forward and backward: gradients added up over several passes,
attributes and parameters changed, hooks, other types. The accelerated layer computes what stock does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

import stretto
from stretto.layers import record_of
from stretto.layers.edges import streaming
from tests.graphs import random_edges, symmetric_edges
from tests.layers.inputs import flat
from tests.layers.options import SPECS
from tests.layers.spec import DIM, IN, OUT, sequential
from tests.layers.test_convs import data_for, pair_of

EVERY = pytest.mark.parametrize("conv", SPECS, ids=lambda c: c.__name__)
EDGES = random_edges(12, 12, 50, 6)


def total(found: Any) -> Tensor:
    """A number that depends on every value of a layer's results, each with a factor of its own."""
    parts = [r for r in flat(found) if r.is_floating_point()]
    return sum(((r * torch.arange(r.numel(), dtype=r.dtype).view(r.shape).cos()).sum() for r in parts), torch.zeros(()))


def features(rows: int = 12, width: int = IN, seed: int = 0, *, learns: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator, dtype=torch.float64).requires_grad_(learns)


def pair(layer: nn.Module) -> list[Any]:
    """The layer as stock, and an accelerated copy."""
    layer = layer.double()
    return [layer, stretto.accelerate(copy.deepcopy(layer))]


def same(mine: Any, theirs: Any, what: str = "") -> None:
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert (a is None) == (b is None), what
        if b is not None:
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8 * max(float(b.detach().abs().max()), 1e-3), msg=what)


def gradients(layer: Any, *leaves: Tensor) -> list[Tensor | None]:
    return [t.grad for t in (*leaves, *layer.parameters())]


@EVERY
def test_gradients_add_up(conv):
    """Over two passes backward, in place: no two parameters have one memory for their gradients."""
    spec = SPECS[conv]
    for options in spec.options:
        data, found = data_for(spec, options, "unsorted", spec.takes[0]), []
        for layer in pair_of(spec, options):
            torch.manual_seed(2)
            try:
                loss = total(layer(*data.args, **data.kwargs))
            except AttributeError:  # GMMConv without root weights, in stock too
                continue
            if loss.requires_grad:
                loss.backward(retain_graph=True)
                loss.backward()
            found.append(gradients(layer))
        if found:
            same(found[1], found[0], f"{options}")


def test_a_flag_switched_off_does_not_drop_what_stock_keeps():
    """cached=False after a call with cached=True: stock goes on with what it has."""
    for make in (
        lambda: pyg.GCNConv(IN, OUT, cached=True),
        lambda: pyg.SGConv(IN, OUT, cached=True),
        lambda: pyg.SSGConv(IN, OUT, alpha=0.2, cached=True),
        lambda: pyg.APPNP(K=2, alpha=0.1, cached=True),
    ):
        x, found = features(learns=False), []
        for layer in pair(make()):
            layer(x, EDGES)
            layer.cached = False
            found.append(layer(x, EDGES.flip(0)))
        same(found[1:], found[:1], type(layer).__name__)


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (lambda: pyg.TAGConv(IN, OUT), "K", 1),  # stock counts its weights
        (lambda: pyg.TAGConv(IN, OUT, K=1), "K", 3),
        (lambda: pyg.HypergraphConv(IN, OUT), "flow", "target_to_source"),
        (lambda: pyg.GATConv(IN, OUT), "bias", nn.Parameter(torch.tensor([0.7], dtype=torch.float64))),
        (lambda: pyg.GATv2Conv(IN, OUT, heads=2), "bias", nn.Parameter(torch.tensor([0.7], dtype=torch.float64))),
    ],
    ids=["TAGConv-fewer", "TAGConv-more", "HypergraphConv", "GATConv", "GATv2Conv"],
)
def test_attributes_may_change(make, name, value):
    found = []
    for layer in pair(make()):
        setattr(layer, name, copy.deepcopy(value))
        x = features()
        out = layer(x, EDGES)
        total(out).backward()
        found.append([out, *gradients(layer, x)])
    same(found[1], found[0])


class Twice(Tensor):
    """A weight that computes by itself, as quantised ones do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        return 2 * out if func is nn.functional.linear else out


def of_another_class(linear: Any) -> None:
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Twice))


def no_parameter(linear: Any) -> None:
    made = linear.weight * 2
    del linear.weight
    linear.weight = made


@pytest.mark.parametrize("change", [of_another_class, no_parameter])
@EVERY
def test_weights_inside_may_be_others(conv, change, monkeypatch):
    monkeypatch.setattr(streaming, "LARGE", 0)
    spec = SPECS[conv]
    for options in spec.options[:3]:
        data, found = data_for(spec, options, "unsorted", spec.takes[0]), []
        for layer in pair_of(spec, options):
            learned = list(layer.parameters())
            for module in layer.modules():
                if isinstance(module, (nn.Linear, pyg.Linear)):
                    change(module)
            torch.manual_seed(2)
            out = layer(*data.args, **data.kwargs)
            loss = total(out)
            if loss.requires_grad:
                loss.backward()
            found.append([t.detach().as_subclass(Tensor) for t in flat(out)])
            found[-1] += [p.grad for p in learned if change is no_parameter and p.grad is not None]
        same(found[1], found[0], f"{options}")


def test_a_hook_on_all_modules_sees_those_inside():
    def double(module: Any, args: Any, out: Any) -> Any:
        return 2 * out if isinstance(module, (nn.Linear, pyg.Linear)) else None

    layers, x = pair(pyg.SAGEConv(IN, OUT)), features()
    handle = nn.modules.module.register_module_forward_hook(double)
    try:
        same([layers[1](x, EDGES)], [layers[0](x, EDGES)])
        assert record_of(layers[1]).reason == "a hook on all modules is registered"
    finally:
        handle.remove()
    layers[1](x, EDGES)
    assert record_of(layers[1]).path == "fast"


def test_a_hook_on_what_a_list_of_aggregations_calls():
    found = []
    for layer in pair(pyg.GENConv(IN, OUT, aggr=["mean", "max"])):
        layer.aggr_module.fused_aggr.register_forward_hook(lambda module, args, out: [2 * part for part in out])
        found.append(layer(features(), EDGES))
    same(found[1:], found[:1])


# ---- between forward and backward, where messages are made again ----

IN_BLOCKS = {
    "GENConv": lambda: pyg.GENConv(IN, OUT, edge_dim=DIM),
    "GATv2Conv": lambda: pyg.GATv2Conv(IN, OUT, edge_dim=DIM, add_self_loops=False),
    "GINEConv": lambda: pyg.GINEConv(sequential(), edge_dim=DIM),
    "NNConv": lambda: pyg.NNConv(IN, OUT, sequential(DIM, IN * OUT)),
}


def frozen(layer: Any) -> None:
    layer.requires_grad_(False)


def other_numbers(layer: Any) -> None:
    for name in ("eps", "negative_slope"):
        if isinstance(getattr(layer, name, None), float):
            setattr(layer, name, 0.7)


@pytest.mark.parametrize("change", [frozen, other_numbers])
@pytest.mark.parametrize("make", IN_BLOCKS.values(), ids=IN_BLOCKS)
def test_changes_before_backward_come_too_late(make, change, monkeypatch):
    monkeypatch.setattr(streaming, "LARGE", 0)
    monkeypatch.setattr(streaming, "BLOCK", 7)
    found = []
    for layer in pair(make()):
        x, attr = features(), features(50, DIM, 5)
        out = layer(x, EDGES, attr)
        change(layer)
        total(out).backward()
        found.append([out, *gradients(layer, x, attr)])
    same(found[1], found[0])


@pytest.mark.parametrize("name", ["GENConv", "GATv2Conv", "GINEConv"])
def test_functional_call_in_blocks(name, monkeypatch):
    """By the time of backward the layer has its own parameters again."""
    monkeypatch.setattr(streaming, "LARGE", 0)
    monkeypatch.setattr(streaming, "BLOCK", 7)
    found = []
    for layer in pair(IN_BLOCKS[name]()):
        given = {key: (0.5 * p.detach() + 0.2).requires_grad_() for key, p in layer.named_parameters()}
        x, attr = features(), features(50, DIM, 5)
        out = torch.func.functional_call(layer, given, (x, EDGES, attr))
        total(out).backward()
        found.append([out, *gradients(layer, x, attr), *(p.grad for p in given.values())])
    same(found[1], found[0])


@pytest.mark.parametrize("make", IN_BLOCKS.values(), ids=IN_BLOCKS)
def test_hooks_of_parameters_are_called_once(make, monkeypatch):
    monkeypatch.setattr(streaming, "LARGE", 0)
    monkeypatch.setattr(streaming, "BLOCK", 7)
    found = []
    for layer in pair(make()):
        calls: list[int] = []
        for parameter in layer.parameters():
            parameter.register_hook(lambda grad, calls=calls: (calls.append(1), 0.1 * grad)[1])
        x, attr = features(), features(50, DIM, 5)
        for _ in range(2):
            total(layer(x, EDGES, attr)).backward()
        found.append([torch.tensor(float(len(calls))), *gradients(layer, x, attr)])
    same(found[1], found[0])


def test_autocast_around_backward_alone():
    for make in (lambda: pyg.SAGEConv(IN, OUT), lambda: pyg.TAGConv(IN, OUT), lambda: pyg.ChebConv(IN, OUT, 3)):
        found = []
        for layer in pair(make()):
            layer.float()
            x = features().detach().float().requires_grad_()
            out = layer(x, EDGES)
            with torch.autocast("cpu", torch.bfloat16):
                total(out).backward()
            found.append(gradients(layer, x))
        for mine, theirs in zip(found[1], found[0], strict=True):
            assert mine.dtype == theirs.dtype
            torch.testing.assert_close(mine, theirs, rtol=2**-6, atol=2**-6 * float(theirs.abs().max()))


def test_features_met_in_inference_mode_first():
    """What an evaluation keeps of constant features, training saves for backward."""
    edges, found = symmetric_edges(40, 400, 3), []
    attr = features(edges.size(1), DIM, 5, learns=False)
    for layer in pair(pyg.GINEConv(sequential(norm=True), edge_dim=DIM)):
        x = features(40)
        with torch.inference_mode():
            layer(x, edges, attr), layer(x, edges, attr), layer(x, edges, attr)
        total(layer(x, edges, attr)).backward()
        found.append(gradients(layer, x))
    same(found[1], found[0])
