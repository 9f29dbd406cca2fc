"""From counts to time: rates near and far, what a step touches between two uses, costs that decide a prediction."""

import pytest
import torch
from torch_geometric.data import Data

import stretto
from stretto.analyze import Machine
from stretto.kernels import native
from stretto.machine.file import near, near_row
from stretto.observe.models import make
from stretto.observe.predict import farness, needs, step_seconds, times, touched_since
from stretto.observe.trace import Recorder
from stretto.observe.workload import Workload


def traced(call):
    recorder = Recorder()
    with recorder.recording():
        call()
    return recorder.trace


def test_a_rate_lies_between_near_and_far():
    curve = [(1e3, 10.0, 5.0), (1e6, 20.0, 5.0)]
    assert near(curve, 1e3) == 10
    assert near(curve, 1e3, 1.0) == 5
    assert near(curve, 1e3, 0.5) == pytest.approx(1 / (0.5 / 10 + 0.5 / 5))  # half the bytes at each rate
    assert near(curve, 1.0) == 10
    assert near(curve, 1e9) == 20
    assert near([(1e3, 7.0)], 1e3, 1.0) == 7  # a file may give one rate for both
    assert near_row([(4, 1e6, 1.0), (64, 1e6, 3.0), (64, 1e9, 2.0)], 64, 5e8) == 2


def test_far_grows_with_what_was_touched():
    machine = Machine(cache=[(1e6, 0.0), (1e8, 1.0)])
    assert machine.far(0) == machine.far(1e5) == 0
    assert machine.far(1e7) == pytest.approx(0.5)
    assert machine.far(1e12) == 1


def test_a_card_works_while_its_host_goes_on():
    """A step there takes as long as the slower of the two, but for a mask, whose host waits to know how many."""
    x, mask = torch.ones(1000, 100), torch.arange(1000) % 2 == 0
    card = Machine(device="cuda", host=1e-3, host_far=1e-3, stream=[(1e5, 1e12)])
    trace = traced(lambda: (x + 1, x + 2, x + 3))
    assert step_seconds(trace, card) == pytest.approx(3e-3, rel=0.01)  # its host is the slower one
    slow = Machine(device="cuda", host=1e-6, host_far=1e-6, stream=[(1e5, 1e9)])
    alone = 800_000 / 1e9
    assert step_seconds(trace, slow) == pytest.approx(3 * alone, rel=0.01)
    both = step_seconds(trace, Machine(host=1e-3, host_far=1e-3, stream=[(1e5, 1e9)], fresh=1e15))
    assert both == pytest.approx(3 * (alone + 1e-3), rel=0.01)
    even = Machine(device="cuda", host=1e-3, host_far=1e-3, stream=[(1e5, 1e8)], gather=[(256, 1e7, 1e12)])
    y, index = torch.ones(4), torch.arange(500)
    free = step_seconds(traced(lambda: (x + 1, x[index], y + 1, y + 2, y + 3)), even)
    waits = step_seconds(traced(lambda: (x + 1, x[mask], y + 1, y + 2, y + 3)), even)
    assert waits - free == pytest.approx(3e-3, rel=0.2)


def test_bytes_between_two_uses():
    x, y = torch.ones(1000), torch.ones(500)

    def step():
        a = x + 1  # 8000 bytes
        b = y + 1  # 4000
        return a + a, b

    first, second, third = touched_since(traced(step))
    whole = 8000 + 4000 + 12000  # an operand named twice is read twice
    assert first[0] == second[0] == whole  # last used a whole step ago
    half = 8000 / 2 + 4000 + 12000 / 2  # from the middle of the op that made it to the middle of the one that reads it
    assert third[:2] == [half, half]


def test_a_result_takes_the_memory_that_was_freed_last():
    x = torch.ones(1000)

    def step():
        a = x + 1
        del a
        return x * 2

    first, second = touched_since(traced(step))
    assert first[1] == 16000
    assert second[1] == 8000  # the middle of the one to the middle of the other


def test_a_small_step_is_near_and_a_large_one_far():
    machine = Machine(cache=[(1e4, 0.0), (1e6, 1.0)])
    small, large = (traced(lambda n=n: torch.ones(n).add(1).mul(2)) for n in (100, 1 << 20))
    assert max(farness(small, machine)) == 0
    assert max(farness(large, machine)) == 1
    slow = Machine(stream=[(1e5, 1e10, 1e9)], cache=machine.cache)
    assert times(large, slow)[1] > 5 * times(large, Machine(stream=[(1e5, 1e10, 1e10)], cache=machine.cache))[1]


RATES = [(16, 1e3, 1e6, 1e5)]  # near and far


def test_rows_are_read_again_from_where_the_first_time_left_them():
    """1600 bytes of rows from a table of 160: a tenth of them come from afar, and all results go there."""
    x, index = torch.ones(10, 4), torch.arange(100) % 10
    (op,) = traced(lambda: x[index]).ops
    machine = Machine(gather=RATES, stream=[(1e3, 1e9, 1e8)])
    assert needs(op, machine)["gather latency"] == pytest.approx(1600 / 1e6, rel=0.01)
    far = 160 / 1e5 + 1440 / 1e6 + 1440 * (1 / 1e8 - 1 / 1e9)
    assert needs(op, machine, far=1.0)["gather latency"] == pytest.approx(far, rel=0.01)


def test_a_processor_reads_what_it_adds_up_at_random_and_a_card_the_sums():
    out, index, rows = torch.zeros(10, 4), torch.arange(100) % 10, torch.ones(100, 4)
    (op,) = traced(lambda: out.index_add_(0, index, rows)).ops
    table = [(16, 160.0, 1e6), (16, 1600.0, 1e5)]
    taken = {name: needs(op, Machine(device=name, scatter=table))["gather latency"] for name in ("cpu", "cuda")}
    assert taken == {"cpu": pytest.approx(1600 / 1e5, rel=0.01), "cuda": pytest.approx(1600 / 1e6, rel=0.01)}


def test_a_softmax_and_its_gradient_have_rates_of_their_own():
    x = torch.ones(100, 8, requires_grad=True)
    ops = traced(lambda: torch.log_softmax(x, 1).sum().backward()).ops
    forward, back = (op for op in ops if op.cost.family == "softmax")
    machine = Machine(softmax=[(8, 1e3)], softmax_grad=[(8, 1e4)])
    assert needs(forward, machine)["compute"] == pytest.approx(0.8)
    assert needs(back, machine)["compute"] == pytest.approx(0.08)
    assert needs(back, Machine(softmax=[(8, 1e3)]))["compute"] == pytest.approx(0.8)


def test_accumulating_products_are_counted():
    out, a, b = torch.zeros(5, 7), torch.ones(5, 3), torch.ones(3, 7)
    (op,) = traced(lambda: out.addmm_(a, b)).ops
    assert op.cost.flops == 2 * 5 * 3 * 7 + 5 * 7
    assert op.cost.row == 3  # the smallest dimension
    if native.library() is None:
        pytest.skip(f"native kernels are off: {native.why_not()}")
    data = Data(x=torch.randn(50, 6), edge_index=torch.randint(50, (2, 200)))
    fast = Workload(stretto.accelerate(make("sage", 6, 8, 4)), data)
    for _ in range(3):
        fast.run()
    products = [op for op in fast.trace() if "mm" in op.name and op.name.startswith("aten::")]
    assert products
    assert all(op.cost.flops > 0 and op.cost.family == "gemm" for op in products)


def test_rows_of_an_index_and_sums_of_a_row():
    x, where, mask = torch.ones(4, 100), torch.arange(100), torch.rand(100) < 0.5
    (rows,) = [op for op in traced(lambda: x.t()[where]).ops if op.cost.family == "gather"]
    (columns,) = [op for op in traced(lambda: x[:, mask]).ops if op.cost.family == "gather"]
    assert (rows.cost.row, columns.cost.row) == (16, 4)
    slow = Machine(mask=[(1e3, 1.0)])
    assert needs(columns, slow)["gather latency"] == pytest.approx(100, rel=1e-3)
    assert needs(rows, slow)["gather latency"] < 1
    last, first, both = (op.cost.row for op in traced(lambda: (x.sum(-1), x.sum(0), x.sum())).ops if op.cost.flops)
    assert (last, first, both) == (400, 0, 0)


def test_new_memory_is_part_of_a_step_unless_it_is_kept(monkeypatch):
    trace = traced(lambda: torch.ones(12 << 20))
    from stretto.memory import allocator

    monkeypatch.setattr(allocator, "is_kept", lambda: False)
    clears = step_seconds(trace, Machine(fresh=1e6))
    monkeypatch.setattr(allocator, "is_kept", lambda: True)
    assert clears - step_seconds(trace, Machine(fresh=1e6)) == pytest.approx(48 * 1.048576, rel=1e-6)
