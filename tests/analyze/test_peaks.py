"""Ceilings: what they say of an op, how close an index's rows are, and that measuring them leaves the process alive."""

import dataclasses

import pytest
import torch

from stretto import datasets
from stretto.machine import ceilings as peaks
from stretto.machine import probing
from stretto.machine.file import Machine, check
from stretto.observe.locality import closeness, index_of
from stretto.observe.models import as_data, make
from stretto.observe.predict import bound, least_seconds, op_seconds
from stretto.observe.trace import Recorder
from stretto.observe.workload import Workload

MACHINE = Machine(
    peak_launch=1e-9,
    peak_gemm={"float32": 1e11, "float64": 5e10},
    peak_stream=[(1e4, 5e10), (1e6, 8e10), (1e8, 1e10)],
    peak_gather=[(64, 1e4, 4e10), (64, 1e8, 2e9), (256, 1e4, 8e10), (256, 1e8, 4e9)],
)


def test_between_two_points_the_higher_ceiling_holds():
    assert peaks.stream_rate(MACHINE, 1.0) == 8e10  # more bytes were moved faster: a few cannot be slower by nature
    assert peaks.stream_rate(MACHINE, 5e7) == 8e10
    assert peaks.stream_rate(MACHINE, 1e9) == 1e10
    assert peaks.gather_rate(MACHINE, 256, 1e7) == 8e10
    assert peaks.gather_rate(MACHINE, 100, 1e8) == 4e9
    assert peaks.gather_rate(MACHINE, 16, 1e8) == 2e9 / 4  # a quarter of a line takes a line
    assert peaks.gather_rate(MACHINE, 4096, 1e9) == 4e9


def test_types_have_ceilings_of_their_own():
    assert peaks.flop_rate(MACHINE, "float64") == 5e10
    assert peaks.flop_rate(MACHINE, "bfloat16") == 1e11
    assert peaks.flop_rate(Machine()) == max(point[2] for point in Machine().gemm)


@pytest.mark.parametrize("close", [0.0, 0.25, 1.0])
def test_least_time_by_hand(close):
    data = as_data(datasets.load_graph("er:2000:20000"), width=64)
    trace = Workload(make("sage", 64, 8, 4), data, "infer").trace()
    op = next(op for op in trace if op.name == "aten::index_select")
    moved = op.inputs[-1].numel * 256
    # Nothing else takes time; 2000 rows of 256 bytes lie beyond what is fast.
    wide = dataclasses.replace(MACHINE, peak_stream=[(1.0, 1e15)], peak_gather=[(256, 1e4, 8e10), (256, 4e5, 4e9)])
    want = moved * (close / 8e10 + (1 - close) / 4e9)
    assert least_seconds(dataclasses.replace(op, close=close), wide) == pytest.approx(want)
    product = next(op for op in trace if op.cost.family == "gemm")
    slow = dataclasses.replace(wide, peak_gemm={"float32": 1.0})
    assert least_seconds(product, slow) == pytest.approx(2 * 2000 * 64 * 8, rel=0.01)  # and a bias
    narrow = dataclasses.replace(MACHINE, peak_stream=[(1.0, 1e3)])
    relu = next(op for op in trace if "relu" in op.name)
    assert least_seconds(relu, narrow) == pytest.approx(2 * 2000 * 8 * 4 / 1e3)  # read and written once


def test_random_values_are_bound_by_drawing_them():
    recorder = Recorder()
    with recorder.recording():
        torch.nn.functional.dropout(torch.ones(1000, 100), 0.5)
    (op,) = [op for op in recorder.trace if op.cost.family == "draw"]
    slow = dataclasses.replace(MACHINE, draw=1e6, peak_draw=4e6)
    assert bound(op, slow) == "compute"
    assert op_seconds(op, slow) == pytest.approx(0.1 + slow.host)
    assert least_seconds(op, slow) == pytest.approx(0.025)


def test_closeness():
    order = torch.arange(100_000)
    assert closeness(order, 256) > 0.99
    assert closeness(order // 7, 256) > 0.99
    assert closeness(torch.zeros(50, dtype=torch.int32), 4) > 0.97
    assert closeness(order[:0], 4) == 1.0
    torch.manual_seed(0)
    assert closeness(order[torch.randperm(100_000)], 256) < 0.01
    few = torch.randint(50, (5000,))
    assert closeness(few, 256) > 0.9  # fifty rows stay in a cache
    assert closeness(few, 1 << 20) < 0.2  # fifty of a megabyte do not


def test_the_index_is_found():
    table, index = torch.arange(12).view(6, 2), torch.tensor([1, 5, 2])
    assert index_of((table, [None, index])) is index
    assert torch.equal(index_of((table, 0, index[:, None].expand(3, 2))), index)
    assert index_of((table, 1.0)) is None
    assert index_of((table, torch.tensor(3))) is None


def test_a_trace_knows_how_close_rows_are():
    data = as_data(datasets.load_graph("grid:60"), width=64)
    gather = lambda d: next(op for op in Workload(make("sage", 64, 8, 4), d, "infer").trace() if "index_sel" in op.name)  # noqa: E731
    torch.manual_seed(0)
    ordered = gather(data).close
    label = torch.randperm(data.num_nodes)
    data.edge_index = label[data.edge_index][:, torch.randperm(data.edge_index.size(1))]
    assert ordered > 0.9
    assert gather(data).close < 0.9 * ordered


def test_measured_ceilings(needs_native, monkeypatch):
    half = peaks.half_products(1)  # a type that the machine cannot run ends a process, not this one
    assert set(half) <= {"float16", "bfloat16"}
    assert all(rate > 0 for rate in half.values())
    monkeypatch.setattr(probing, "SECONDS", 0.0)
    monkeypatch.setattr(probing, "LEAST", 1)
    with probing.probing(1) as probes:
        machine = probes.machine()
    check(machine.to_dict(), "the machine")
    assert set(machine.peak_gemm) >= {"float32", "float64"}
    for name, peak in (("stream", machine.peak_stream), ("gather", machine.peak_gather)):
        usual = {point[:-2]: point[-2] for point in getattr(machine, name)}
        assert {point[:-1] for point in peak} == usual.keys()
        assert all(point[-1] >= usual[point[:-1]] for point in peak)  # the fastest call is no slower than most
    assert max(point[2] for point in machine.gemm) <= machine.peak_gemm["float32"]
    assert machine.peak_launch <= machine.launch
    assert machine.peak_draw >= machine.draw
    # What accelerated layers multiply by may be faster than torch's library, and is never slower.
    for ours, torchs in zip(machine.own_gemm, machine.gemm, strict=True):
        assert ours[:2] == torchs[:2]
        assert ours[2] >= torchs[2]
