"""Folds in users' own models: equal to stock in inference whatever the forward does, and told."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch_geometric.nn as pyg
from torch.nn.utils import parametrize
from torch_geometric.data import Data

import stretto
from stretto.layers import fold_models, folds, forward_trace, record_of
from tests.compare import judge
from tests.layers import folding_models
from tests.layers.folding_models import FOLDING, TRAPS, Ending, InMethods, Listed, OfConstants, OfData, Plain, Weighted
from tests.layers.test_folds import GRAPHS, _data, _learned, _pair

EXACT = {"rtol": 1e-9, "atol": 1e-9}


@pytest.fixture(autouse=True)
def _fold_small_ones(monkeypatch):
    monkeypatch.setattr(folds, "LEAST", 0)


@pytest.fixture
def norms(monkeypatch):
    """A list that grows with every call of batch_norm."""
    calls, stock = [], torch.nn.functional.batch_norm
    monkeypatch.setattr(torch.nn.functional, "batch_norm", lambda *a, **k: calls.append(1) or stock(*a, **k))
    return calls


def _told(model):
    return [row.plan for row in stretto.report(model).rows]


def _count(model):
    return sum("folded into the weights" in plan for plan in _told(model))


def _same(fast, stock, *args, **kwargs):
    with torch.no_grad():
        torch.testing.assert_close(fast(*args, **kwargs), stock(*args, **kwargs), **EXACT)


@pytest.mark.parametrize("name", FOLDING)
def test_models_that_fold(name, norms):
    make, count, left = FOLDING[name]
    stock, fast = _pair(make)
    for graph in GRAPHS:
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                wanted = stock(*_data(graph))
                norms.clear()
                got = fast(*_data(graph))
            torch.testing.assert_close(got, wanted, **EXACT)
            assert len(norms) == left
    assert _count(fast) == count
    assert {row.path for row in stretto.report(fast).rows} <= {"fast", "not run yet"}


@pytest.mark.parametrize("name", TRAPS)
def test_models_that_do_not(name):
    make, reason = TRAPS[name]
    stock, fast = _pair(make)
    for graph in GRAPHS:
        if "batch" not in name or _data(graph)[0].size(0) > 1:  # stock itself has no statistics of one row
            _same(fast, stock, *_data(graph))
    assert _count(fast) == 0
    assert ("not folded: " in str(_told(fast))) == bool(reason)
    assert reason in str(_told(fast))


def test_a_model_of_data_and_arguments_by_name(norms):
    x, edge_index = _data("unsorted")
    data = Data(x=x, edge_index=edge_index, batch=torch.arange(x.size(0)) % 3)
    stock, fast = _pair(OfData)
    _same(fast, stock, data)
    assert len(norms) == 1  # stock's own
    stock, fast = _pair(Weighted)
    weight = torch.rand(edge_index.size(1), dtype=torch.float64)
    for given in ({}, {"edge_weight": weight}, {"edge_weight": None, "scale": 3.0}, {"scale": True}):
        norms.clear()
        _same(fast, stock, x, edge_index=edge_index, **given)
        assert len(norms) == 1
        assert _count(fast) == 1


def test_single_precision():
    stock, fast = _pair(Ending, torch.float32)
    x, edge_index = _data("symmetric", torch.float32)
    with torch.no_grad():
        truth = copy.deepcopy(stock).double()(x.double(), edge_index)
        judge(fast(x, edge_index), stock(x, edge_index), truth, terms=60)
    assert _count(fast) == 2


def test_gradients_and_training_fold_nothing(norms):
    stock, fast = _pair(Plain)
    data = _data("unsorted")
    _same(fast, stock, *data)
    for train in (True, False):
        results = []
        for model in (stock.train(train), fast.train(train)):
            torch.manual_seed(0)
            out = model(*data)
            results.append([out, *torch.autograd.grad(out.pow(2).sum(), list(model.parameters()))])
        for got, wanted in zip(*reversed(results), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-8)
        assert _count(fast) == 0
    for mine, theirs in zip(fast.buffers(), stock.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)
    norms.clear()
    _same(fast, stock, *data)
    assert len(norms) == 2
    assert _count(fast) == 2


EDITS = {
    "weight": lambda m: m.conv1.lin.weight.data.mul_(2),
    "statistics": lambda m: m.bn1.running_mean.add_(1),
    "norm": lambda m: m.bn1.weight.data.fill_(0.3),
    "linear": lambda m: m.lin.weight.data.add_(0.5),
    "epsilon": lambda m: setattr(m.bn2, "eps", 0.5),
    "state": lambda m: m.load_state_dict(
        {k: v * 0.5 if v.is_floating_point() else v for k, v in m.state_dict().items()}
    ),
    "another norm": lambda m: setattr(m, "bn1", _learned(torch.nn.BatchNorm1d(6)).double()),
    "another layer": lambda m: setattr(m, "conv2", _learned(pyg.SAGEConv(6, 6)).double()),
    "step": lambda m: _step(m),
}


def _step(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), 0.1).step()


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_any_kind_is_seen(edit, norms):
    stock, fast = _pair(Ending)
    data = _data("unsorted")
    _same(fast, stock, *data)
    for model in (stock, fast):
        EDITS[edit](model)
    with torch.no_grad():
        before = stock(*data)
        norms.clear()
        torch.testing.assert_close(fast(*data), before, **EXACT)
    assert not norms
    assert list(fast.state_dict()) == list(stock.state_dict())


WATCHED = {
    "layer": lambda m: m.conv1,
    "norm": lambda m: m.bn1,
    "sequence": lambda m: m.block,
    "linear inside": lambda m: m.conv1.lin,
}


@pytest.mark.parametrize("before", [True, False], ids=["before", "after a call"])
@pytest.mark.parametrize("watched", WATCHED)
def test_whoever_watches_is_called(watched, before):
    stock, fast = _pair(InMethods)
    data = _data("unsorted")
    if not before:
        _same(fast, stock, *data)
        assert _count(fast) == 1
    seen = []
    for model in (stock, fast):
        handle = WATCHED[watched](model).register_forward_hook(lambda m, a, out: seen.append(out) or out * 2)
    _same(fast, stock, *data)
    torch.testing.assert_close(seen[0], seen[1], **EXACT)
    assert _count(fast) == 0
    handle.remove()
    handle = fast.register_forward_hook(lambda *a: seen.append(3))
    with torch.no_grad():
        fast(*data)
    assert seen[-1] == 3
    assert _count(fast) == 0


class Halved(torch.nn.Module):
    def forward(self, weight):
        return weight / 2


PARAMETRIZED = {"norm": lambda m: m.bn1, "layer": lambda m: m.conv1.lin, "linear": lambda m: m.lin}


@pytest.mark.parametrize("which", PARAMETRIZED)
def test_parametrized_weights(which):
    stock, fast = _pair(Ending)
    data = _data("unsorted")
    _same(fast, stock, *data)
    for model in (stock, fast):
        parametrize.register_parametrization(PARAMETRIZED[which](model), "weight", Halved())
    _same(fast, stock, *data)
    first, second = _told(fast) if which != "layer" else ["", _told(fast)[1]]
    assert ("BatchNorm folded" in first) == (which == "linear")
    assert ("BatchNorm and Linear folded" in second) == (which != "linear")


def test_constants_that_change(monkeypatch):
    stock, fast = _pair(OfConstants)
    data = _data("unsorted")
    for value in (True, False, 1, True):
        stock.normed = fast.normed = value
        _same(fast, stock, *data)
        assert _count(fast) == bool(value)
    monkeypatch.setattr(folding_models, "NORMED", False)
    _same(fast, stock, *data)
    assert _count(fast) == 0
    monkeypatch.undo()
    for i in range(40):  # traced no more at last, and still the same
        stock.normed = fast.normed = [i] if i % 2 else i
        _same(fast, stock, *data)


def test_lists_that_change():
    stock, fast = _pair(Listed)
    data = _data("unsorted")
    _same(fast, stock, *data)
    for model in (stock, fast):
        model.norms[0] = _learned(pyg.BatchNorm(6)).double()
    _same(fast, stock, *data)
    assert _count(fast) == 2
    for model in (stock, fast):
        model.convs.insert(1, _learned(pyg.GCNConv(6, 6)).double())
    _same(fast, stock, *data)
    for model in (stock, fast):
        model.norms[0].train()
    torch.testing.assert_close(stock.norms[0].module.running_mean, fast.norms[0].module.running_mean)
    _same(fast, stock, *data)
    torch.testing.assert_close(stock.norms[0].module.running_mean, fast.norms[0].module.running_mean)


def test_another_forward(monkeypatch):
    stock, fast = _pair(Plain)
    data = _data("unsorted")
    _same(fast, stock, *data)
    monkeypatch.setattr(Plain, "forward", folding_models.Residual.forward)
    _same(fast, stock, *data)
    assert "not folded: its result is read more than once" in _told(fast)[0]
    fast.forward = lambda x, edge_index: x
    assert fast(*data) is data[0]


def test_copies_and_what_is_put_back():
    stock, fast = _pair(Plain)
    data = _data("unsorted")
    assert isinstance(fast, Plain)
    assert repr(fast) == repr(stock)
    assert list(fast.state_dict()) == list(stock.state_dict())
    for model in (fast, pickle.loads(pickle.dumps(fast)), copy.deepcopy(fast)):
        _same(model, stock, *data)
        assert _count(model) == 2
        assert type(stretto.restore(model)) is Plain
        assert type(model.conv1) is pyg.GCNConv
        _same(model, stock, *data)
    with stretto.accelerated(fast):
        assert fold_models.is_container(type(fast))
    assert type(fast) is Plain
    assert "_stretto" not in str(list(vars(fast)))


def test_a_model_is_let_go(fresh_memo):
    import gc
    import weakref

    _, fast = _pair(Plain)
    with torch.no_grad():
        fast(*_data("unsorted"))
    gone = weakref.ref(fast)
    del fast
    gc.collect()
    assert gone() is None


def test_compiled_and_scripted():
    stock, fast = _pair(Plain)
    data = _data("unsorted")
    _same(torch.compile(fast, backend="eager", fullgraph=False), stock, *data)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.testing.assert_close(torch.jit.trace(fast, data, check_trace=False)(*data), stock(*data), **EXACT)
        hetero = [pyg.to_hetero(copy.deepcopy(model), (["a"], [("a", "to", "a")])).eval() for model in (fast, stock)]
        hetero[1].load_state_dict(hetero[0].state_dict())
        _same(*hetero, {"a": data[0]}, {("a", "to", "a"): data[1]})


def test_a_wrong_trace_does_no_harm(monkeypatch):
    """Should a forward ever do something else than its trace, its result is thrown away."""
    stock, fast = _pair(folding_models.OfConstants)
    monkeypatch.setattr(forward_trace.Trace, "stands", lambda *a: True)
    data = _data("unsorted")
    _same(fast, stock, *data)
    stock.normed = fast.normed = False
    _same(fast, stock, *data)
    assert "did something else" in str(_told(fast)) or _count(fast) == 0
    _same(fast, stock, *data)
    assert "did something else" in str(_told(fast))


def test_beside_stock(monkeypatch):
    monkeypatch.setenv("STRETTO_SHADOW", "1")
    stock, fast = _pair(Plain)
    _same(fast, stock, *_data("unsorted"))
    assert _count(fast) == 2
    monkeypatch.setattr(folds, "scale_and_shift", lambda norm: (norm.running_var, norm.running_mean))
    _same(fast, stock, *_data("unsorted"))
    _same(fast, stock, *_data("unsorted"))
    assert _count(fast) == 0


def test_small_ones_are_left_alone(monkeypatch, norms):
    monkeypatch.setattr(folds, "LEAST", 1 << 20)
    monkeypatch.setattr(fold_models, "traced", None)  # nothing is traced either
    stock, fast = _pair(Plain)
    _same(fast, stock, *_data("unsorted"))
    assert len(norms) == 4


def test_explain_tells():
    _, fast = _pair(Ending)
    with torch.no_grad():
        told = stretto.explain(fast, *_data("unsorted"))
    assert [layer.folds for layer in told.layers] == [
        "BatchNorm folded into the weights",
        "BatchNorm and Linear folded into the weights",
    ]
    assert "folds: BatchNorm and Linear" in str(told)
    assert "BatchNorm and Linear folded into the weights" in str(stretto.report(fast))
    assert record_of(fast.conv1).path == "fast"


def test_one_norm_of_another_width_is_stocks_error():
    _, fast = _pair(Plain)
    fast.bn1 = torch.nn.BatchNorm1d(1).double().eval()
    with torch.no_grad(), pytest.raises(RuntimeError):
        fast(*_data("unsorted"))
