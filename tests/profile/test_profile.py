"""The profiler: ops with shapes and places, hot set, roofline, replay, advice, apply, scripts."""

import dataclasses
import json
import time

import pytest
import torch
from torch_geometric import nn as pyg
from torch_geometric.data import Data, HeteroData

import stretto.profile
from stretto import StrettoError, datasets
from stretto.analyze import Machine
from stretto.layers.layer import stock_of
from stretto.machine.timing import Timing
from stretto.observe.models import as_data, make
from stretto.observe.trace import Trace
from stretto.observe.workload import Workload
from stretto.profile import replay
from stretto.profile.captured import capture
from stretto.profile.profiling import Group, groups
from stretto.profile.replay import shuffled

MACHINE = Machine()


def cora(width: int = 24) -> Data:
    data = as_data(datasets.load_graph("cora"))
    data.x = data.x[:, :width].contiguous()
    return data


@pytest.fixture(scope="module")
def gcn():
    return stretto.profile(make("gcn", 24, 16, 7), cora(), machine=MACHINE, repeats=2)


def test_every_op_has_its_facts(gcn):
    for op in gcn.trace:
        assert op.phase in ("forward", "backward")
        assert all(isinstance(s, int) for spec in op.inputs for s in spec.shape)
        assert all(len(spec.stride) == len(spec.shape) for spec in op.inputs)
    assert {op.path for op in gcn.trace} >= {"convs.0", "convs.0.lin", "convs.1", "convs.1.lin"}
    assert gcn.trace.unknown == []
    for group in gcn.groups:
        found, first = group.to_dict(), gcn.trace.ops[group.ops[0]].inputs
        assert found["strides"] == ", ".join("x".join(map(str, spec.stride)) or "scalar" for spec in first)
        assert found["dtypes"].count(",") == found["shapes"].count(",") == found["strides"].count(",")


def check_time(trace):
    """Ops, host code, the tracer and what follows the last op make up the whole step: nothing else is left out."""
    parts = trace.op_seconds + trace.host_seconds + trace.tracer_seconds + trace.tail_seconds
    assert parts == pytest.approx(trace.traced_seconds, rel=1e-6)
    net = trace.traced_seconds - trace.tracer_seconds
    assert trace.attributed == pytest.approx(1 - trace.tail_seconds / net, abs=1e-6)


def test_the_end_of_backward_is_autograds():
    """Hooks of parameters, and on a card the end of a thread, come after the last op."""
    model = make("gcn", 24, 16, 7)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: time.sleep(0.02))
    trace = Workload(model, cora()).timed(repeats=1)
    check_time(trace)
    assert trace.host["", "backward"] >= 0.02
    assert trace.attributed >= 0.95


def test_parts_add_up(gcn):
    check_time(gcn.trace)
    total = gcn.trace.op_seconds + gcn.trace.host_seconds
    assert total <= gcn.trace.traced_seconds
    assert sum(g.seconds for g in gcn.groups) == pytest.approx(
        sum(o.seconds for o in gcn.trace if o.cost.family != "view")
    )
    assert sum(g.share for g in gcn.groups) == pytest.approx(1)


def test_layers_add_up_to_a_plain_step(gcn):
    """A tracer makes what is between ops several times longer."""
    found = gcn.to_dict()
    assert sum(gcn.layers().values()) == pytest.approx(gcn.trace.step_seconds)
    assert sum(found["layers_ms"].values()) == pytest.approx(found["step_ms"])
    assert found["host_ms"] == pytest.approx(max(0.0, found["step_ms"] - gcn.trace.op_seconds * 1e3))
    for step in (0.5, 2.0):  # of the time inside ops, which may be above that of a plain step
        trace = dataclasses.replace(gcn.trace, step_seconds=step * gcn.trace.op_seconds)
        other = dataclasses.replace(gcn, trace=trace)
        assert sum(other.layers().values()) == pytest.approx(trace.step_seconds)


@pytest.mark.parametrize("share", [0.5, 0.9, 1.0])
def test_hot_is_the_smallest_set(gcn, share):
    hot = gcn.hot(share)
    assert sum(g.share for g in hot) >= share - 1e-9  # as the table says
    assert sum(g.share for g in hot[:-1]) < share
    assert [g.seconds for g in hot] == sorted((g.seconds for g in hot), reverse=True)


def test_no_point_is_above_its_ceiling(gcn):
    for point in gcn.roofline():
        assert 0 <= point["attainable"] <= 1
        assert point["bound"] in ("launch", "bandwidth", "gather latency", "compute")


def test_a_ceiling_that_was_measured_too_low_shows(gcn):
    """Not hidden by the share that is shown: an op faster than its ceiling reaches more than all of it."""
    low = dataclasses.replace(MACHINE, peak_launch=10.0)
    slow = [g for g in groups(gcn.trace, low) if g.seconds]  # a call of which nothing remains without its hook has none
    assert len(slow) > 3
    assert all(g.reached > 1 and g.attainable == 1 for g in slow)
    high = dataclasses.replace(
        MACHINE, launch=1e-12, stream=[(1e5, 1e20)], gather=[(256, 1e7, 1e20)], scatter=[(256, 1e7, 1e20)],
        gemm=[(1e6, 64, 1e20)],
    )  # fmt: skip
    assert all(g.reached < 1 for g in groups(gcn.trace, high) if g.family in ("gather", "scatter", "gemm"))


def test_bound_follows_the_work():
    slow = dataclasses.replace(
        MACHINE, stream=[(1e5, 1e3), (1e8, 1e3)], gather=[(256, 1e7, 1e20)], scatter=[(256, 1e7, 1e20)]
    )
    profile = stretto.profile(make("gcn", 24, 16, 7), cora(), machine=slow, repeats=1)
    assert {g.bound for g in profile.groups if g.family == "pointwise"} == {"bandwidth"}
    assert {g.bound for g in profile.groups if g.family == "gather"} <= {"launch", "gather latency"}
    fast = dataclasses.replace(slow, stream=[(1e5, 1e20), (1e8, 1e20)], mask=[(1e5, 1e20)])
    profile = stretto.profile(make("gcn", 24, 16, 7), cora(), machine=fast, repeats=1)
    assert {g.bound for g in profile.groups if g.family in ("gather", "pointwise")} == {"launch"}


MODELS = {
    "GCN": lambda: make("gcn", 24, 8, 7),
    "SAGE": lambda: make("sage", 24, 8, 7),
    "GIN": lambda: make("gin", 24, 8, 7),
    "GAT": lambda: make("gat", 24, 8, 7),
    "GATv2": lambda: make("gatv2", 24, 8, 7),
    "PNA": lambda: pyg.PNA(24, 8, 2, 7, aggregators=["mean", "max"], scalers=["identity"], deg=torch.tensor([0, 9, 9])),
    "GraphUNet": lambda: pyg.GraphUNet(24, 8, 7, depth=2),
}  # fmt: skip


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("name", MODELS)
def test_models_of_the_study(name, mode):
    profile = stretto.profile(MODELS[name](), cora(), mode=mode, machine=MACHINE, repeats=1)
    check_time(profile.trace)
    assert len(profile.hot()) >= 1
    families = {g.family for g in profile.groups}
    assert families >= {"gemm", "gather", "pointwise"}
    if mode == "train":  # the backward of a gather is a scatter
        scatters = [op for op in profile.trace if op.cost.family == "scatter" and op.phase == "backward"]
        assert any(profile.trace.ops[op.site].cost.family == "gather" for op in scatters if op.site is not None)


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_attentive_fp(mode):
    torch.manual_seed(0)
    graph = datasets.load_graph("er:60:150")
    edges = graph.edge_index
    data = Data(
        x=torch.randn(60, 8), edge_index=edges, edge_attr=torch.randn(edges.size(1), 4), batch=torch.arange(60) // 20
    )
    model = pyg.AttentiveFP(8, 16, 2, edge_dim=4, num_layers=2, num_timesteps=2)
    profile = stretto.profile(model, data, mode=mode, machine=MACHINE, repeats=1)
    check_time(profile.trace)
    assert {g.family for g in profile.groups} >= {"gemm", "gather", "pointwise", "scatter"}
    assert profile.trace.unknown == [] or all("gru" in name for name in profile.trace.unknown)


def test_hetero_data():
    data = HeteroData()
    data["a"].x, data["b"].x = torch.randn(5, 4), torch.randn(6, 4)
    data["a", "to", "b"].edge_index = torch.tensor([[0, 1, 2], [3, 4, 5]])
    data["b", "back", "a"].edge_index = torch.tensor([[3, 4, 5], [0, 1, 2]])
    model = pyg.HeteroConv({t: pyg.SAGEConv(4, 3) for t in data.edge_types})
    profile = stretto.profile(
        model, data, machine=MACHINE, repeats=1, step=lambda m, d: m(d.x_dict, d.edge_index_dict)["a"].sum()
    )
    assert profile.trace.flops > 0


def test_json_and_text(gcn, tmp_path):
    found = json.loads(gcn.to_json(tmp_path / "p.json"))
    assert json.loads((tmp_path / "p.json").read_text()) == found
    assert found["groups"][0]["ms"] >= found["groups"][-1]["ms"]
    assert "attributed" in str(gcn)
    assert gcn.table()[0]["op"] == gcn.hot()[0].name


def test_steps_that_differ_are_refused():
    class Moody(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.calls = torch.nn.Linear(24, 7), 0

        def forward(self, x, edge_index):
            self.calls += 1
            for _ in range(self.calls):
                x = x + 1
            return self.lin(x)

    with pytest.raises(StrettoError, match="runs other ops each time"):
        stretto.profile(Moody(), cora(), machine=MACHINE, repeats=1)


def test_captured_inputs_are_the_models_own(gcn):
    (group,) = [g for g in gcn.groups if g.name == "aten::index_select" and g.shapes.startswith("2708x16")]
    ((function, args, kwargs),) = capture(gcn, [group]).values()
    sources = torch.cat([cora().edge_index[0], torch.arange(2708)])
    assert torch.equal(args[2], sources)
    assert function(*args, **kwargs).shape == (13264, 16)


def test_replay(gcn):
    rows = gcn.replay(repeats=2)
    assert len(rows) == len(gcn.hot())
    for row in rows:
        assert row["real indices"]["repeats"] == 2
        assert row["ratio"] == pytest.approx(row["real indices"]["median_ms"] / row["in model ms"])
        if row["op"].removeprefix("aten::").rstrip("_") in ("index_select", "scatter_add"):
            assert "shuffled indices" in row


def test_a_slower_replay_and_the_effect_of_the_index_are_told(gcn, monkeypatch):
    def measured(calls, **_):
        return {name: Timing((0.25 if name.startswith("real") else 0.5,) * 3) for name in calls}

    monkeypatch.setattr(replay, "measure", measured)
    for row in gcn.replay():
        assert row["ratio"] == pytest.approx(250 / row["in model ms"])
        other = row.get("shuffled indices")
        assert other is None or other["ratio"] == pytest.approx(2 * row["ratio"])


def test_indices_are_shuffled_and_nothing_else():
    index, x = torch.arange(40), torch.randn(40, 3)
    table, dim, mixed, (wide,) = shuffled((x, 0, index, [index[:, None].expand(40, 3)]))
    assert table is x
    assert dim == 0
    assert not torch.equal(mixed, index)
    assert torch.equal(mixed.sort().values, index)
    assert wide.stride(1) == 0


def test_advice_and_apply():
    data, model = cora(64), make("gcn", 64, 32, 7)
    stock = model(data.x, data.edge_index)
    profile = stretto.profile(model, data, machine=MACHINE, repeats=1)
    advice = profile.recommend(repeats=3)
    assert [row["site"] for row in advice] == ["convs.0", "convs.1"]
    assert all(row["advice"] in ("accelerate", "nothing to gain") for row in advice)
    assert all(row["saves_ms"] >= 0 and row["reason"] for row in advice)
    for row in advice:
        (runs,) = [plan for plan in row["plans"] if plan["runs"]]
        assert (runs["speedup"], runs["by"]) == (row["speedup"][0], "measured")
        assert len({plan["plan"] for plan in row["plans"]}) == len(row["plans"]) > 1
    done = profile.apply(repeats=3)
    assert torch.allclose(model(data.x, data.edge_index), stock, atol=1e-5)
    if done["applied"]:
        assert done["error"] < 1e-4
        assert {"predicted_ms", "realised_ms"} <= set(done)
        again = stretto.profile(model, data, machine=MACHINE, repeats=1)
        assert any(stock_of(type(module)) is not None for module in model.modules())
        kept = {row["site"] for row in advice if row["advice"] == "accelerate"}
        reasons = {row["site"]: row["reason"] for row in again.recommend(repeats=2)}
        assert all(reasons[path] == "accelerated already" for path in kept)


def test_a_prediction_that_agrees_is_no_measurement():
    """Orders of the products of a layer as wide as its input are predicted to take the same; one of them was timed."""
    data = as_data(datasets.load_graph("er:1000:4000"), width=24)
    row = stretto.profile(make("gcn", 24, 24, 24), data, machine=MACHINE, repeats=1).recommend(repeats=2)[1]
    (runs,) = [plan for plan in row["plans"] if plan["runs"]]
    others = [plan for plan in row["plans"] if not plan["runs"]]
    assert {plan["speedup"] for plan in others if "as the one that runs" in plan["by"]} == {None}
    assert all(plan["speedup"] < 0.99 * runs["speedup"] for plan in others if plan["by"] == "predicted")


def test_nothing_to_gain_is_an_answer():
    model = pyg.Linear(24, 7)

    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = model

        def forward(self, x, edge_index):
            return self.lin(x)

    profile = stretto.profile(Plain(), cora(), machine=MACHINE, repeats=1)
    assert profile.recommend() == []
    assert profile.apply()["reason"] == "nothing to gain"


def test_empty_trace_and_group():
    assert Trace().attributed == 1.0
    assert Group("a", "view", "forward", "", "", "").to_dict()["ms"] == 0


def test_a_gain_is_predicted_as_a_share_of_the_step(monkeypatch):
    """A machine that has become twice as slow since the advice was given changes neither side of the comparison."""
    from stretto.profile import recommend

    def pace(factor, table):
        return lambda steps, *_: {name: Timing((factor * table[name],) * 4) for name in steps}

    layers = {"stock, convs.0": 0.6, "accelerated, convs.0": 0.1, "stock, convs.1": 0.3, "accelerated, convs.1": 0.3}
    profile = stretto.profile(make("gcn", 24, 16, 7), cora(), machine=MACHINE, repeats=1)
    monkeypatch.setattr(recommend, "_in_turns", pace(1.0, layers | {recommend.WHOLE: 1.0}))
    advice = profile.recommend()
    assert [row["advice"] for row in advice] == ["accelerate", "nothing to gain"]
    assert [row["share"] for row in advice] == pytest.approx([0.5, 0.0])
    monkeypatch.setattr(recommend, "_in_turns", pace(2.0, {"stock": 1.0, "accelerated": 0.5}))
    done = profile.apply()
    assert done["predicted_ms"] == pytest.approx(1000)
    assert done["agreement"] == pytest.approx(1.0)
    assert [stock_of(type(conv)) is not None for conv in profile.workload.model.convs] == [True, False]  # as advised
    monkeypatch.setattr(recommend, "_in_turns", pace(1.0, layers | {recommend.WHOLE: 0.45}))
    again = stretto.profile(make("gcn", 24, 16, 7), cora(), machine=MACHINE, repeats=1).recommend()
    assert again[0]["share"] == pytest.approx(0.5 / 0.9)  # layers are no more than the whole step
    timings = {"stock": Timing((2.0,) * 4), "accelerated": Timing((1.0,) * 4)}
    both = recommend.realised(timings, [{"share": 0.3}, {"share": 0.2}])  # of several layers the sum
    assert (both["predicted_ms"], both["agreement"]) == (pytest.approx(1000), pytest.approx(1.0))
