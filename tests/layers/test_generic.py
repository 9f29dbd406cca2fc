"""Layers stretto does not know, a user's own included: a product where message() is x_j or w * x_j, else stock."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric.nn import MessagePassing

import stretto
from stretto.layers import record_of
from stretto.layers.edges import product, tracing
from stretto.plug import generic
from tests.graphs import ZOO

FACTOR = 2.0
ROOT = Path(__file__).resolve().parent.parent.parent


class Copy(MessagePassing):
    def forward(self, x, edge_index, size=None):
        return self.propagate(edge_index, x=x, size=size)


class Weighted(MessagePassing):
    def forward(self, x, edge_index, w=None):
        return self.propagate(edge_index, x=x, w=w)

    def message(self, x_j, w):
        return x_j if w is None else w.view(-1, 1) * x_j


class Column(Weighted):
    def message(self, x_j, w):
        return x_j * w.unsqueeze(-1)


class Sliced(Weighted):
    def message(self, x_j, w):
        return w[:, None] * x_j


class AsItIs(Weighted):
    def message(self, x_j, w):
        return x_j * w


class Learned(MessagePassing):
    """With a forward of its own around the product."""

    def __init__(self, i=5, o=4, **kwargs):
        super().__init__(**kwargs)
        self.lin = torch.nn.Linear(i, o)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, h=self.lin(x).tanh()) + 1

    def message(self, h_j):
        return h_j


class ReadsSelf(Weighted):
    def message(self, x_j, w):
        return x_j * w.view(-1, 1) if self.training else x_j


class ReadsGlobal(Weighted):
    def message(self, x_j, w):
        return x_j * FACTOR


class Nonlinear(Weighted):
    def message(self, x_j, w):
        return (w.view(-1, 1) * x_j).relu()


class TwoEnds(Weighted):
    def message(self, x_i, x_j):
        return x_j


class TakesIndex(Weighted):
    def message(self, x_j, index):
        return x_j


class Branches(Weighted):
    def message(self, x_j, w):
        if w.sum() > 0:
            return x_j
        return w.view(-1, 1) * x_j


class OwnAggregate(Copy):
    def aggregate(self, inputs, index):
        return inputs


class Calls(Weighted):
    def message(self, x_j, w):
        return super().message(x_j, w)


def values(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def both(make, call, leaves):
    """Results and gradients of stock and of the accelerated copy, and the latter."""
    found = []
    torch.manual_seed(0)
    stock = make().double()
    fast = stretto.accelerate(copy.deepcopy(stock))
    for layer in (stock, fast):
        fresh = [t.clone().requires_grad_() for t in leaves]
        out = call(layer, *fresh)
        flow = values(*out.shape, seed=9)
        wanted = [*fresh, *layer.parameters()]
        grads = torch.autograd.grad((out * flow).sum(), wanted, allow_unused=True, materialize_grads=True)
        found.append([out.detach(), *grads])
    for got, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, theirs, rtol=1e-9, atol=1e-12)
    return fast


GRAPHS = ("unsorted", "isolated", "self_loops", "duplicates", "directed", "empty", "one_node", "one_loop", "hub")


@pytest.mark.parametrize("aggr", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_products_equal_stock(aggr, flow):
    options = {"aggr": aggr, "flow": flow}
    for name in GRAPHS:
        index, (n, _) = ZOO[name]()
        x, w = values(n, 5), values(index.size(1), seed=1)
        layers = [
            both(lambda: Copy(**options), lambda c, x, i=index: c(x, i), [x]),
            both(lambda: Learned(**options), lambda c, x, i=index: c(x, i), [x]),
            both(lambda: Weighted(**options), lambda c, x, i=index: c(x, i), [x]),
        ]
        for kind in (Weighted, Column, Sliced):
            layers.append(both(lambda k=kind: k(**options), lambda c, x, w, i=index: c(x, i, w), [x, w]))
        layers.append(both(lambda: AsItIs(**options), lambda c, x, w, i=index: c(x, i, w), [x, w.view(-1, 1)]))
        for layer in layers:
            assert record_of(layer).path == "fast", record_of(layer).reason


def test_a_filter_per_edge_and_channel():
    index, (n, _) = ZOO["unsorted"]()
    w = values(index.size(1), 5, seed=1)
    for aggr, path in (("sum", "fast"), ("mean", "fast"), ("max", "stock")):
        fast = both(lambda a=aggr: AsItIs(aggr=a), lambda c, x, w: c(x, index, w), [values(n, 5), w])
        assert record_of(fast).path == path


def test_broadcast_weights_run_as_stock():
    index, (n, _) = ZOO["unsorted"]()
    for w in (values(5), values(1, 5), values(1, 1), values(())):
        fast = both(AsItIs, lambda c, x, w: c(x, index, w), [values(n, 5), w])
        assert record_of(fast).path == "stock"


def test_two_sets_of_nodes():
    for name in ("wide", "tall"):
        index, size = ZOO[name]()
        for pair in (lambda a, b: (a, b), lambda a, b: (a, None)):
            call = lambda c, a, b, i=index, p=pair, s=size: c(p(a, b), i, s)  # noqa: E731
            fast = both(Copy, call, [values(size[0], 5), values(size[1], 5, seed=2)])
            assert record_of(fast).path == "fast"
    index, (n, _) = ZOO["unsorted"]()
    for flow, path in (("source_to_target", "fast"), ("target_to_source", "stock")):
        fast = both(lambda f=flow: Copy(flow=f), lambda c, a, b: c((a, b), index), [values(n, 5), values(n, 5, seed=2)])
        assert record_of(fast).path == path


DECLINED = {
    ReadsSelf: "reads self",
    ReadsGlobal: "more than its arguments",
    Calls: "not a plain function",
    OwnAggregate: "its own",
}


@pytest.mark.parametrize("kind", DECLINED, ids=lambda k: k.__name__)
def test_what_is_not_a_product_keeps_its_class(kind):
    layer = kind()
    assert DECLINED[kind] in (generic.why_not(kind) or "")
    stretto.accelerate(layer)
    assert type(layer) is kind
    with pytest.raises(stretto.StrettoError, match=kind.__name__):
        stretto.accelerate(kind(), strict=True)


@pytest.mark.parametrize("kind", [Nonlinear, TwoEnds, TakesIndex, Branches], ids=lambda k: k.__name__)
def test_what_the_trace_does_not_show_runs_as_stock(kind):
    index, (n, _) = ZOO["unsorted"]()
    w = values(index.size(1), seed=1)
    fast = both(kind, lambda c, x, w: c(x, index, w), [values(n, 5), w])
    assert record_of(fast).path == "stock"
    assert record_of(fast).reason


def test_inputs_that_decline():
    index, (n, _) = ZOO["unsorted"]()
    x = values(n, 5)
    adj = torch.sparse_coo_tensor(index.flip(0), torch.ones(index.size(1)).double(), (n, n)).coalesce()
    layer = stretto.accelerate(Copy())
    for call in (lambda: layer(values(2, n, 5), index), lambda: layer(x, adj)):
        call()
        assert record_of(layer).path == "stock"
    half = stretto.accelerate(Weighted())
    half(x, index, torch.ones(index.size(1)))  # float weights, double features
    assert record_of(half).path == "stock"
    with pytest.raises(IndexError, match="larger"):
        layer(x, index + n)
    with pytest.raises(ValueError, match="size"):
        layer(x, index, (n + 1, n))


def test_hooks_and_explainers_see_messages():
    index, (n, _) = ZOO["unsorted"]()
    layer = stretto.accelerate(Copy())
    seen = []
    handle = layer.register_message_forward_hook(lambda *args: seen.append(1))
    layer(values(n, 5), index)
    assert seen == [1]
    assert record_of(layer).path == "stock"
    handle.remove()
    layer(values(n, 5), index)
    assert record_of(layer).path == "fast"


def test_copies_pickles_and_restores():
    index, (n, _) = ZOO["unsorted"]()
    x = values(n, 5)
    layer = Learned().double()
    wanted = layer(x, index)
    before = dict(vars(Learned))
    stretto.accelerate(layer)
    assert isinstance(layer, Learned)
    assert repr(layer) == repr(Learned())
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    twins = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(buffer, weights_only=False)]
    kind = type(layer)
    for twin in (layer, *twins):
        torch.testing.assert_close(twin(x, index), wanted)
        assert record_of(twin).path == "fast"
        assert type(twin) is kind
        assert type(stretto.restore(twin)) is Learned
        torch.testing.assert_close(twin(x, index), wanted)
    assert dict(vars(Learned)) == before


def test_patch_reaches_classes_made_before_and_after():
    index, (n, _) = ZOO["unsorted"]()
    x = values(n, 5)
    old = Copy()
    wanted = old(x, index)
    before = (Copy.__dict__["propagate"], MessagePassing.__dict__["_set_jittable_templates"])
    stretto.patch()
    try:

        class Later(Copy):
            pass

        for layer in (old, Copy(), Later()):
            torch.testing.assert_close(layer(x, index), wanted)
            assert record_of(layer).path == "fast"
            assert stretto.report(layer).rows[0].path == "fast"
        generated = Later.__dict__["_jinja_propagate"]
    finally:
        stretto.unpatch()
    assert (Copy.__dict__["propagate"], MessagePassing.__dict__["_set_jittable_templates"]) == before
    assert Later.__dict__["propagate"] is generated
    torch.testing.assert_close(Later()(x, index), wanted)


def test_layers_of_pyg_without_an_entry():
    index, (n, _) = ZOO["unsorted"]()
    x = values(n, 5)
    for make in (pyg.SimpleConv, lambda: pyg.GatedGraphConv(6, 2), lambda: pyg.SignedConv(5, 4, first_aggr=True)):
        call = lambda c, x: c(x, index, index) if isinstance(c, pyg.SignedConv) else c(x, index)  # noqa: E731
        fast = both(make, call, [x])
        assert record_of(fast).path == "fast", (make, record_of(fast).reason)


def test_shadow_mode(monkeypatch):
    index, (n, _) = ZOO["unsorted"]()
    monkeypatch.setenv("STRETTO_SHADOW", "1")
    layer = stretto.accelerate(Copy())
    layer(values(n, 5), index)
    assert record_of(layer).path == "fast"
    monkeypatch.setattr(product, "spmm", lambda graph, x, *rest, **options: x * 0)
    torch.testing.assert_close(layer(values(n, 5), index), Copy()(values(n, 5), index))
    assert "shadow" in record_of(layer).reason


def test_the_trace_reads_what_is_written():
    found = tracing.message_of(Weighted.message, ("x_j", "w"), frozenset())
    assert found == tracing.Message("x_j", "w", "view")
    assert tracing.message_of(Weighted.message, ("x_j", "w"), frozenset({"w"})) == tracing.Message("x_j")
    assert isinstance(tracing.message_of(Branches.message, ("x_j", "w"), frozenset()), str)


def test_a_pickled_layer_is_fast_again_in_a_new_process(tmp_path):
    """PyG has not yet written propagate() of the user's class there."""
    (tmp_path / "mine.py").write_text(
        "from torch_geometric.nn import MessagePassing\n"
        "class Mine(MessagePassing):\n"
        "    def __init__(self):\n"
        "        super().__init__(aggr='add')\n"
        "    def forward(self, x, edge_index, w):\n"
        "        return self.propagate(edge_index, x=x, w=w)\n"
        "    def message(self, x_j, w):\n"
        "        return w.view(-1, 1) * x_j\n"
    )
    save = (
        "import torch, stretto, mine\n"
        "layer = stretto.accelerate(mine.Mine())\n"
        "args = torch.randn(9, 4), torch.randint(9, (2, 30)), torch.rand(30)\n"
        "torch.save((layer, args, layer(*args)), 'layer.pt')\n"
    )
    load = (
        "import copy, torch, stretto, mine\n"
        "layer, args, wanted = torch.load('layer.pt', weights_only=False)\n"
        "for one in (layer, copy.deepcopy(layer)):\n"
        "    torch.testing.assert_close(one(*args), wanted)\n"
        "    assert isinstance(one, mine.Mine) and repr(one) == 'Mine()'\n"
        "print(stretto.report(layer).rows[0].path, type(stretto.restore(layer)) is mine.Mine)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    for script in (save, load):
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["fast", "True"]
