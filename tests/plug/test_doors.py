"""The doors in one another, and strict: what was there before a door was opened is there after it is closed."""

import copy
import itertools
import pickle

import pytest
import torch
import torch_geometric
import torch_geometric.nn as pyg
from torch_geometric.nn import MessagePassing

import stretto
from stretto.layers import AGGREGATIONS, CONVS, record_of
from stretto.layers.layer import stock_of
from stretto.layers.watched import why_stock
from stretto.plug import told
from stretto.plug.by_hops import CONTAINERS
from tests.layers.options import SPECS
from tests.layers.test_convs import data_for, pair_of, run

X = torch.randn(30, 6, generator=torch.Generator().manual_seed(0))
EDGE_INDEX = torch.randint(30, (2, 140), generator=torch.Generator().manual_seed(1))


class Own(pyg.MessagePassing):
    """A layer of a user's own that runs as one product."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.own, self.pool = pyg.GCNConv(6, 4), Own(), pyg.SumAggregation()

    def forward(self, x, edge_index):
        return self.pool(self.own(self.first(x, edge_index), edge_index), torch.zeros(len(x), dtype=torch.long))


def identities(model):
    """Everything the doors could touch, by identity."""
    kinds = [*CONVS, *AGGREGATIONS, *CONTAINERS, Own, MessagePassing]
    names = ("forward", "propagate", "_set_jittable_templates", "_jinja_propagate")
    classes = [(kind, name, id(kind.__dict__.get(name))) for kind in kinds for name in names]
    modules = [(id(type(m)), {k: id(v) for k, v in m.__dict__.items()}, told.strict_of(m)) for m in model.modules()]
    functions = [id(f) for f in (torch_geometric.utils.scatter, pyg.pool.glob.scatter, pyg.aggr.base.scatter)]
    return classes, modules, functions, id(pyg.GCNConv), stretto.is_patched()


PAIRS = (("patch", "unpatch"), ("accelerate", "restore"), ("enter", "leave"))
ORDERS = [
    order
    for order in itertools.permutations([word for pair in PAIRS for word in pair])
    if all(order.index(a) < order.index(b) for a, b in PAIRS)
]


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_doors_open_and_close_in_any_order(order):
    model = Net()
    wanted = model(X, EDGE_INDEX)
    before = identities(model)
    context = stretto.accelerated(model, strict=True)
    doors = {
        "patch": stretto.patch,
        "unpatch": stretto.unpatch,
        "accelerate": lambda: stretto.accelerate(model, strict=True),
        "restore": lambda: stretto.restore(model),
        "enter": context.__enter__,
        "leave": lambda: context.__exit__(None, None, None),
    }
    opened = 0
    try:
        for word in order:
            doors[word]()
            opened += {"patch": 1, "unpatch": -1}.get(word, 0)
            torch.testing.assert_close(model(X, EDGE_INDEX), wanted)
            for layer in (model.first, model.own):
                if opened or stock_of(type(layer)) is not None:
                    assert record_of(layer).path == "fast", (word, record_of(layer))
                    assert stretto.report(layer).rows[0].path == "fast"
                else:
                    assert "not accelerated" in stretto.report(layer).rows[0].reason
    finally:
        for _ in range(opened):
            stretto.unpatch()
    if order.index("leave") > order.index("restore") > order.index("enter") > order.index("accelerate"):
        stretto.restore(model)  # it was accelerated when the context began, and so it is when it ends
    assert identities(model) == before


def test_restoring_inside_the_context_is_undone_at_its_end():
    model = stretto.accelerate(torch.nn.ModuleList([pyg.GCNConv(6, 4), pyg.SAGEConv(4, 2)]))
    before = [type(m) for m in model.modules()]
    with stretto.accelerated(model):
        stretto.restore(model)
        assert type(model[0]) is pyg.GCNConv
    assert [type(m) for m in model.modules()] == before
    assert stock_of(type(model[0])) is not None


def test_a_layer_of_ones_own_accelerated_under_patch_stays_fast_after_it():
    model = torch.nn.ModuleList([Own()])
    stretto.patch()
    try:
        stretto.accelerate(model, strict=True)
    finally:
        stretto.unpatch()
    model[0](X, EDGE_INDEX)
    assert record_of(model[0]).path == "fast"
    other = pickle.loads(pickle.dumps(model))
    assert torch.equal(other[0](X, EDGE_INDEX), model[0](X, EDGE_INDEX))


@pytest.mark.parametrize(
    ("conv", "reason"),
    [
        (lambda: pyg.GCNConv(6, 3, aggr="max"), "aggr is max"),
        (lambda: pyg.SGConv(6, 3, cached=True), "cached=True"),
        (lambda: pyg.SAGEConv(6, 3, aggr="median"), "aggr is median"),
        (lambda: pyg.GCNConv(6, 4, decomposed_layers=2), "decomposed_layers > 1"),
    ],
)
def test_strict_raises_at_once_where_the_constructor_decides(conv, reason):
    model = torch.nn.ModuleList([pyg.GCNConv(6, 6), conv()])
    before = identities(model)
    with pytest.raises(stretto.StrettoError, match=rf"1 \(\w+\): {reason}"):
        stretto.accelerate(model, strict=True)
    assert identities(model) == before
    stretto.accelerate(model)
    with pytest.raises(stretto.StrettoError, match=reason):
        stretto.accelerate(model, strict=True)  # already accelerated is no excuse


def test_strict_raises_at_once_where_a_hook_decides():
    conv = pyg.GCNConv(6, 3)
    conv.register_message_forward_hook(lambda *args: None)
    with pytest.raises(stretto.StrettoError, match="hook"):
        stretto.accelerate(conv, strict=True)


@pytest.mark.parametrize("conv", [c for c in SPECS if issubclass(c, MessagePassing)], ids=lambda c: c.__name__)
def test_the_constructor_is_judged_as_the_call_judges_it(conv):
    spec = SPECS[conv]
    for options in (*spec.options, *spec.random):
        assert CONVS[conv].why_declined(pair_of(spec, options)[0]) is None
    for options in spec.declined:
        stock, fast = pair_of(spec, options)
        run(fast, data_for(spec, options, "unsorted", spec.takes[0]))
        reason = why_stock(stock) or CONVS[conv].why_declined(stock)
        if conv is pyg.NNConv:  # whose size decides, too: large ones run in blocks
            assert reason is None
        else:
            assert record_of(fast).reason == reason, options


@pytest.mark.parametrize("own", [False, True], ids=["known", "own"])
def test_strict_raises_in_the_call_that_would_run_as_stock(own):
    layer = Own() if own else pyg.GCNConv(6, 3)
    model = stretto.accelerate(torch.nn.ModuleDict({"conv": layer}), strict=True)
    keys, state = set(layer.__dict__), list(model.state_dict())
    model["conv"](X, EDGE_INDEX)
    bad = X.view(1, 1, 30, 6)
    with pytest.raises(stretto.StrettoError, match=r"layer 'conv' \(\w+\).*4 dimensions.*without strict"):
        model["conv"](bad, EDGE_INDEX)
    assert set(layer.__dict__) == keys
    assert list(model.state_dict()) == state
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other["conv"](X, EDGE_INDEX), model["conv"](X, EDGE_INDEX))
    stretto.accelerate(model)["conv"](bad, EDGE_INDEX)  # allowed again
    stretto.accelerate(model, strict=True)
    stretto.restore(model)["conv"](bad, EDGE_INDEX)
    stretto.accelerate(model)["conv"](bad, EDGE_INDEX)


def test_strict_ends_with_its_context():
    conv = stretto.accelerate(pyg.GCNConv(6, 3))
    with stretto.accelerated(conv, strict=True), pytest.raises(stretto.StrettoError, match="strict"):
        conv(X.view(1, 1, 30, 6), EDGE_INDEX)
    conv(X.view(1, 1, 30, 6), EDGE_INDEX)


def test_strict_lets_a_lazy_layer_begin():
    conv = stretto.accelerate(pyg.GCNConv(-1, 3), strict=True)
    conv(X, EDGE_INDEX)
    conv(X, EDGE_INDEX)
    assert record_of(conv).path == "fast"


@pytest.mark.parametrize("how", ["model", "in place", "function"])
def test_inside_torch_compile_the_report_says_that_stock_is_compiled(how):
    model = stretto.accelerate(Net())
    wanted = model(X, EDGE_INDEX)
    torch._dynamo.reset()
    run = model
    if how == "in place":
        model.compile(backend="eager", fullgraph=True)
    else:
        run = torch.compile(model if how == "model" else lambda *a: model(*a), backend="eager", fullgraph=True)
    torch.testing.assert_close(run(X, EDGE_INDEX), wanted)
    for of in (model, run) if how == "model" else (model,):
        rows = stretto.report(of).rows[:2]
        assert [row.layer for row in rows] == ["first", "own"]
        assert {row.path for row in rows} == {"compiled"}
        assert {row.reason for row in rows} == {"inside torch.compile: stock's code is compiled"}
    with torch.compiler.set_stance("force_eager"):
        run(X, EDGE_INDEX)
    assert {row.path for row in stretto.report(model).rows[:2]} == {"fast"}


def test_a_layer_whose_explainer_was_switched_off_is_fast_whatever_was_copied_before():
    """PyG puts propagate() on the instance then, and writes it anew onto the class of what it unpickles."""
    conv, x, edge_index = pyg.GATConv(6, 3), torch.randn(5, 6), torch.tensor([[0, 1, 2], [1, 2, 3]])
    conv.explain = False
    pickle.loads(pickle.dumps(stretto.accelerate(pyg.GATConv(6, 3))))
    stretto.accelerate(conv)(x, edge_index)
    assert record_of(conv).path == "fast", record_of(conv).reason


@pytest.mark.parametrize("door", ["accelerate", "accelerated", "patch"])
def test_a_door_that_fails_while_it_opens_changes_nothing(door, monkeypatch):
    model = Net()
    before = identities(model)
    monkeypatch.setenv("STRETTO_MALLOC", "nonsense")  # read after the first changes are made
    doors = {
        "patch": stretto.patch,
        "accelerate": lambda: stretto.accelerate(model, strict=True),
        "accelerated": lambda: stretto.accelerated(model, strict=True).__enter__(),
    }
    with pytest.raises(stretto.StrettoError, match="STRETTO_MALLOC"):
        doors[door]()
    assert identities(model) == before
    assert not stretto.is_patched()
    monkeypatch.delenv("STRETTO_MALLOC")
    stretto.accelerate(model)(X, EDGE_INDEX)
    assert record_of(model.first).path == "fast"


@pytest.mark.parametrize("name", ["accelerate", "accelerated", "restore", "report", "explain"])
@pytest.mark.parametrize("bad", [None, [pyg.GCNConv(2, 2)], pyg.GCNConv], ids=["None", "list", "class"])
def test_what_is_no_model_is_refused_by_name(name, bad):
    door = getattr(stretto, name)
    if name == "accelerated":
        door = lambda model: stretto.accelerated(model).__enter__()  # noqa: E731
    with pytest.raises(stretto.StrettoError, match=rf"{name}: 'model' is a \w+, wanted a torch.nn.Module"):
        door(bad)


class Twice(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize("inside", [False, True], ids=["restore", "context"])
def test_a_layer_that_is_parametrized_meanwhile_is_given_back(inside):
    """torch gives it a class of its own then, derived from the one it finds."""
    stock, fast = pyg.GATConv(6, 4), pyg.GATConv(6, 4)
    fast.load_state_dict(stock.state_dict())
    context = stretto.accelerated(fast)
    if inside:
        context.__enter__()
    else:
        stretto.accelerate(fast)
    for conv in (stock, fast):
        torch.nn.utils.parametrize.register_parametrization(conv, "att_src", Twice())
    stretto.accelerate(fast, strict=True)
    torch.testing.assert_close(fast(X, EDGE_INDEX), stock(X, EDGE_INDEX))
    assert stretto.report(fast).rows[0].path == "fast"
    if inside:
        context.__exit__(None, None, None)
    else:
        stretto.restore(fast)
    assert type(fast).__bases__ == (pyg.GATConv,)
    assert "not accelerated" in stretto.report(fast).rows[0].reason
    torch.testing.assert_close(fast(X, EDGE_INDEX), stock(X, EDGE_INDEX))
    torch.nn.utils.parametrize.remove_parametrizations(fast, "att_src")
    assert type(fast) is pyg.GATConv


def test_the_line_counts_what_the_constructor_decides_and_tells_each_reason_once(caplog, monkeypatch):
    monkeypatch.setattr(told, "_said", set())

    class Odd(Own):
        def message(self, x_j):
            return x_j * self.training

    kinds = [pyg.GCNConv(6, 6), *(pyg.GCNConv(6, 6, aggr="max") for _ in range(2)), Odd(), Odd()]
    model = torch.nn.ModuleList(kinds)
    with caplog.at_level("INFO", logger="stretto"):
        stretto.accelerate(model)
        for conv in model:
            conv(X, EDGE_INDEX)
    line, *others = [record.getMessage() for record in caplog.records]
    assert not any("GCNConv" in other or "Odd" in other for other in others)
    assert line.startswith("stretto: accelerated 1 of 5 layers; 4 stock: GCNConv (aggr is max), Odd (no fast path: ")
    assert line.count("Odd") == 1
