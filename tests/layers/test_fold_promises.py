"""Forwards that mislead a trace: lists that others fill or hold, names, texts. What is folded is never read."""

from __future__ import annotations

import pytest
import torch
import torch_geometric.nn as pyg
from torch.nn import BatchNorm1d, ModuleList

import stretto
from stretto.layers.fold_run import DIFFERENT, Broken, Fold
from stretto.layers.forward_trace import Chain
from tests.layers.folding_models import Base, Plain
from tests.layers.test_fold_models import EXACT, _count, _fold_small_ones, _same, _told  # noqa: F401
from tests.layers.test_folds import _data, _learned, _pair


def fill(found):
    found.append(1)


def fill_dict(found):
    found["residual"] = True


def same(value):
    return value


def act(x):
    return x.relu()


def caught(y, more):
    try:
        return y + more[0]
    except Exception:  # what a promise raises
        return y


class FilledByAnother(Base):
    def forward(self, x, edge_index):
        found = []
        h = self.conv1(x, edge_index)
        y = self.bn1(h)
        fill(found)
        return y + h if len(found) else y


class DictFilledByAnother(Base):
    def forward(self, x, edge_index):
        options = {}
        fill_dict(options)
        h = self.conv1(x, edge_index)
        return self.bn1(h) + h if options.get("residual") else self.bn1(h)


class HeldByAnother(Base):
    def forward(self, x, edge_index):
        found = []
        again = same(found)
        h = self.conv1(x, edge_index)
        found.append(h)
        return self.bn1(h) + again[0]


class HandedOut(Base):
    """Nobody reads what the layer made before the caller does."""

    def forward(self, x, edge_index):
        found = []
        again = same(found)
        h = self.conv1(x, edge_index)
        found.append(h)
        return self.bn1(h), again


class Swallows(Base):
    def forward(self, x, edge_index):
        found = []
        again = same(found)
        h = self.conv1(x, edge_index)
        found.append(h)
        return caught(self.bn1(h), again)


class BetweenTheTwo(Base):
    """What the norm made is read, besides by the Linear."""

    def forward(self, x, edge_index):
        found = []
        again = same(found)
        y = self.bn1(self.conv1(x, edge_index))
        found.append(y)
        return self.lin(y), again[0].sum()


class ByName(Base):
    def __init__(self):
        super().__init__()
        self.act = act

    def forward(self, x, edge_index):
        h = self.conv1(x, edge_index)
        return self.bn1(h) + h if self.act.__name__ == "act" else self.bn1(h)


class ByDocstring(Base):
    def forward(self, x, edge_index):
        h = self.conv1(x, edge_index)
        return self.bn1(h) + h if "graph convolutional" in self.conv1.__doc__ else self.bn1(h)


class ByFormat(Base):
    def forward(self, x, edge_index):
        h = self.conv1(x, edge_index)
        kind = "{.__class__.__base__.__name__}".format(self.bn1)  # noqa: UP032
        return self.bn1(h) + h if kind == "_BatchNorm" else self.bn1(h)


class InALambda(Base):
    def forward(self, x, edge_index):
        h = self.conv1(x, edge_index)
        kind = (lambda module: module.__class__)(self.bn1)
        return self.bn1(h) + h if kind.__mro__[0] is not None else self.bn1(h)


class SlicesOfLists(Base):
    def __init__(self):
        super().__init__()
        self.convs = ModuleList([self.conv1])

    def forward(self, x, edge_index):
        convs = self.convs
        h = convs[0](x, edge_index)
        return self.bn1(h) if convs[:1] == convs[:1] else self.bn1(h) + h


class TextOfNone(Base):
    def __init__(self):
        super().__init__()
        self.convs = ModuleList([])

    def forward(self, x, edge_index):
        h = self.conv1(x, edge_index)
        return self.bn1(h) + h if f"{self.convs}" == "ModuleList()" else self.bn1(h)


class Adapts(torch.nn.Module):
    """Gives a norm that it does not own the statistics of what it sees."""

    def __init__(self, norm):
        super().__init__()
        self.norms = [norm]

    def forward(self, x):
        self.norms[0].running_mean.copy_(x.mean(0)[:1].expand(6))
        return x


class Adapted(Base):
    def __init__(self):
        super().__init__()
        self.adapts = Adapts(self.bn1)

    def forward(self, x, edge_index):
        h = self.conv1(x, edge_index)
        self.adapts(x * 1.5)
        return self.bn1(h)


# model -> words of the reason that the report gives
MISLEAD = {
    Adapted: DIFFERENT,
    FilledByAnother: DIFFERENT,
    DictFilledByAnother: DIFFERENT,
    HeldByAnother: DIFFERENT,
    HandedOut: DIFFERENT,
    Swallows: DIFFERENT,
    BetweenTheTwo: DIFFERENT,
    ByName: "reads __name__",
    ByDocstring: "reads __doc__",
    ByFormat: "a text with __",
    InALambda: "reads __",
    SlicesOfLists: "compares modules",
    TextOfNone: "makes text of",
}


@pytest.mark.parametrize("make", MISLEAD, ids=lambda kind: kind.__name__)
def test_forwards_that_mislead_a_trace(make):
    stock, fast = _pair(make)
    for _ in range(2):
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                torch.testing.assert_close(fast(*_data("unsorted")), stock(*_data("unsorted")), **EXACT)
        assert _count(fast) == 0
        assert MISLEAD[make] in _told(fast)[0]


class Draws(Base):
    def forward(self, x, edge_index):
        found = []
        again = same(found)
        h = self.conv1(torch.nn.functional.dropout(x), edge_index)
        found.append(h)
        return self.bn1(h) + torch.nn.functional.dropout(again[0])


def test_a_call_that_is_made_again_draws_the_same():
    stock, fast = _pair(Draws)
    results = []
    for model in (stock, fast):
        torch.manual_seed(0)
        with torch.no_grad():
            results += [model(*_data("unsorted")), torch.rand(1)]
    torch.testing.assert_close(results[2:], results[:2], **EXACT)
    assert DIFFERENT in _told(fast)[0]


class Scaled(Base):
    def forward(self, x, edge_index, scale):
        h = self.conv1(x, edge_index)
        return self.bn1(h) + h if f"{scale}" in ("-0.0", "(True,)") else self.bn1(h)


def test_arguments_that_are_equal_but_read_otherwise():
    stock, fast = _pair(Scaled)
    for scale, count in ((0.0, 1), (-0.0, 0), (0.0, 1), ((1,), 1), ((True,), 0)):
        _same(fast, stock, *_data("unsorted"), scale)
        assert _count(fast) == count


class Sliced(Base):
    def __init__(self):
        super().__init__()
        self.convs, self.norms = ModuleList([self.conv1, self.conv2]), ModuleList([self.bn1, self.bn2])

    def forward(self, x, edge_index):
        for conv, norm in zip(self.convs[:2], self.norms[0:]):  # noqa: B905
            x = norm(conv(x, edge_index)).relu()
        return x


def test_slices_of_lists_fold():
    stock, fast = _pair(Sliced)
    _same(fast, stock, *_data("unsorted"))
    assert _count(fast) == 2


def test_an_error_of_the_users_is_stocks_and_no_reason_to_stop_folding():
    stock, fast = _pair(Plain)
    x, edge_index = _data("unsorted")
    messages = []
    for model in (stock, fast):
        with torch.no_grad(), pytest.raises(RuntimeError) as found:
            model(x[:, :3], edge_index)
        messages.append(str(found.value))
    assert messages[0] == messages[1]
    _same(fast, stock, x, edge_index)
    assert _count(fast) == 2


def _promise(width=4):
    x, edge_index = torch.randn(6, 4), torch.tensor([[0, 1, 2], [1, 2, 3]])
    fold = Fold(Chain(pyg.GCNConv(4, width).eval(), _learned(BatchNorm1d(width))))
    with torch.no_grad():
        return fold, fold(x, edge_index)


READS = {
    "add": lambda t: t + 1,
    "other side": lambda t: torch.ones(6, 4) + t,
    "in a list": lambda t: torch.cat([torch.ones(6, 4), t]),
    "shape": lambda t: t.shape,
    "text": str,
    "length": len,
    "item": lambda t: t[0],
    "edit": lambda t: t.mul_(2),
    "out": lambda t: torch.add(torch.ones(6, 4), 1, out=t),
    "data": lambda t: t.data,
    "numpy": lambda t: t.numpy(),
    "truth": lambda t: bool(t == t),
    "without torch functions": lambda t: _no_functions(t),
}


def _no_functions(tensor):
    with torch._C.DisableTorchFunction():
        return torch.relu(tensor)


@pytest.mark.parametrize("read", READS)
def test_a_promise_is_never_read(read):
    fold, promise = _promise()
    assert isinstance(promise, torch.Tensor)
    with torch.no_grad(), pytest.raises(Broken):
        READS[read](promise)
    assert fold.broken
    assert not fold.kept()


def test_a_promise_that_someone_holds_is_none_that_was_kept():
    fold, promise = _promise()
    with torch.no_grad():
        assert torch.is_tensor(fold.passed(fold.chain.norm, (promise,), {}))
    assert not fold.kept()
    del promise
    assert fold.kept()


@pytest.mark.parametrize("kind", [pyg.GCN, pyg.GraphSAGE, pyg.GAT], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("options", [{}, {"jk": "cat"}, {"jk": "last", "act": None}], ids=str)
def test_dropout_that_is_on_in_evaluation(kind, options):
    """Monte Carlo dropout: a model in eval mode whose Dropout modules are not."""
    stock, fast = _pair(lambda: kind(5, 6, 3, 4, norm="batch_norm", dropout=0.5, **options))
    results, seen = [], []
    for model in (stock, fast):
        model.dropout.train()
        model.dropout.register_forward_hook(lambda *args: seen.append(1))
        torch.manual_seed(0)
        with torch.no_grad():
            results.append(model(*_data("unsorted")))
    torch.testing.assert_close(*results, **EXACT)
    assert len(seen) == 2 * (3 if "jk" in options else 2)
    assert "folded into the weights" in str([row.plan for row in stretto.report(fast).rows])
