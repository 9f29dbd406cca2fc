"""What a copy, a pickle, an explainer, to_hetero or TorchScript leaves on classes reaches no other model."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric.explain import Explainer, GNNExplainer

import stretto
from stretto.layers import record_of
from stretto.plug.classes import FAST
from tests.graphs import random_edges

N, IN = 30, 16
EDGES = random_edges(N, N, 140, 5)


class Own(pyg.MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j


class Net(torch.nn.Module):
    """Layers of all kinds: with updated edges, of a user's own, with and without self-loops."""

    def __init__(self):
        super().__init__()
        self.first, self.own = pyg.GCNConv(IN, 8), Own()
        self.second, self.last = pyg.GATv2Conv(8, 8), pyg.SAGEConv(8, 2)

    def forward(self, x, edge_index):
        x = self.own(self.first(x, edge_index).relu(), edge_index)
        return self.last(self.second(x, edge_index).relu(), edge_index)


def explained(model: Any, x: torch.Tensor) -> torch.Tensor:
    """The mask of edges that GNNExplainer finds."""
    torch.manual_seed(1)
    options = {"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"}
    explainer = Explainer(
        model,
        GNNExplainer(epochs=8),
        explanation_type="model",
        edge_mask_type="object",
        node_mask_type="attributes",
        model_config=options,
    )
    mask = explainer(x, EDGES, index=3).edge_mask
    assert mask is not None
    return mask


# ---- what others do to other models of the same classes ----


def others() -> list[Any]:
    return [pyg.GCN(IN, 8, 2), Net()]


def pickled(model: Any) -> None:
    pickle.loads(pickle.dumps(model))


def saved(model: Any) -> None:
    file = io.BytesIO()
    torch.save(model, file)
    torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def explains(model: Any) -> None:
    explained(model, torch.randn(N, IN))


class Relational(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = stretto.accelerate(pyg.SAGEConv((IN, IN), 8))

    def forward(self, x, edge_index):
        return self.conv(x, edge_index)


def hetero(model: Any) -> None:
    kinds = (["a", "b"], [("a", "to", "b"), ("b", "to", "a"), ("a", "to", "a"), ("b", "to", "b")])
    copy.deepcopy(stretto.accelerate(pyg.to_hetero(Relational(), kinds)))


def traced(model: Any) -> None:
    torch.jit.trace(model, (torch.randn(N, IN), EDGES))


def scripted(model: Any) -> None:
    torch.jit.script(pyg.GCNConv(IN, 8) if isinstance(model, Net) else model)


def constructed(model: Any) -> None:
    for layer in model.modules():
        if isinstance(layer, pyg.SAGEConv):
            type(layer)(IN, 8)


def restored(model: Any) -> None:
    copy.deepcopy(stretto.restore(copy.deepcopy(model)))


WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": pickled,
    "save": saved,
    "explain": explains,
    "to_hetero": hetero,
    "trace": traced,
    "script": scripted,
    "construct": constructed,
    "restore": restored,
}


@contextlib.contextmanager
def door(name: str, *models: Any) -> Iterator[None]:
    """The models fast inside."""
    with contextlib.ExitStack() as stack:
        if name == "patch":
            stretto.patch()
            stack.callback(stretto.unpatch)
        for model in models:
            if name == "accelerated":
                stack.enter_context(stretto.accelerated(model))
            elif name in ("accelerate", "again"):
                stretto.accelerate(model)
            if name == "again":  # restored in between
                copy.deepcopy(stretto.accelerate(stretto.restore(model)))
        yield


def on_classes() -> dict[Any, Any]:
    """All that the classes of accelerated layers hold, and what PyG writes onto those of stock."""
    kinds = [*FAST.values(), type(stretto.accelerate(Own()))]
    names = ("propagate", "_orig_propagate", "_jinja_propagate", "edge_updater", "_orig_edge_updater", "collect")
    ours = {(kind, name): id(value) for kind in kinds for name, value in vars(kind).items()}
    ours = {key: value for key, value in ours.items() if key[1] != "__annotations__"}  # Python's, made when asked for
    return ours | {(kind, name): id(vars(kind).get(name)) for kind in (*FAST, Own) for name in names}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", ["accelerate", "accelerated", "patch", "again"])
def test_explainers_of_other_models_see_what_stock_sees(name, way):
    torch.manual_seed(0)
    x = torch.randn(N, IN)
    stock = Net()
    model = copy.deepcopy(stock)
    wanted = explained(copy.deepcopy(stock), x)
    assert int((wanted != 0).sum()) > 20
    others()  # PyG writes onto a class when its first layer is made
    before = on_classes()
    with door(name, *(both := [*others(), model])):
        for other in both[:-1]:
            way(other)
        torch.testing.assert_close(explained(model, x), wanted, rtol=1e-4, atol=1e-5)
        assert {record_of(m).path for m in (model.first, model.second, model.last)} == {"stock"}
        copied = copy.deepcopy(model)
        torch.testing.assert_close(explained(copied, x), wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model(x, EDGES), stock(x, EDGES), rtol=1e-4, atol=1e-5)
        assert record_of(model.first).path == record_of(model.last).path == "fast"  # the explainer is off again
    if name != "patch":
        assert on_classes() == before


class TwoStep(torch.nn.Module):
    """A model whose layers are accelerated at their first call."""

    def __init__(self, conv: torch.nn.Module):
        super().__init__()
        self.conv = conv

    def forward(self, x, edge_index):
        stretto.accelerate(self.conv)
        return self.conv(x, edge_index)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("make", [Own, lambda: pyg.GCNConv(IN, 8), lambda: pyg.SAGEConv(IN, 8)])
def test_a_layer_may_become_fast_while_it_is_traced(make):
    """torch traces twice and compares the graphs, in which modules stand by the names of their classes."""
    model, x = TwoStep(make()), torch.randn(N, IN)
    found = torch.jit.trace(model, (x, EDGES))
    other = torch.randn(N - 5, IN), random_edges(N - 5, N - 5, 60, 1)
    torch.testing.assert_close(found(*other), model(*other))
