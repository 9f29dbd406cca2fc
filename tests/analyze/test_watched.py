"""A watched step runs the ops of a plain one: the same calls, the same results, the same memory."""

import pytest
import torch
from torch.autograd.profiler import profile
from torch_geometric.nn import GATConv, SAGEConv

import stretto
from stretto import datasets
from stretto.analyze import validate
from stretto.compile.choose import MOST_STEPS
from stretto.kernels import native
from stretto.observe.inputs import inputs_of
from stretto.observe.lift import peak
from stretto.observe.look import look
from stretto.observe.models import as_data, make
from stretto.observe.trace import Recorder
from stretto.observe.workload import Workload

PLACES = torch.tensor([0, 4, 4])
MASK = torch.tensor([True, False, True, True, False])
READS = {
    "index_select": lambda x: x.index_select(0, PLACES), "gather": lambda x: x.gather(0, PLACES[:, None].expand(3, 3)),
    "index": lambda x: x[PLACES], "mask": lambda x: x[MASK], "max": lambda x: x.max(0).values,
    "min": lambda x: x.min(1).values, "median": lambda x: x.median(0).values, "sort": lambda x: x.sort(0).values,
    "stable sort": lambda x: x.sort(dim=0, stable=True).values, "topk": lambda x: x.topk(2, 0).values,
    "kthvalue": lambda x: x.kthvalue(2, 0).values, "mode": lambda x: x.mode(0).values,
}  # fmt: skip
WRITES = ("aten::index_add", "aten::scatter", "aten::index_put", "aten::_index_put")


@pytest.mark.parametrize("name", READS)
def test_gradients_are_added_up_in_place_as_in_a_plain_step(name):
    """Under a dispatch mode autograd itself would add out of place: one more copy, and twice the memory."""
    x = torch.randn(5, 3, requires_grad=True)
    out = READS[name](x)
    loss = (out * torch.arange(1.0, out.numel() + 1).view(out.shape)).sum()
    with profile() as plain:
        (wanted,) = torch.autograd.grad(loss, x, retain_graph=True)
    calls = [e.name for e in plain.function_events if e.name.startswith(WRITES)]
    recorder = Recorder()
    with recorder.recording():
        (found,) = torch.autograd.grad(loss, x)
    watched = [op.name.partition(".")[0] for op in recorder.trace if op.name.startswith(WRITES)]
    assert torch.equal(found, wanted)
    assert watched == calls[:1]  # index_add_ calls scatter_add_ for some shapes
    assert watched[0].endswith("_")


def test_gradients_of_gradients_stay_out_of_place():
    x = torch.randn(5, 3, requires_grad=True)
    recorder = Recorder()
    with recorder.recording():
        (first,) = torch.autograd.grad((x.index_select(0, PLACES) ** 3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    counts = torch.bincount(PLACES, minlength=5)[:, None]
    torch.testing.assert_close(second, 6 * x.detach() * counts)


@pytest.mark.parametrize("fast", [False, True], ids=["stock", "accelerated"])
@pytest.mark.parametrize("name", ["gcn", "sage", "gin", "gat", "sgc", "tag", "appnp"])
def test_memory_is_what_the_allocator_hands_out(name, fast, monkeypatch):
    """Few nodes have labels, so that the gradient of the loss is spread out into zeros near the peak."""
    if fast and native.library() is None:
        pytest.skip(f"native kernels are off: {native.why_not()}")
    monkeypatch.setenv("STRETTO_TUNE", "analytic")  # one plan, from the first step on
    torch.manual_seed(0)
    data = as_data(datasets.load_graph("er:400:2000"), width=32)
    data.train_mask = torch.arange(400) < 20
    model = make(name, 32, 8, int(data.y.max()) + 1)
    workload = Workload(stretto.accelerate(model) if fast else model, data)
    for _ in range(4):
        workload.run()
    allocated = validate.peak_memory(workload)
    if allocated is None:
        pytest.skip("this torch does not tell what its allocator hands out")
    assert workload.trace().peak_bytes == pytest.approx(allocated, rel=0.02)
    if name == "gat":  # from a probe, too: also what its kernels take for themselves
        assert look(workload, inputs_of(model, data)).trace.peak_bytes == pytest.approx(allocated, rel=0.02)


@pytest.mark.parametrize("aggr", ["max", "mean"])
def test_memory_of_a_gradient_between_types(aggr):
    """The gradient of a maximum multiplies a mask by numbers, which torch turns into numbers first."""
    data = as_data(datasets.load_graph("er:500:4000"), width=32)
    workload = Workload(SAGEConv(32, 8, aggr=aggr), data)
    trace = workload.trace()
    assert trace.peak_bytes == peak(trace)
    assert trace.peak_bytes == pytest.approx(validate.peak_memory(workload), rel=0.01)


@pytest.mark.parametrize("fast", [False, True], ids=["stock", "accelerated"])
def test_composite_ops_are_seen_as_what_they_run_in_inference_mode_too(fast):
    """There they reach a dispatch mode whole: a linear would be no product."""

    def ops(mode):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Dropout(0.5), torch.nn.LayerNorm(6))
        conv = GATConv(6, 3, heads=2)
        conv = stretto.accelerate(conv) if fast else conv
        x, edges = torch.randn(9, 4), torch.randint(9, (2, 30))
        with mode():
            for _ in range(MOST_STEPS):  # plans are settled on
                conv(net(x), edges)
            with Recorder(net).recording() as seen:
                conv(net(x), edges)
        return seen.trace

    whole, usual = ops(torch.inference_mode), ops(torch.no_grad)
    assert not whole.unknown
    real = [[op.name for op in trace if op.cost.family != "view"] for trace in (whole, usual)]
    assert real[0] == real[1]
    assert whole.flops == usual.flops > 0
