"""On a GPU: whole layers as tapes at sizes where our own products run, launched by the driver; and those products."""

import copy
import importlib
import threading

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn

import stretto
from stretto import Graph, kernels
from stretto.ops.variants import VARIANTS
from tests.gpu.inputs import SETTLED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
NODES, EDGES, INNER, OUT = 33_000, 600_000, 64, 128  # enough for the tuner to try variants, where there are several
LAYERS = {
    "gcn": lambda: pyg.GCNConv(INNER, OUT),
    "sage": lambda: pyg.SAGEConv(INNER, OUT),
    "sage, narrow": lambda: pyg.SAGEConv(INNER, 40),
    "gin": lambda: pyg.GINConv(nn.Sequential(nn.Linear(INNER, OUT), nn.ReLU(), nn.Linear(OUT, OUT))),
    "gin, narrow": lambda: pyg.GINConv(nn.Sequential(nn.Linear(INNER, 40), nn.ReLU(), nn.Linear(40, 40)), eps=0.3),
    "gat": lambda: pyg.GATConv(INNER, 16, heads=4),
}

product = importlib.import_module("stretto.ops.product").product


@pytest.fixture
def edge_index():
    torch.manual_seed(0)
    Graph.cache_clear()
    pairs = torch.randint(0, NODES, (2, EDGES))
    pairs[1, :5000] = 7
    return pairs.cuda()


def both(layer, x, edge_index, upstream):
    """Result and gradients, as the layer's own type."""
    out = layer(x, edge_index)
    wanted = [x, *layer.parameters()] if x.requires_grad else list(layer.parameters())
    return [out.detach(), *torch.autograd.grad(out, wanted, upstream.to(out.dtype))]


def near_a_kink(exact, x, edge_index):
    """Nodes where rounding may switch a ReLU on or off: their gradients differ by more than rounding, in stock too."""
    met = []
    hooks = [
        m.register_forward_hook(lambda _m, given, _out: met.append(given[0]))
        for m in exact.modules()
        if isinstance(m, nn.ReLU)
    ]
    with torch.no_grad():
        exact(x.double(), edge_index)
    for hook in hooks:
        hook.remove()
    near = torch.zeros(NODES, dtype=torch.bool, device=CUDA)
    for given in met:
        near |= (given.abs() < 1e-5 * given.abs().max()).any(1)
    assert near.sum() < NODES // 2
    return near


@pytest.fixture
def no_cusparse(monkeypatch):
    """Chosen, it would run outside tapes."""
    ours = tuple(v for v in VARIANTS["spmm"]["cuda"] if v.backend != "torch")
    monkeypatch.setitem(VARIANTS["spmm"], "cuda", ours)


def tapes_of(edge_index):
    """Every tape of the graph, and of that with self-loops."""
    graph = Graph.of(edge_index, NODES)
    graphs = [graph, *([graph.__dict__["with_self_loops"]] if "with_self_loops" in graph.__dict__ else [])]
    matrices = {id(m): m for g in graphs for m in (g.csr, g.edge_csr)}
    kept = [t for m in matrices.values() for t in m.cache.get("tapes", {}).items()]
    return {key[0][0]: t for key, t in kept if key[0][0] in ("forward", "backward")}


@pytest.mark.parametrize("grads", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_played_layers_err_no_more_than_stock(name, grads, edge_index, no_cusparse):
    stock = LAYERS[name]().cuda()
    ours, exact = stretto.accelerate(copy.deepcopy(stock)), copy.deepcopy(stock).double()
    for call in range(SETTLED):
        torch.manual_seed(call)
        x = torch.randn(NODES, INNER, device=CUDA, requires_grad=grads)
        upstream = torch.randn(ours(x, edge_index).shape, device=CUDA)
        upstream[near_a_kink(exact, x, edge_index)] = 0
        got = both(ours, x, edge_index, upstream)
    wanted = both(exact, x.detach().double().requires_grad_(grads), edge_index, upstream)
    theirs = both(stock, x, edge_index, upstream)
    for one, other, right in zip(got, theirs, wanted, strict=True):
        assert (one - right).norm() <= 2 * (other - right).norm() + 1e-6 * right.norm()
    found = tapes_of(edge_index)
    assert {key: type(t).__name__ for key, t in found.items()} == {"forward": "Tape", "backward": "Tape"}
    row = importlib.import_module("stretto.kernels.triton.tape")._Row
    rows = [part for t in found.values() for part in t.parts if isinstance(part, row)]
    assert rows or name == "sage, narrow"  # whose products may all be torch's
    assert all(row.burst is not None for row in rows)  # the driver took every launch


@pytest.mark.parametrize("name", ["sage", "gin", "gat"])
def test_every_play_has_the_same_bits(name, edge_index):
    layer = stretto.accelerate(LAYERS[name]().cuda())
    x, upstream = torch.randn(NODES, INNER, device=CUDA, requires_grad=True), None
    for _ in range(SETTLED):
        upstream = torch.randn_like(layer(x, edge_index)) if upstream is None else upstream
        before = both(layer, x, edge_index, upstream)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(before, both(layer, x, edge_index, upstream), strict=True))


def test_changed_weights_are_read_and_other_sizes_are_other_tapes(edge_index):
    stock = LAYERS["gin"]().cuda()
    ours = stretto.accelerate(stock)
    x = torch.randn(NODES, INNER, device=CUDA)
    plain = copy.deepcopy(stock)
    stretto.restore(plain)
    for _ in range(SETTLED):
        with torch.no_grad():
            for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
                p.mul_(0.97)
                q.copy_(p)
        torch.testing.assert_close(ours(x, edge_index), plain(x, edge_index), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype, edge_index):
    stock = LAYERS["sage"]().cuda()
    ours = stretto.accelerate(copy.deepcopy(stock).to(dtype))
    x = torch.randn(NODES, INNER, device=CUDA)
    upstream = torch.randn(NODES, OUT, device=CUDA)
    for _ in range(SETTLED):
        got = both(ours, x.to(dtype).requires_grad_(), edge_index, upstream)
    wanted = both(stock, x.requires_grad_(), edge_index, upstream)
    for one, right in zip(got, wanted, strict=True):
        assert one.dtype == dtype
        assert (one.float() - right).norm() <= 2e-2 * right.norm()
    assert {type(t).__name__ for t in tapes_of(edge_index).values()} == {"Tape"}


def test_other_streams_and_threads_play_too(edge_index):
    layer = stretto.accelerate(LAYERS["gin"]().cuda())
    x, upstream = torch.randn(NODES, INNER, device=CUDA, requires_grad=True), torch.randn(NODES, OUT, device=CUDA)
    for _ in range(SETTLED):
        wanted = both(layer, x, edge_index, upstream)
    torch.cuda.synchronize()
    found = {}

    def elsewhere():  # a thread that has never spoken to the device
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            found["got"] = both(layer, x, edge_index, upstream)
        side.synchronize()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    here = [both(layer, x, edge_index, upstream) for _ in range(5)]
    thread.join()
    torch.cuda.synchronize()
    for got in (found["got"], *here):
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_a_step_of_large_layers_can_be_captured(edge_index):
    net = stretto.accelerate(pyg.GIN(INNER, OUT, 2, 40).cuda())
    x, y = torch.randn(NODES, INNER, device=CUDA), torch.randint(0, 40, (NODES,), device=CUDA)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def step():
        optimizer.zero_grad(set_to_none=False)
        loss = nn.functional.cross_entropy(net(x, edge_index), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(SETTLED):
            step()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        loss = step()
    start = {k: v.clone() for k, v in net.state_dict().items()}
    for _ in range(3):
        captured.replay()
    replayed = loss.clone()
    net.load_state_dict(start)
    for _ in range(3):
        eager = step()
    torch.testing.assert_close(replayed, eager, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gcn", "sage", "gin"])
def test_both_layers_of_a_training_step_are_played(name, edge_index, no_cusparse):
    """The first reads a product that is kept across steps; the second multiplies first."""
    net = stretto.accelerate(importlib.import_module("benchmarks.suites.gpu").Net(name, (INNER, OUT, 40)).cuda())
    x, y = torch.randn(NODES, INNER, device=CUDA), torch.randint(0, 40, (NODES,), device=CUDA)
    losses = []
    for _ in range(SETTLED):
        loss = nn.functional.cross_entropy(net(x, edge_index), y)
        loss.backward()
        losses.append(loss.detach())
    graph = Graph.of(edge_index, NODES)
    matrix = (graph.with_self_loops if name == "gcn" else graph).csr
    kept = [(key[0][0], t) for key, t in matrix.cache["tapes"].items() if key[0][0] in ("forward", "backward")]
    tape = importlib.import_module("stretto.kernels.triton.tape").Tape
    assert sorted(what for what, t in kept if isinstance(t, tape)) == ["backward"] * 2 + ["forward"] * 2
    assert all(t <= 1 for _, t in kept if isinstance(t, int))  # calls before the first product was kept
    assert all(torch.equal(losses[-1], one) for one in losses[-5:])


def test_gradients_of_weights_err_no_more_than_torch():
    """ops.product of a tall matrix transposed: our kernel where both are wide, torch's elsewhere."""
    torch.manual_seed(0)
    for rows, m, n, ours in ((40_000, 256, 128, True), (40_001, 40, 256, True), (40_000, 16, 128, False)):
        grad, x = torch.randn(rows, m, device=CUDA), torch.randn(rows, n, device=CUDA)
        wanted = grad.double().t() @ x.double()
        got, theirs = product(grad.t(), x), grad.t() @ x
        assert (got - wanted).norm() <= 1.2 * (theirs - wanted).norm()
        assert torch.equal(got, theirs) != ours
        assert torch.equal(got, product(grad.t(), x))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert product(grad.t(), x).dtype == torch.bfloat16
    low = product(grad.bfloat16().t(), x.bfloat16())
    assert low.dtype == torch.bfloat16
    assert (low.float() - wanted).norm() <= 1e-2 * wanted.norm()


def test_torch_is_left_to_round_to_tf32_where_it_is_allowed_to():
    x, w = torch.randn(40_000, 128, device=CUDA), torch.randn(256, 128, device=CUDA)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert torch.equal(product(x, w.t()), x @ w.t())
    finally:
        torch.set_float32_matmul_precision(before)
    assert (product(x, w.t()) - x.double() @ w.double().t()).norm() < 1e-6 * (x @ w.t()).norm()


def test_running_out_of_memory_in_backward_says_what_would_fit(edge_index):
    layer = stretto.accelerate(pyg.SAGEConv(1024, INNER).cuda())  # the gradient of x takes 130 MB
    x = torch.randn(NODES, 1024, device=CUDA, requires_grad=True)
    for _ in range(SETTLED):
        before = layer(x, edge_index)
        torch.autograd.grad(before.sum(), x)
    out = layer(x, edge_index)
    upstream = torch.randn_like(out)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + (2 << 20)) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError, match=r"stretto: .*rows would fit"):
            out.backward(upstream)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.equal(layer(x, edge_index), before)
    torch.autograd.grad(layer(x, edge_index).sum(), x)


def test_the_kernels_of_a_device_can_be_recorded():
    assert hasattr(kernels.backend(CUDA), "tape")


@pytest.mark.parametrize("name", ["gcn", "gat"])
def test_a_batch_of_gradients(edge_index, name):
    """What is kept for backward is given up after the last member of the batch, not after the first."""
    torch.manual_seed(0)
    layer = stretto.accelerate(LAYERS[name]().cuda())
    x = torch.randn(NODES, INNER, device=CUDA, requires_grad=True)
    batch = torch.randn(3, NODES, layer(x, edge_index).size(1), device=CUDA)
    wanted = [torch.autograd.grad(layer(x, edge_index), x, flow)[0] for flow in batch]
    for _ in range(3):  # plain, recorded, played
        (found,) = torch.autograd.grad(layer(x, edge_index), x, batch, is_grads_batched=True)
        for one, many in zip(wanted, found, strict=True):
            assert (many - one).norm() < 1e-5 * one.norm()  # other variants may have been chosen since
