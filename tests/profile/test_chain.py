"""A step replayed as a chain of ops: the same ops, values and memory as in the model, which it leaves as it was."""

import time

import pytest
import torch
from torch_geometric import nn as pyg
from torch_geometric.data import Data

import stretto
import stretto.profile
from stretto import StrettoError, datasets
from stretto.analyze import Machine
from stretto.analyze.models import as_data, make
from stretto.analyze.places import results
from stretto.analyze.trace import Recorder
from stretto.analyze.workload import Workload
from stretto.kernels import cpu, denormals, native, pool
from stretto.kernels.denormals import DenormalsAreZero
from stretto.profile import chain_run
from stretto.profile.chain import Made, Pooled, Tape, _flushing, mapped
from stretto.profile.chain_run import run
from stretto.profile.pause import interpret
from stretto.profile.replay import _pauses, _step, is_index, matched, operands, replay, shuffles, verdict


def graph(nodes: int = 300, edges: int = 2000) -> Data:
    data = as_data(datasets.load_graph(f"er:{nodes}:{edges}"), width=12)
    data.y = data.y % 4
    return data


class Normed(torch.nn.Module):
    """Batch norm writes to its buffers, dropout draws, a parameter is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.lin = pyg.SAGEConv(12, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8)

    def forward(self, x, edge_index):
        x = self.norm(self.conv(x, edge_index)).relu()
        return self.lin(torch.nn.functional.dropout(self.lin(x), 0.5, self.training))


MODELS = {
    "gcn": lambda: make("gcn", 12, 8, 4), "gat": lambda: make("gat", 12, 8, 4), "sage": lambda: make("sage", 12, 8, 4),
    "edgeconv": lambda: make("edgeconv", 12, 8, 4), "tag": lambda: make("tag", 12, 8, 4), "normed": Normed,
}  # fmt: skip


def numbers(recorder_call):
    """The floating results of every op, as the recorder's `call` gives them."""
    found = []

    def call(self, function, name, args, kwargs, schema):
        outer = not self._inside
        out = recorder_call(self, function, name, args, kwargs, schema)
        if outer:
            self._inside = True  # the copies are no part of the step
            wanted = "empty" not in name and "set_" not in name  # these hold what was in memory
            found.append([t.detach().clone() for t in results(out) if wanted and t.is_floating_point()])
            self._inside = False
        return out

    return found, call


@pytest.mark.parametrize("fast", [False, True], ids=["stock", "accelerated"])
@pytest.mark.parametrize("name", MODELS)
def test_every_op_gives_what_it_gave_in_the_model(name, fast, monkeypatch):
    if fast and native.library() is None:
        pytest.skip(f"native kernels are off: {native.why_not()}")
    monkeypatch.setenv("STRETTO_TUNE", "analytic")  # one plan, from the first step on
    torch.manual_seed(0)
    model = MODELS[name]()
    workload = Workload(stretto.accelerate(model) if fast else model, graph())
    for _ in range(2):
        workload.run()
    tape = Tape(workload)
    found, call = numbers(Recorder.call)
    monkeypatch.setattr(Recorder, "call", call)
    state = torch.get_rng_state()
    step = Recorder(model, full=False)
    with step.recording():
        workload.run(step)
    inside = [*found]
    found.clear()
    torch.set_rng_state(state)
    again = run(tape)
    assert [name for name, _, _ in again.times] == [name for name, _, _ in step.times]
    assert len(found) == len(inside) == len(tape.calls)
    for call, a, b in zip(tape.calls, inside, found, strict=True):
        for first, second in zip(a, b, strict=True):
            if call.makes or call.schema is None or "_." in call.name or ".out" in call.name:  # else a view
                torch.testing.assert_close(second, first, rtol=1e-5, atol=1e-6, equal_nan=True, msg=call.name)
    assert sum(map(len, found)) > 10


def test_the_model_is_left_as_it_was():
    torch.manual_seed(0)
    model = Normed()
    profile = stretto.profile(model, graph(), machine=Machine(), repeats=1)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    drawn = torch.get_rng_state()
    tape = Tape(profile.workload)  # a step of the model itself: its running means move once
    moved = {k: v.clone() for k, v in model.state_dict().items()}
    assert not torch.equal(before["norm.running_mean"], moved["norm.running_mean"])
    for _ in range(3):
        run(tape)
    for name, value in model.state_dict().items():
        assert torch.equal(value, moved[name]), name
    torch.set_rng_state(drawn)
    replay(profile, repeats=1, seconds=0)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(p.grad is None for p in model.parameters())


def test_memory_is_freed_where_the_model_frees_it():
    """Bytes held by the chain after each op are those that the trace counts."""
    workload = Workload(make("sage", 12, 8, 4), graph())
    trace = workload.trace()
    tape = Tape(workload)
    live, most = set(), 0
    sizes = {}

    def seen(place, args, kwargs):
        nonlocal most
        for tensor, kept in zip(operands((args, kwargs)), _parts(tape.calls[place]), strict=True):
            if isinstance(kept, Made):
                sizes[kept.slot] = tensor.untyped_storage().nbytes()

    run(tape, seen=seen)
    for call in tape.calls:
        live -= set(call.drops)
        live |= {slot for _, slot in call.makes}
        most = max(most, sum(sizes.get(slot, 0) for slot in live))
    unused = trace.peak_bytes - most  # results that no op reads are not seen above
    assert 0 <= unused <= 0.05 * trace.peak_bytes


def test_what_autograd_ran_it_runs_again(monkeypatch):
    workload = Workload(make("gat", 12, 8, 4), graph())
    tape = Tape(workload)
    inside = []
    plain = Recorder.call

    def call(self, function, name, args, kwargs, schema):
        if not self._inside:
            inside.append(torch._C._current_autograd_node() is not None)
        return plain(self, function, name, args, kwargs, schema)

    monkeypatch.setattr(Recorder, "call", call)
    _step(workload)
    in_model = inside.copy()
    inside.clear()
    run(tape)
    assert inside == in_model == [call.backward for call in tape.calls]
    assert any(inside)
    assert not all(inside)


def _parts(call):
    found = []
    mapped((call.args, call.kwargs), found.append)
    return found


def test_indices_are_shuffled_and_nothing_else():
    profile = stretto.profile(make("gcn", 12, 8, 4), graph(), machine=Machine(), repeats=1)
    tape = Tape(profile.workload)
    other, own = shuffles(tape, profile.trace)
    assert own
    assert set(other) == set(own)
    assert all(profile.trace.ops[i].cost.family in ("gather", "scatter") for i in own)
    real, changed = {}, {}
    run(tape, seen=lambda place, args, kwargs: real.setdefault(place, [t.clone() for t in operands((args, kwargs))]))
    run(
        tape,
        instead=other,
        seen=lambda place, args, kwargs: changed.setdefault(place, [t.clone() for t in operands((args, kwargs))]),
    )
    differ = 0
    for place in own:
        for a, b in zip(real[place], changed[place], strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            if is_index(a):
                differ += not torch.equal(a, b)
                assert torch.equal(a.flatten().sort().values, b.flatten().sort().values)
    assert differ >= 0.8 * len(own)


def test_turns_are_compared_where_memory_was_the_same():
    inside = [(1.0, 0), (5.0, 4000), (1.1, 2), (5.1, 4100)]
    alone = [(4.9, 4000), (5.2, 4050), (1.0, 0), (1.2, 0)]
    assert matched(inside, alone) == [(5.0, 5.2), (1.1, 1.0)]
    never = [(1.0, 0)] * 4
    assert len(matched([(5.0, 4000)] * 4, never)) == 4  # told apart by nothing: every turn counts


def test_buffers_of_the_pool_are_taken_and_given_back(monkeypatch):
    """What the step takes from the pool between ops the chain takes too; it keeps none of them between two runs."""
    if native.library() is None:
        pytest.skip(f"native kernels are off: {native.why_not()}")
    monkeypatch.setenv("STRETTO_TUNE", "analytic")
    monkeypatch.setattr(pool, "LEAST", 1)
    pool.clear()  # what others left behind may become idle at any time
    model = make("gin", 12, 8, 4)
    workload = Workload(stretto.accelerate(model), graph(2000, 20000))
    for _ in range(2):
        workload.run()
    model.zero_grad(set_to_none=True)
    before = pool.in_use()
    tape = Tape(workload)
    model.zero_grad(set_to_none=True)
    assert pool.in_use() == before
    assert [value for call in tape.calls for value in call.args if isinstance(value, Pooled)]

    def turn() -> None:
        run(tape)
        workload.run()
        model.zero_grad(set_to_none=True)

    turn()
    kept = pool.kept_bytes()
    for _ in range(3):
        turn()
    assert pool.kept_bytes() == kept  # both made do with the same buffers
    assert pool.in_use() == before


def test_tiny_numbers_count_as_they_did(monkeypatch):
    """An op that ran while tiny numbers counted as zero does so in the chain."""
    if native.library() is None:
        pytest.skip(f"native kernels are off: {native.why_not()}")
    assert not _flushing()
    with DenormalsAreZero():
        assert _flushing()
    monkeypatch.setenv("STRETTO_TUNE", "analytic")
    monkeypatch.setattr(denormals, "LEAST", 1)
    workload = Workload(stretto.accelerate(make("sage", 12, 8, 4)), graph(2000, 20000))
    workload.run()
    tape = Tape(workload)
    inside = [call.flushed for call in tape.calls]
    assert any(inside)
    assert not all(inside)
    found, plain = [], Recorder.call

    def call(self, *arguments):
        if not self._inside:
            found.append(_flushing())
        return plain(self, *arguments)

    monkeypatch.setattr(Recorder, "call", call)
    run(tape)
    assert found == inside


def objects(recorder_call):
    """Tensors that every kernel of ours is handed, as the recorder's `call` sees them: held, so that ids stay apart."""
    found = []

    def call(self, function, name, args, kwargs, schema):
        if schema is None and not self._inside:
            found.append(operands((args, kwargs)))
        return recorder_call(self, function, name, args, kwargs, schema)

    return found, call


@pytest.mark.parametrize("name", ["gcn", "gat", "sage", "bag of words"])
def test_kernels_meet_the_same_objects_as_in_the_model(name, monkeypatch):
    """Kernels remember by the object what they derived of a tensor: with others they would sort weights anew."""
    if native.library() is None:
        pytest.skip(f"native kernels are off: {native.why_not()}")
    monkeypatch.setenv("STRETTO_TUNE", "analytic")
    data = as_data(datasets.load_graph("cora")) if name == "bag of words" else graph()
    model = stretto.accelerate(make("sage" if name == "bag of words" else name, data.x.size(1), 8, 7))
    workload = Workload(model, data)
    for _ in range(3):
        workload.run()
    tape = Tape(workload)
    found, call = objects(Recorder.call)
    sorted_anew, plain = [], cpu.gather_rows
    monkeypatch.setattr(Recorder, "call", call)
    monkeypatch.setattr(cpu, "gather_rows", lambda *args: sorted_anew.append(args) or plain(*args))

    def meets(run):
        found.clear()
        sorted_anew.clear()
        run()
        return [*found], len(sorted_anew)

    first, _ = meets(lambda: _step(workload))
    second, in_model = meets(lambda: _step(workload))
    (alone, outside), (again, _) = meets(lambda: run(tape)), meets(lambda: run(tape))
    assert outside == in_model
    assert alone
    stays = [[a is b for a, b in zip(x, y, strict=True)] for x, y in zip(first, second, strict=True)]
    assert any(map(any, stays)) or name == "gat"  # whose kernels meet only what the step makes
    for kept, a, b, c in zip(stays, second, alone, again, strict=True):
        assert [x is y for x, y in zip(b, c, strict=True)] == kept
        assert all(x is y for x, y, same in zip(a, b, kept, strict=True) if same)
        assert [x.requires_grad for x in a] == [x.requires_grad for x in b]
    assert pattern(second) == pattern(alone)


def pattern(calls):
    """Objects numbered in the order in which they are first met."""
    numbers = {}
    return [[numbers.setdefault(id(tensor), len(numbers)) for tensor in call] for call in calls]


def test_verdicts():
    wide, narrow = {"itself interval": (0.8, 1.1)}, {"itself interval": (0.9, 1.1)}
    assert verdict({"ratio": 1.1} | wide) == verdict({"ratio": 1.1} | narrow) == "met"
    assert verdict({"ratio": 1.2} | wide) == "unsteady"
    assert verdict({"ratio": 0.8} | narrow) == "missed"


def test_a_step_that_never_repeats_its_ops_is_refused():
    class Moody(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.more = torch.nn.Linear(12, 4), 0

        def forward(self, x, edge_index):
            for _ in range(self.more):
                x = x + 1
            return self.lin(x)

    model = Moody()
    profile = stretto.profile(model, graph(), machine=Machine(), repeats=1)
    model.more = 2
    with pytest.raises(StrettoError, match="other ops than its trace"):
        replay(profile, repeats=1, seconds=0)


def test_the_chain_pauses_before_every_op_as_the_model_does(monkeypatch):
    workload = Workload(make("gcn", 12, 8, 4), graph())
    tape = Tape(workload)
    times = _step(workload).times
    pauses = _pauses(workload, [name for name, _, _ in times])
    assert len(pauses) == len(tape.calls)
    assert all(pause > 0 for pause in pauses)
    begun = []
    monkeypatch.setattr(chain_run, "interpret", lambda until: begun.append(until))
    clock = run(tape, pauses=[3600.0] * len(tape.calls))
    assert len(begun) == len(clock.times)
    assert all(until > time.perf_counter() + 3000 for until in begun)  # from the end of the op before
    begun.clear()
    run(tape)
    assert not begun


def test_a_pause_ends_when_it_should():
    until = time.perf_counter() + 0.002
    interpret(until)
    assert time.perf_counter() >= until
    interpret(until)  # is over
