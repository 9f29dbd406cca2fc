"""The doors: accelerate, restore, accelerated, patch; what a user's model must survive; everything put back."""

import copy
import io
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric.data import HeteroData
from torch_geometric.explain.algorithm.utils import clear_masks, set_masks

import stretto
from stretto.layers import CONVS, record_of
from stretto.layers.layer import stock_of
from stretto.plug.classes import FAST

N, EDGES = 30, 140
ROOT = Path(__file__).resolve().parents[2]


class Net(torch.nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.first = pyg.GCNConv(6, 16)
        self.second = pyg.SAGEConv(16, 8)
        self.third = pyg.GCNConv(8, 3)
        self.dropout = dropout

    def forward(self, x, edge_index):
        x = self.first(x, edge_index).relu()
        x = torch.nn.functional.dropout(x, self.dropout, self.training)
        return self.third(self.second(x, edge_index).relu(), edge_index)


class Odd(pyg.MessagePassing):
    """A layer without a fast path: its messages depend on more than their arguments."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j * self.training


@pytest.fixture
def data():
    torch.manual_seed(0)
    return torch.randn(N, 6), torch.randint(N, (2, EDGES))


def test_same_results_and_same_parameters(data):
    stock = Net()
    fast = copy.deepcopy(stock)
    parameters = list(fast.parameters())
    assert stretto.accelerate(fast) is fast
    torch.testing.assert_close(fast(*data), stock(*data))
    assert all(a is b for a, b in zip(parameters, fast.parameters(), strict=True))
    assert list(stock.state_dict()) == list(fast.state_dict())
    assert repr(stock) == repr(fast)
    assert isinstance(fast.first, pyg.GCNConv)
    assert [r.path for r in stretto.report(fast).rows] == ["fast"] * 3


def _identity(model):
    """Everything the plug-in could touch, by identity."""
    classes = {name: id(type(m)) for name, m in model.named_modules()}
    attributes = {
        name: {k: id(v) for k, v in m.__dict__.items() if k != "training"} for name, m in model.named_modules()
    }
    forwards = {stock: id(stock.__dict__.get("forward")) for stock in CONVS}
    return classes, attributes, forwards


def test_restore_leaves_nothing_behind(data):
    model = Net()
    before = _identity(model)
    stretto.accelerate(stretto.accelerate(model))
    model(*data)
    stretto.restore(stretto.restore(model))
    assert _identity(model) == before


def test_the_context_manager_restores_after_an_exception(data):
    model = Net()
    before = _identity(model)

    def fail_inside():
        with stretto.accelerated(model):
            assert stock_of(type(model.first)) is not None
            with stretto.accelerated(model):
                model(*data)
            assert stock_of(type(model.first)) is not None  # the inner one leaves what it found
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail_inside()
    assert _identity(model) == before


def test_patch_reaches_models_built_before_and_after_and_is_undone(data):
    before_model = Net()
    before = _identity(before_model)
    stretto.patch()
    try:
        stretto.patch()
        stretto.unpatch()
        assert stretto.is_patched()
        after_model = Net()
        for model in (before_model, after_model):
            model(*data)
            assert {r.path for r in stretto.report(model).rows} == {"fast"}
    finally:
        stretto.unpatch()
    assert not stretto.is_patched()
    assert _identity(before_model) == before
    stretto.unpatch()  # once too often: nothing to undo
    assert _identity(before_model) == before


def test_patch_leaves_subclasses_to_themselves(data):
    class Mine(pyg.GCNConv):
        def message(self, x_j, edge_weight):
            return 2 * super().message(x_j, edge_weight)

    conv = Mine(6, 4)
    wanted = conv(*data)
    stretto.patch()
    try:
        assert torch.equal(conv(*data), wanted)
    finally:
        stretto.unpatch()
    assert torch.equal(stretto.accelerate(conv)(*data), wanted)
    assert type(conv) is Mine


def test_disable_makes_it_do_nothing(monkeypatch):
    monkeypatch.setenv("STRETTO_DISABLE", "1")
    model = stretto.accelerate(Net())
    stretto.patch()
    assert type(model.first) is pyg.GCNConv
    assert not stretto.is_patched()


def test_strict_names_the_layers_without_a_fast_path():
    model = torch.nn.ModuleList([pyg.GCNConv(4, 4), Odd()])
    with pytest.raises(stretto.StrettoError, match="Odd"):
        stretto.accelerate(model, strict=True)
    assert type(model[0]) is pyg.GCNConv  # nothing half-changed


def test_one_line_says_what_was_accelerated(caplog):
    with caplog.at_level(logging.INFO, logger="stretto"):
        stretto.accelerate(torch.nn.ModuleList([pyg.GCNConv(4, 4), Odd()]))
    assert "accelerated 1 of 2 layers; 1 stock: Odd" in caplog.text


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save", "replicate"])
def test_copies_stay_fast_and_equal(data, how):
    model = stretto.accelerate(Net())
    wanted = model(*data)
    if how == "deepcopy":
        other = copy.deepcopy(model)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    elif how == "torch.save":
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    else:
        other = copy.deepcopy(model)
        for name, child in list(other.named_children()):
            copied = child._replicate_for_data_parallel()
            copied._parameters = child._parameters
            setattr(other, name, copied)
    torch.testing.assert_close(other(*data), wanted)
    assert record_of(other.first).path == "fast"


def test_state_dict_goes_both_ways(data):
    stock, fast = Net(), stretto.accelerate(Net())
    fast.load_state_dict(stock.state_dict())
    torch.testing.assert_close(fast(*data), stock(*data))
    other = stretto.accelerate(Net())
    stock.load_state_dict(other.state_dict())
    torch.testing.assert_close(other(*data), stock(*data))


@pytest.mark.parametrize("order", ["before", "after"])
def test_loss_curves_match_over_fifty_steps(data, order):
    x, edge_index = data
    y = torch.randint(3, (N,))
    losses = {}
    for kind in ("stock", "fast"):
        torch.manual_seed(1)
        model = Net(dropout=0.5)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01) if order == "before" else None
        if kind == "fast":
            stretto.accelerate(model)
        optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=0.01)
        torch.manual_seed(2)
        losses[kind] = []
        for _ in range(50):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x, edge_index), y)
            loss.backward()
            optimizer.step()
            losses[kind].append(loss.item())
    torch.testing.assert_close(torch.tensor(losses["fast"]), torch.tensor(losses["stock"]), rtol=2e-3, atol=2e-3)


def test_train_eval_modes_types_and_no_grad(data):
    x, edge_index = data
    stock = Net(dropout=0.5)
    fast = stretto.accelerate(copy.deepcopy(stock))
    for model in (stock, fast):
        model.eval()
    with torch.no_grad():
        torch.testing.assert_close(fast(x, edge_index), stock(x, edge_index))
    with torch.inference_mode():
        torch.testing.assert_close(fast(x, edge_index), stock(x, edge_index))
    stock.double(), fast.double()
    torch.testing.assert_close(fast(x.double(), edge_index), stock(x.double(), edge_index), rtol=1e-9, atol=1e-9)
    stock.bfloat16(), fast.bfloat16()
    torch.testing.assert_close(fast(x.bfloat16(), edge_index), stock(x.bfloat16(), edge_index), rtol=5e-2, atol=5e-2)


def test_autocast(data):
    x, edge_index = data
    stock = Net()
    fast = stretto.accelerate(copy.deepcopy(stock))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted, got = stock(x, edge_index), fast(x, edge_index)
    assert got.dtype == wanted.dtype
    torch.testing.assert_close(got, wanted, rtol=5e-2, atol=5e-2)
    got.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in fast.parameters())


def test_hooks_and_weight_sharing(data):
    model = Net()
    model.third.lin.weight = torch.nn.Parameter(model.third.lin.weight.detach().clone())
    shared = pyg.GCNConv(6, 6)
    tower = torch.nn.ModuleList([shared, shared])
    stretto.accelerate(tower)
    x, edge_index = data
    seen = []
    shared.register_forward_hook(lambda module, inputs, out: seen.append(out))
    out = tower[1](tower[0](x, edge_index), edge_index)
    assert len(seen) == 2
    plain = copy.deepcopy(tower)
    stretto.restore(plain)
    torch.testing.assert_close(out, plain[1](plain[0](x, edge_index), edge_index))


@pytest.mark.parametrize("hook", ["propagate", "message", "aggregate"])
def test_hooks_on_messages_run_as_stock(data, hook):
    conv = stretto.accelerate(pyg.GCNConv(6, 4))
    seen = []
    getattr(conv, f"register_{hook}_forward_hook")(lambda *args: seen.append(1))
    conv(*data)
    assert seen
    assert record_of(conv).path == "stock"
    assert "hook" in record_of(conv).reason


def test_explainers_run_as_stock(data):
    conv = stretto.accelerate(pyg.GCNConv(6, 4))
    set_masks(conv, torch.nn.Parameter(torch.ones(EDGES)), data[1], apply_sigmoid=False)
    conv(*data)
    assert record_of(conv).path == "stock"
    assert "explainer" in record_of(conv).reason
    clear_masks(conv)
    conv(*data)
    assert record_of(conv).path == "fast"


def test_lazy_layers_are_stock_once(data):
    lazy = stretto.accelerate(pyg.GCNConv(-1, 4))
    first = lazy(*data)
    assert "lazy" in record_of(lazy).reason
    torch.testing.assert_close(lazy(*data), first)
    assert record_of(lazy).path == "fast"


def test_shadow_mode_compares_and_falls_back_loudly(data, monkeypatch, caplog):
    monkeypatch.setenv("STRETTO_SHADOW", "1")
    conv = stretto.accelerate(pyg.GCNConv(6, 4))
    conv(*data)
    assert record_of(conv).path == "fast"

    def wrong(self, x, edge_index, edge_weight=None):
        return x.new_zeros(x.size(0), 4)

    from stretto.layers.layer import Layer
    from stretto.plug.dispatch import accelerated_forward

    liar = type("GCNConv", (pyg.GCNConv,), {"forward": accelerated_forward(Layer(pyg.GCNConv, wrong))})
    conv.__class__ = liar
    with caplog.at_level(logging.ERROR, logger="stretto"):
        out = conv(*data)
    assert "differs from stock" in caplog.text
    plain = stretto.restore(copy.deepcopy(conv))
    plain.__class__ = pyg.GCNConv
    torch.testing.assert_close(out, plain(*data))


def test_to_hetero(data):
    x, edge_index = data
    hetero = HeteroData()
    hetero["a"].x, hetero["b"].x = x, torch.randn(12, 6)
    hetero["a", "to", "a"].edge_index = edge_index
    hetero["a", "to", "b"].edge_index = torch.stack([edge_index[0], edge_index[1] % 12])
    hetero["b", "to", "a"].edge_index = torch.stack([edge_index[0] % 12, edge_index[1]])

    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one = pyg.SAGEConv((6, 6), 5)
            self.two = pyg.SAGEConv((5, 5), 3)

        def forward(self, x, edge_index):
            return self.two(self.one(x, edge_index).relu(), edge_index)

    stock = pyg.to_hetero(Two(), hetero.metadata())
    fast = stretto.accelerate(copy.deepcopy(stock))
    wanted = stock(hetero.x_dict, hetero.edge_index_dict)
    got = fast(hetero.x_dict, hetero.edge_index_dict)
    for kind in wanted:
        torch.testing.assert_close(got[kind], wanted[kind])
    assert {r.path for r in stretto.report(fast).rows} == {"fast"}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile itself reads it
def test_torch_compile_gives_the_same(data):
    model = stretto.accelerate(Net())
    wanted = model(*data)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", dynamic=True)(*data), wanted)


def _ddp(rank, port, queue):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(stretto.accelerate(Net()))
    x, edge_index = torch.randn(N, 6) + rank, torch.randint(N, (2, EDGES))
    model(x, edge_index).sum().backward()
    grads = torch.cat([p.grad.flatten() for p in model.parameters()])
    queue.put((rank, grads.tolist(), {r.path for r in stretto.report(model.module).rows}))
    del model  # where it outlives the group, torch may hang: it then joins the group's threads with the GIL held
    torch.distributed.destroy_process_group()


def test_ddp_with_two_ranks():
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    port = 20000 + os.getpid() % 20000
    workers = [context.Process(target=_ddp, args=(rank, port, queue)) for rank in range(2)]
    for worker in workers:
        worker.start()
    results = sorted(queue.get(timeout=200) for _ in workers)
    for worker in workers:
        worker.join(30)
        assert worker.exitcode == 0
    torch.testing.assert_close(torch.tensor(results[0][1]), torch.tensor(results[1][1]))
    assert all(paths == {"fast"} for _, _, paths in results)


def test_running_a_script_with_the_plug_in_on(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch, stretto\n"
        "from torch_geometric.nn import GCNConv\n"
        "conv = GCNConv(4, 2)\n"
        "conv(torch.randn(5, 4), torch.randint(5, (2, 9)))\n"
        "print(sys.argv[1:], stretto.is_patched(), stretto.report(conv).rows[0].path)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "stretto", str(script), "--epochs", "3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "['--epochs', '3'] True fast" in done.stdout


def test_every_class_has_a_fast_twin_that_pickles_by_reference():
    for stock, fast in FAST.items():
        assert issubclass(fast, stock)
        assert pickle.loads(pickle.dumps(fast)) is fast
        assert fast.__name__ == stock.__name__
