"""What follows a layer folded into its weights: equal to stock in inference, and never anywhere else."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch_geometric.nn as pyg
from torch.nn import BatchNorm1d, Linear, ReLU, Sequential

import stretto
from stretto.layers import folds, record_of
from tests.compare import judge
from tests.graphs import ZOO

GRAPHS = ("one_node", "one_loop", "empty", "isolated", "self_loops", "duplicates", "directed", "unsorted", "hub")
OPTIONS = (
    {},
    {"act": "elu"},
    {"act": None},
    {"jk": "cat"},
    {"jk": "last"},
    {"jk": "last", "act": None},
    {"jk": "last", "act": None, "norm": None},
    {"jk": "max", "dropout": 0.5},
    {"bias": False},
    {"norm_kwargs": {"affine": False}},
)


@pytest.fixture(autouse=True)
def _fold_small_ones(monkeypatch):
    monkeypatch.setattr(folds, "LEAST", 0)


def _learned(model):
    """Statistics and parameters that hide no mistake."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    for module in model.modules():
        if isinstance(module, BatchNorm1d) and module.running_mean is not None:
            module.running_mean.normal_()
            module.running_var.uniform_(0.1, 3)
    return model.eval()


def _pair(make, dtype=torch.float64):
    stock = _learned(make()).to(dtype)
    return stock, stretto.accelerate(copy.deepcopy(stock))


def _data(name, dtype=torch.float64):
    edge_index, (n, _) = ZOO[name]()
    return torch.randn(n, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype), edge_index


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", [pyg.GCN, pyg.GraphSAGE], ids=lambda c: c.__name__)
def test_models_equal_stock(kind, options):
    stock, fast = _pair(lambda: kind(5, 6, 3, 4, **{"norm": "batch_norm", **options}))
    for name in GRAPHS:
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                wanted, got = stock(*_data(name)), fast(*_data(name))
            torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
    assert "folded into the weights" in str([record_of(conv).plan for conv in fast.convs])
    assert {row.path for row in stretto.report(fast).rows} == {"fast"}


@pytest.mark.parametrize(
    "options",
    [{}, {"heads": 3}, {"act": "elu", "jk": "cat"}, {"bias": False, "heads": 2}, {"v2": True}, {"residual": True},
     {"jk": "last", "act": None}, {"add_self_loops": False, "heads": 2}],
    ids=str,
)  # fmt: skip
def test_attention_equals_stock(options):
    stock, fast = _pair(lambda: pyg.GAT(5, 6, 3, 4, norm="batch_norm", **options))
    for name in GRAPHS:
        with torch.no_grad():
            wanted, got = stock(*_data(name)), fast(*_data(name))
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
    told = str([record_of(conv).plan for conv in fast.convs])
    assert ("BatchNorm folded into the weights" in told) == (not {"v2", "residual"} & options.keys())
    assert {row.path for row in stretto.report(fast).rows} == {"fast"}


def test_a_channel_that_is_scaled_to_nothing_is_not_folded():
    """Its attention vector would be divided by zero."""
    stock, fast = _pair(lambda: pyg.GAT(5, 6, 2, 4, norm="batch_norm"))
    for model in (stock, fast):
        model.norms[0].module.weight.data[2] = 0
    with torch.no_grad():
        wanted, got = stock(*_data("unsorted")), fast(*_data("unsorted"))
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
    assert "folded" not in record_of(fast.convs[0]).plan


def test_weighted_edges_and_single_precision():
    stock, fast = _pair(lambda: pyg.GCN(5, 6, 3, 4, norm="batch_norm"), torch.float32)
    x, edge_index = _data("symmetric", torch.float32)
    weight = torch.rand(edge_index.size(1))
    exact = copy.deepcopy(stock).double()
    with torch.no_grad():
        truth = exact(x.double(), edge_index, edge_weight=weight.double())
        judge(fast(x, edge_index, edge_weight=weight), stock(x, edge_index, edge_weight=weight), truth, terms=60)
    assert "BatchNorm folded" in record_of(fast.convs[0]).plan


@pytest.mark.parametrize(
    "make",
    [
        lambda: Sequential(Linear(5, 6), BatchNorm1d(6), ReLU(), Linear(6, 4)),
        lambda: Sequential(Linear(5, 6), BatchNorm1d(6)),
        lambda: Sequential(Linear(5, 6, bias=False), pyg.BatchNorm(6), ReLU(), Linear(6, 4)),
        lambda: pyg.MLP([5, 6, 4]),
        lambda: pyg.MLP([5, 6, 6, 4], plain_last=False),
        lambda: pyg.MLP([5, 6, 4], act_first=True),
        lambda: pyg.MLP([5, 4]),
    ],
)
def test_the_network_of_gin(make):
    stock, fast = _pair(lambda: pyg.GINConv(make(), eps=0.2))
    for name in GRAPHS:
        with torch.no_grad():
            torch.testing.assert_close(fast(*_data(name)), stock(*_data(name)), rtol=1e-9, atol=1e-9)
    assert record_of(fast).path == "fast"


def test_an_edit_of_any_kind_is_seen():
    stock, fast = _pair(lambda: pyg.GraphSAGE(5, 6, 2, 4, norm="batch_norm"))
    data = _data("unsorted")
    edits = [
        lambda m: m.convs[0].lin_l.weight.data.mul_(2),
        lambda m: m.norms[0].module.running_mean.add_(1),
        lambda m: m.norms[0].module.weight.data.fill_(0.3),
        lambda m: m.load_state_dict({k: v * 0.5 if v.is_floating_point() else v for k, v in m.state_dict().items()}),
    ]
    with torch.no_grad():
        for edit in edits:
            edit(stock), edit(fast)
            torch.testing.assert_close(fast(*data), stock(*data), rtol=1e-9, atol=1e-9)
    assert list(fast.state_dict()) == list(stock.state_dict())


def test_training_and_gradients_fold_nothing():
    stock, fast = _pair(lambda: pyg.GCN(5, 6, 2, 4, norm="batch_norm"))
    data = _data("unsorted")
    for train in (True, False):
        results = []
        for model in (stock.train(train), fast.train(train)):
            out = model(*data)
            results.append([out, *torch.autograd.grad(out.pow(2).sum(), list(model.parameters()))])
        for got, wanted in zip(*reversed(results), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-8)
        assert "folded" not in record_of(fast.convs[0]).plan
    for (name, mine), theirs in zip(fast.named_buffers(), stock.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=name)


@pytest.mark.parametrize("watched", ["conv", "norm", "inner norm", "linear"])
def test_whoever_watches_is_called(watched):
    stock, fast = _pair(lambda: pyg.GCN(5, 6, 2, 4, norm="batch_norm"))
    norm = fast.norms[0]
    module = {"conv": fast.convs[0], "norm": norm, "inner norm": norm.module, "linear": fast.convs[0].lin}[watched]
    seen = []
    module.register_forward_hook(lambda *args: seen.append(1))
    with torch.no_grad():
        torch.testing.assert_close(fast(*_data("unsorted")), stock(*_data("unsorted")), rtol=1e-9, atol=1e-9)
    assert seen
    assert "folded" not in record_of(fast.convs[0]).plan


def test_other_arguments_copies_and_hetero():
    stock, fast = _pair(lambda: pyg.GraphSAGE(5, 6, 2, 4, norm="batch_norm"))
    x, edge_index = _data("unsorted")
    hops = {"num_sampled_nodes_per_hop": [12, 0, 0], "num_sampled_edges_per_hop": [50, 0]}
    metadata = (["a"], [("a", "to", "a")])
    with torch.no_grad():
        for model in (fast, pickle.loads(pickle.dumps(fast)), copy.deepcopy(fast)):
            torch.testing.assert_close(model(x, edge_index), stock(x, edge_index))
            assert "folded" in record_of(model.convs[0]).plan
        torch.testing.assert_close(fast(x, edge_index, **hops), stock(x, edge_index, **hops))
        torch.manual_seed(0)
        wanted = pyg.to_hetero(stock, metadata)
        torch.manual_seed(0)
        got = pyg.to_hetero(fast, metadata)
        got.load_state_dict(wanted.state_dict())
        args = {"a": x}, {("a", "to", "a"): edge_index}
        torch.testing.assert_close(got.eval()(*args)["a"], wanted.eval()(*args)["a"])


def test_patched_models_fold_and_are_put_back():
    stock = _learned(pyg.GCN(5, 6, 2, 4, norm="batch_norm")).double()
    before = pyg.GCN.__dict__.get("forward")
    data = _data("unsorted")
    with torch.no_grad():
        wanted = stock(*data)
        stretto.patch()
        try:
            torch.testing.assert_close(stock(*data), wanted, rtol=1e-9, atol=1e-9)
        finally:
            stretto.unpatch()
    assert "folded" in record_of(stock.convs[0]).plan
    assert pyg.GCN.__dict__.get("forward") is before
