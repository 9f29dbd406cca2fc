"""Which candidates stand for which op, what the sweep says of the others, and how it spends its budget."""

import dataclasses

import pytest
import torch
from torch_geometric import nn as pyg

import stretto
from stretto import datasets
from stretto.analyze import Machine
from stretto.observe.models import as_data, make
from stretto.profile import sweep as sweeping
from stretto.profile.axes import Point
from stretto.profile.contest import LEAST, Pace, empty_row
from stretto.profile.op_advice import op_advice, verdict
from stretto.profile.row_sites import RowSite, run_point, site
from stretto.profile.sparse_sites import SparseSite
from stretto.profile.sweep import cut, sites, sweep
from stretto.profile.words import advice_line

BASE = Point(width=8)


def profiled(name: str, fast: bool = False):
    data = as_data(datasets.load_graph("er:100:600"), width=12)
    model = make(name, 12, 16, 8)
    return stretto.profile(stretto.accelerate(model) if fast else model, data, machine=Machine(), repeats=1)


INDEX = torch.tensor([2, 0, 2])
WIDE = INDEX[:, None].expand(3, 4)
TABLE, ROWS = torch.zeros(5, 4), torch.randn(3, 4)
FULL = torch.ones(5, 4)
KNOWN = [
    ("aten::index_select", (FULL, -2, INDEX), ("index_select", "sum")),
    ("aten::gather", (FULL, 0, WIDE), ("gather", "sum")),
    ("aten::index.Tensor", (FULL, [INDEX]), ("x[index]", "sum")),
    ("aten::embedding", (FULL, INDEX), ("embedding", "sum")),
    ("stretto::gather_rows", (FULL, INDEX), ("stretto", "sum")),
    ("aten::index_add_", (TABLE, 0, INDEX, ROWS), ("index_add_", "sum")),
    ("aten::scatter_add_", (TABLE, 0, WIDE, ROWS), ("scatter_add_", "sum")),
    ("aten::_index_put_impl_", (TABLE, [INDEX], ROWS, True, True), ("index_put_", "sum")),
    ("aten::scatter_reduce_.two", (TABLE, 0, WIDE, ROWS, "amax"), ("scatter_reduce_", "max")),
    ("aten::scatter_reduce_.two", (TABLE, 0, WIDE, ROWS, "mean"), ("scatter_reduce_", "mean")),
    ("aten::scatter_reduce_.two", (TABLE, 0, WIDE, ROWS, "amin"), ("scatter_reduce_", "min")),
]
UNKNOWN = [
    ("aten::scatter_reduce_.two", (TABLE, 0, WIDE, ROWS, "prod"), "no candidate reduces by 'prod'"),
    ("aten::scatter.value", (TABLE, 0, WIDE, 0), "reduces nothing"),
    ("aten::scatter_.src", (TABLE, 0, WIDE, ROWS), "reduces nothing"),
    ("aten::index_put_", (TABLE, [INDEX], ROWS), "reduces nothing"),
    ("aten::index_select", (FULL, 1, INDEX), "by rows"),
    ("aten::gather", (FULL, 0, WIDE.contiguous()), "index of its own"),
    ("aten::index.Tensor", (FULL, [torch.ones(5, dtype=torch.bool)]), "mask"),
    ("aten::scatter_add", (FULL, 0, WIDE, ROWS), "values that are there"),
    ("aten::index_select", (torch.arange(5), 0, INDEX), "floating"),
    ("aten::take", (FULL, INDEX), "no other way"),
]


def options(name: str) -> dict[str, bool]:
    return {"include_self": False} if "scatter_reduce" in name else {}


@pytest.mark.parametrize(("name", "args", "wanted"), KNOWN)
def test_an_op_is_compared_with_what_does_the_same(name, args, wanted):
    found = site(name, args, options(name))
    assert found[:2] == wanted
    assert torch.equal(found[2], INDEX)
    assert found[3:] == (5, 4)


@pytest.mark.parametrize(("name", "args", "reason"), UNKNOWN)
def test_an_op_that_nothing_else_does_is_left_out_with_a_reason(name, args, reason):
    assert reason in site(name, args, options(name))


def test_zeros_that_count_are_told():
    call = ("aten::scatter_reduce_.two", (TABLE, 0, WIDE, ROWS, "amax"))
    assert "counts the zeros" in site(*call, {"include_self": True})


def test_the_ratio_is_to_the_op_that_runs():
    for family, native, reduce in (
        ("gather", "gather", "sum"), ("scatter", "scatter_add_", "sum"), ("scatter", "scatter_reduce_", "max"),
    ):  # fmt: skip
        rows = run_point(family, torch.arange(20) % 7, 7, BASE, native=native, reduce=reduce, repeats=3)
        timed = {row["candidate"]: row for row in rows if "median_ms" in row}
        assert {row["native"] for row in timed.values()} == {native}
        assert timed[native]["speedup"][0] == 1
        ours = timed["stretto"]
        assert ours["speedup"][0] == pytest.approx(timed[native]["median_ms"] / ours["median_ms"])
        assert ours["reduce"] == reduce


@pytest.mark.parametrize("kept", [True, False])
def test_what_each_step_makes_anew_is_prepared_in_every_call(kept, monkeypatch):
    from stretto.profile import candidates

    sorts = []
    monkeypatch.setattr(
        candidates, "_segments", lambda *args, plain=candidates._segments: sorts.append(1) or plain(*args)
    )
    rows = run_point("scatter", torch.arange(20) % 7, 7, BASE, repeats=4, lasting=kept)
    timed = next(row for row in rows if row["candidate"] == "sorted, segment_reduce")
    assert (len(sorts) == 1) if kept else (len(sorts) > timed["repeats"])
    assert timed["prepared"] == ("once" if kept else "in every call")


def test_an_index_that_the_step_makes_is_told_apart():
    """GCNConv adds self-loops in every step; SAGEConv uses the edges that it was given."""
    for name, kept in (("gcn", False), ("sage", True)):
        found, _ = sites(profiled(name), 1.0)
        rows = [s for s in found if isinstance(s, RowSite) and s.width > 1]
        assert {s.lasting for s in rows} == {kept}, name


def test_max_pooling_is_compared_with_max_and_the_rest_is_named():
    found, left = sites(profiled("sagepool"), 1.0)
    reduces = {(s.group.name, s.reduce) for s in found if isinstance(s, RowSite) and s.group.family == "scatter"}
    assert ("aten::scatter_reduce_.two", "max") in reduces
    assert ("aten::index_add_", "sum") in reduces
    reasons = {(group.name, reason) for group, reason in left}
    assert ("aten::scatter.value", "it writes values where an index says, and reduces nothing") in reasons
    assert ("aten::mul.Tensor", "no candidates for the family 'pointwise'") in reasons


def test_sparse_products_keep_their_reduction_and_weights():
    found, _ = sites(profiled("sagepool", fast=True), 1.0)
    assert "max" in {s.reduce for s in found if isinstance(s, SparseSite)}
    found, _ = sites(profiled("gcn", fast=True), 1.0)
    assert {(s.native, s.reduce, s.weighted) for s in found if isinstance(s, SparseSite)} == {("stretto", "sum", True)}


class Clock:
    """Seconds that pass only when somebody works."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def spent(monkeypatch, profile, budget: float):
    """The rows of a sweep in which every point costs one second, and the seconds that each was given."""
    clock, given = Clock(), []

    def run(self, point: Point, pace: Pace):
        clock.now += 1.0
        given.append(pace.seconds)
        return [empty_row(self.group.family, self.native, point)]

    for kind in (RowSite, SparseSite):
        monkeypatch.setattr(kind, "run", run)
    return sweep(profile, budget=budget, share=1.0, clock=clock), given


def test_a_small_budget_reaches_every_axis_of_the_hottest_op(monkeypatch):
    profile = profiled("gcn")
    found, _ = sites(profile, 1.0)
    hottest = found[0].group
    promised = len(found) + len(found[0].axes) - 1
    rows, given = spent(monkeypatch, profile, promised + sweeping.COMPILING)
    swept = [row for row in rows if row["axis"] != "none"]
    mine = [row["axis"] for row in swept[:promised] if (row["op"], row["shapes"]) == (hottest.name, hottest.shapes)]
    assert sorted(set(mine)) == sorted(found[0].axes)
    assert [row["axis"] for row in swept[: len(found)]] == ["base"] * len(found)
    assert mine.index("cache") > max(mine.index(axis) for axis in set(mine) - {"cache", "compiled"})
    assert all(seconds >= 1.0 for seconds in given[:promised])  # the budget is shared out, so that all have a part
    assert len(swept) <= promised + sweeping.COMPILING
    few, _ = spent(monkeypatch, profile, 3.0)
    assert len([row for row in few if row["axis"] != "none"]) == 3


def test_torch_compile_is_not_begun_when_time_is_short(monkeypatch):
    profile = profiled("gcn")
    found, _ = sites(profile, 1.0)
    rows, _ = spent(monkeypatch, profile, len(found) + len(found[0].axes) + 1.0)
    (row,) = [row for row in rows if row["compiled"]]
    assert row["reason"].startswith("compiling may take longer")


def test_a_point_that_does_not_fit_is_left_out(monkeypatch):
    from stretto.machine import facts as machine

    monkeypatch.setattr(machine, "memory_bytes", lambda kind="": 1 << 20)
    (row,) = run_point("gather", torch.arange(2000), 2000, dataclasses.replace(BASE, width=512), repeats=2)
    assert row["reason"].startswith("needs")


def test_an_op_that_takes_long_is_swept_on_a_part_of_its_rows(monkeypatch):
    """As large a part as its share of the budget has time for; every point of the site moves away from that."""
    assert cut(1e-4, 10**6, 1.0) == 1
    assert cut(1.0, 10**6, 1.0) == 128
    assert cut(1.0, 700, 1.0) == 2  # no fewer than some hundred rows
    profile = profiled("gcn")
    for op in profile.trace:
        op.seconds = 1.0 if op.cost.family == "gather" else 1e-6
    rows, _ = spent(monkeypatch, profile, 1000.0)
    for row in rows:
        if row["axis"] == "base":
            assert (row["edges"] < 1) == (row["family"] == "gather"), row
    gathers = [row for row in rows if row["family"] == "gather" and row["axis"] not in ("none", "edges")]
    assert len({row["edges"] for row in gathers if row["shapes"] == gathers[0]["shapes"]}) == 1


def test_a_hopeless_candidate_is_not_timed(monkeypatch):
    from stretto.profile import candidates, contest

    index = torch.arange(5)
    takes = {"index_select": [1.0], "slow": [100.0] * 2, "slow at first": [100.0, 1.0]}  # seconds of its calls
    running = []

    def way(name):
        return lambda x: running.append(name) or x[index]

    def timed(call):
        got = call()
        return got, takes[running[-1]].pop(0)

    monkeypatch.setattr(contest, "timed", timed)
    ways = {name: way(name) for name in ("slow", "slow at first", "index_select")}
    monkeypatch.setitem(candidates.FAMILIES, "gather", lambda *_, **__: (ways, {}))
    rows = {row["candidate"]: row for row in run_point("gather", index, 5, BASE, repeats=3)}
    assert rows["slow"]["reason"] == "100 times as long as index_select in one call: not timed"
    assert running.count("slow") == 2
    assert rows["slow at first"]["reason"] == rows["index_select"]["reason"] == ""


def test_too_few_samples_are_no_result():
    rows = run_point("gather", torch.arange(20), 20, BASE, pace=Pace(20, seconds=0.0))
    assert {row["reason"] for row in rows if not row.get("missing")} == {"the budget left no time for it"}
    assert not any("median_ms" in row for row in rows)
    few = run_point("gather", torch.arange(20), 20, BASE, pace=Pace(20, seconds=0.0, most=60.0))
    assert all(row["repeats"] >= LEAST for row in few if not row["reason"])
    assert any("median_ms" in row for row in few)


def test_the_bar_moves_within_a_point():
    ticks = []
    run_point("gather", torch.arange(20), 20, BASE, pace=Pace(3, tick=lambda: ticks.append(1)))
    assert len(ticks) >= 3 * 4


def op_advice_of(profile, row, at) -> str:
    profile.sweeps = [{**at, **row, "ci_ms": (1.0, 1.0)}]
    return op_advice(profile)[0]["reason"]


def test_advice_names_what_runs():
    profile = profiled("sage")
    at = {"op": "aten::gather", "phase": "backward", "shapes": "s", "layout": "ce", "site": "convs.0", "axis": "base"}
    fast = {
        "candidate": "index_select",
        "median_ms": 1.0,
        "native": "gather",
        "speedup": (1.7, 1.6, 1.8),
        "order": "given",
    }
    slow = {"candidate": "gather", "median_ms": 1.7, "native": "gather", "speedup": (1.0, 1.0, 1.0), "order": "given"}
    at |= {"edges": 1.0, "nodes": 1.0}
    profile.sweeps = [{**at, **r, "ci_ms": (r["median_ms"],) * 2} for r in (fast, slow)]
    (row,) = op_advice(profile)
    assert row["advice"] == "use index_select"
    assert advice_line(row).startswith("convs.0, aten::gather [s] backward: use index_select")
    assert row["reason"] == "index_select: 1.70x (1.60-1.80) the speed of gather, which runs"
    profile.sweeps = [{**r, "speedup": (0.7, 0.6, 0.75)} for r in profile.sweeps[:1]]
    assert op_advice(profile)[0]["reason"].endswith("which runs: slower")
    assert op_advice_of(profile, slow, at) == "gather, which runs, is the fastest"
    profile.sweeps = [{**at, **fast, "speedup": (0.7, 0.6, 0.75), "ci_ms": (1.0, 1.0), "edges": 0.25}]
    assert op_advice(profile)[0]["reason"].endswith("which runs: slower (on 25.0% of its rows)")
    profile.sweeps = [{**at, **fast, "speedup": (1.5, 0.9, 2.0), "ci_ms": (1.0, 1.0)}]
    (tie,) = op_advice(profile)
    assert (tie["advice"], tie["saves_ms"]) == ("nothing to gain", 0.0)


def test_words_for_an_interval():
    said = [verdict(*pair) for pair in ((1.1, 1.3), (0.6, 0.75), (0.9, 1.2), (1.01, 1.04))]
    assert said == ["", ": slower", ": a tie", ": too little to count"]


def test_every_hot_op_is_swept_or_named_with_a_reason():
    model = pyg.GCN(12, 16, 1, 8, act="gelu")
    data = as_data(datasets.load_graph("er:100:600"), width=12)
    profile = stretto.profile(model, data, machine=Machine(), repeats=1)
    found, left = sites(profile, 1.0)
    assert {id(g) for g in profile.hot(1.0)} == {id(s.group) for s in found} | {id(g) for g, _ in left}


def test_a_model_in_float64_is_swept_in_it():
    """The ratio to what runs is of its own type: "f32" would be told of an op that nobody runs."""
    data = as_data(datasets.load_graph("er:100:600"), width=12)
    data.x = data.x.double()
    profile = stretto.profile(pyg.GCN(12, 16, 1, 8).double(), data, machine=Machine(), repeats=1)
    rows = [row for row in profile.sweep(budget=1.0, share=1.0, repeats=2) if row["axis"] == "base"]
    assert {row["dtype"] for row in rows} == {"f64"}
    assert not [row for row in rows if row["reason"].startswith("wrong")]


def test_a_sweep_under_no_grad_has_both_directions():
    data = as_data(datasets.load_graph("er:100:600"), width=12)
    with torch.no_grad():
        profile = stretto.profile(pyg.GCN(12, 16, 1, 8), data, mode="infer", machine=Machine(), repeats=1)
        assert "direction" in {row["axis"] for row in profile.sweep(budget=2.0, repeats=2)}


def test_a_step_of_training_is_one_under_no_grad():
    data = as_data(datasets.load_graph("er:100:600"), width=12)
    with torch.no_grad():
        profile = stretto.profile(pyg.GCN(12, 16, 1, 8), data, machine=Machine(), repeats=1)
    assert "backward" in {group.phase for group in profile.groups}
