"""The sweep: every axis and candidate is checked against fp64, then timed; intervals; the points themselves."""

import dataclasses

import pytest
import torch

import stretto
from stretto import datasets
from stretto.analyze import Machine
from stretto.machine.timing import Timing
from stretto.observe.models import as_data, make
from stretto.profile import candidates
from stretto.profile.axes import DTYPES, Point, place, points, values
from stretto.profile.contest import Pace, interval
from stretto.profile.op_advice import dispatch_table, winner
from stretto.profile.profiling import Group
from stretto.profile.row_sites import run_point
from stretto.profile.sparse_sites import SparseSite
from stretto.profile.sweep import schedule

BASE = Point(width=8)


QUICK = [p for p in points(BASE, 2) if not p.compiled]


WAYS = {
    ("gather", "sum"): {"index_select", "x[index]", "embedding", "gather"},
    ("scatter", "sum"): {"index_add_", "scatter_add_", "scatter_reduce_", "index_put_", "PyG scatter"},
    ("scatter", "mean"): {"scatter_reduce_", "index_reduce_", "PyG scatter", "sorted, segment_reduce"},
    ("scatter", "max"): {"scatter_reduce_", "index_reduce_", "PyG scatter", "sorted, segment_reduce"},
    ("scatter", "min"): {"scatter_reduce_", "index_reduce_", "PyG scatter", "sorted, segment_reduce"},
}


DOUBLE = Point(width=8, dtype="f64")  # of a model in float64
FEW = ("base", "direction", "dtype")  # axes of mean and min; max has them all
CELLS = [(*way, p) for way in WAYS for p in QUICK if way[1] not in ("mean", "min") or p.moved(BASE) in FEW]
CELLS += [(*way, DOUBLE) for way in WAYS]


@pytest.mark.parametrize(
    ("family", "reduce", "point"),
    CELLS,
    ids=[f"{f}-{r}-{p.moved(BASE)}-{getattr(p, p.moved(BASE), '')}" for f, r, p in CELLS],
)
def test_every_axis_is_checked_before_it_is_timed(family, reduce, point):
    index = torch.randint(30, (200,), generator=torch.Generator().manual_seed(0))
    rows = run_point(family, index, 30, point, reduce=reduce, repeats=2, lasting=point.order != "shuffled")
    assert {row["candidate"] for row in rows} >= {"stretto", *WAYS[family, reduce]}
    for row in rows:
        assert ("median_ms" in row) == (row["reason"] == "")
        assert not row["reason"].startswith("wrong"), row
        if "median_ms" in row:
            assert row["error"] is not None
            assert row["ci_ms"][0] <= row["median_ms"] <= row["ci_ms"][1]
            assert row["peak_bytes"] > 0
            assert row["bytes"] >= row["random_bytes"] > 0
            assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["median_ms"] / 1e6)
            assert (row["flops"] > 0) == (family == "scatter" or point.direction == "both")
    ours = next(row for row in rows if row["candidate"] == "stretto")
    assert ours["reason"] == ""


@pytest.mark.slow
def test_torch_compile_is_a_candidate():
    rows = run_point("gather", torch.randint(30, (200,)), 30, dataclasses.replace(BASE, compiled=True), repeats=2)
    assert [row["candidate"] for row in rows] == ["index_select", "torch.compile"]
    assert rows[1]["reason"] == "" or rows[1]["reason"].startswith("raises")  # without a C++ compiler it cannot


def test_winners_and_ties():
    site = {"axis": "base", "op": "a", "shapes": "", "phase": "f"}
    times = {"b": 1.0, "a": 1.05, "slow": 3.0}
    rows = [{"candidate": n, "median_ms": t, "ci_ms": (t * 0.9, t * 1.1), **site} for n, t in times.items()]
    assert winner(rows) == "tie: a, b"
    assert winner(rows[1:]) == "a"
    assert dispatch_table(rows) == {"a [] f": "tie: a, b"}


def test_two_runs_name_the_same_winner(monkeypatch):
    """Where one candidate is clearly faster, both runs say so; where none is, both call it a tie."""
    import time

    def sleeper(index):
        def call(x):
            time.sleep(0.003)
            return x[index]

        return call

    index = torch.arange(50)
    ways = {"index_select": lambda x: x.index_select(0, index), "sleeper": sleeper(index)}
    monkeypatch.setitem(candidates.FAMILIES, "gather", lambda *_, **__: (ways, {}))
    runs = [run_point("gather", index, 50, BASE, repeats=20) for _ in range(2)]
    assert [winner(rows) for rows in runs] == ["index_select"] * 2


@pytest.mark.parametrize(("times", "named", "tied"), [(1.0, 0, 95), (1.5, 100, 0)], ids=["equals", "a winner"])
def test_runs_agree_on_a_winner_or_call_it_a_tie(times, named, tied):
    """A hundred runs of twenty samples each, as noisy as a shared machine: what is a tie is not decided by luck."""
    noise = torch.Generator().manual_seed(0)

    def row(name, median):
        taken = Timing(tuple((median * (1 + 0.1 * torch.randn(20, generator=noise).abs())).tolist()))
        low, high = interval(taken)
        return {"candidate": name, "median_ms": taken.median * 1e3, "ci_ms": (low * 1e3, high * 1e3)}

    found = [winner([row("a", 1.0), row("b", times)]) for _ in range(100)]
    assert found.count("a") >= named
    assert found.count("tie: a, b") >= tied
    assert found.count("b") <= 5


def test_the_winner_may_change_with_the_order():
    from stretto.profile.op_advice import _by_order

    def row(order, candidate, ms):
        axis = "base" if order == "given" else "order"
        return {"axis": axis, "order": order, "candidate": candidate, "median_ms": ms, "ci_ms": (ms * 0.95, ms * 1.05)}

    rows = [row("given", "a", 1.0), row("given", "b", 2.0), row("sorted", "a", 1.0), row("sorted", "b", 0.5)]
    assert _by_order(rows) == {"given": "a", "sorted": "b"}


LIARS = {
    "another op": lambda x: x + 1,
    "off by half a thousandth": lambda x: x * 1.0005,
    "the gradient alone": lambda x: 1.0005 * x - 0.0005 * x.detach(),
}


@pytest.mark.parametrize("lie", LIARS)
def test_a_wrong_candidate_is_never_timed(monkeypatch, lie):
    index = torch.arange(5)
    ways = {"index_select": lambda x: x[index], "liar": lambda x: LIARS[lie](x[index])}
    monkeypatch.setitem(candidates.FAMILIES, "gather", lambda *_, **__: (ways, {}))
    direction = "both" if lie == "the gradient alone" else "forward"
    rows = run_point("gather", index, 5, dataclasses.replace(BASE, direction=direction), repeats=2)
    assert "median_ms" in rows[0]
    liar = next(row for row in rows if row["candidate"] == "liar")
    assert liar["reason"].startswith("wrong")
    assert "median_ms" not in liar


def test_axes():
    index = torch.tensor([3, 0, 3, 1])
    assert place(index, 4, dataclasses.replace(BASE, order="sorted"))[0].tolist() == [0, 1, 3, 3]
    assert place(index, 4, dataclasses.replace(BASE, index="int32"))[0].dtype == torch.int32
    renamed = place(index, 4, dataclasses.replace(BASE, order="by degree"))[0]
    assert renamed[0] == renamed[2] == 0
    assert len(set(points(BASE, 2))) == len(list(points(BASE, 2)))


def test_orders_and_types_are_what_they_say():
    at = lambda **axes: place(torch.arange(2000) // 10, 200, dataclasses.replace(BASE, **axes))  # noqa: E731
    shuffled, ordered = at(order="shuffled")[0], at()[0]
    assert torch.equal(shuffled.sort().values, ordered)
    assert float((shuffled.diff() >= 0).float().mean()) < 0.6
    for name, dtype in DTYPES.items():
        assert values(5, dataclasses.replace(BASE, dtype=name)).dtype == dtype


def test_interval_of_a_constant_and_of_noise():
    assert interval(Timing((1.0,) * 20)) == (1.0, 1.0)
    low, high = interval(Timing(tuple(range(20))))
    assert low < 9.5 < high


def test_sizes():
    index = torch.tensor([3, 0, 3, 1])
    at = lambda **axes: place(index, 4, dataclasses.replace(BASE, **axes))  # noqa: E731
    assert (at(edges=0.25)[0].tolist(), at(edges=4.0)[0].numel()) == ([3], 16)
    assert at(nodes=0.25)[1] == 1
    wide, rows = at(nodes=4.0)
    assert (rows, (wide // 4).tolist()) == (16, index.tolist())
    sorted_one = place(index.sort().values, 4, dataclasses.replace(BASE, edges=4.0))[0]
    assert (sorted_one.diff() >= 0).all()
    assert {1, 512} <= {p.width for p in points(BASE, 1)}


def test_one_point_of_every_axis_comes_before_a_second_of_any():
    moved = [p.moved(BASE) for p in points(BASE, 2)]
    axes = set(moved) - {"base"}
    assert moved[0] == "base"
    assert set(moved[1 : 1 + len(axes)]) == axes
    assert moved[1 : 1 + len(axes)][-2:] == ["cache", "compiled"]  # a cold sample takes milliseconds, compiling seconds


def test_every_axis_is_promised_once_by_the_hottest_op_that_has_it():
    """What only another op has must not wait until the axes of all others are done."""
    product, gather = [("product", name) for name in ("own", "width", "dtype", "width 2")], []
    for name in ("own", "order", "width", "law", "order 2"):
        gather.append(("gather", name))
    queues = [("product", product), ("gather", gather)]
    order = list(schedule(queues, [["width", "dtype"], ["order", "width", "law"]]))
    assert [(point[1], promised) for site, point, promised in order if site == "product"] == [
        ("own", 6), ("width", 4), ("dtype", 3), ("width 2", 1),
    ]  # fmt: skip
    assert [(point[1], promised) for site, point, promised in order if site == "gather"] == [
        ("own", 5), ("order", 2), ("law", 1), ("width", 1), ("order 2", 1),
    ]  # fmt: skip
    assert len(order) == len(product) + len(gather)


@pytest.mark.parametrize(
    "point", [*(p for p in points(BASE, 1) if p.cache == "warm" and not p.compiled), DOUBLE], ids=str
)
@pytest.mark.parametrize(("reduce", "weighted"), [("sum", False), ("sum", True), ("max", False)])
def test_sparse_products(point, reduce, weighted):
    edges = torch.randint(30, (2, 200), generator=torch.Generator().manual_seed(0))
    group = Group("stretto::spmm", "spmm", "forward", "", "float32", "")
    rows = SparseSite(group, "stretto", edges, 30, 8, reduce, weighted).run(point, Pace(2))
    names = {row["candidate"] for row in rows}
    assert names >= {"stretto", "EdgeIndex.matmul", "PyG scatter", "torch_sparse"}
    assert names >= ({"gather + index_add_", "dense GEMM"} if reduce == "sum" else {"gather + scatter_reduce_"})
    assert not any(row["reason"].startswith("wrong") for row in rows), rows
    assert next(row for row in rows if row["candidate"] == "stretto")["median_ms"] > 0


@pytest.mark.parametrize("fast", [False, True], ids=["stock", "accelerated"])
def test_a_step_is_swept_by_all_its_families(fast):
    data = as_data(datasets.load_graph("er:400:3000"), width=12)
    model = make("gcn", 12, 16, 8)
    profile = stretto.profile(stretto.accelerate(model) if fast else model, data, machine=Machine(), repeats=2)
    rows = profile.sweep(budget=6, share=1.0, repeats=2)
    swept = {row["family"] for row in rows if row["axis"] != "none"}
    assert swept >= ({"spmm"} if fast else {"gather", "scatter"})
    assert all(row["advice"] for row in profile.recommend(repeats=2))
