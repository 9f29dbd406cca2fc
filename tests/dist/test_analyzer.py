"""The analyzer's join with the engine: the same setting, counted as predicted, and a bound that holds."""

import json

import pytest
import torch

import stretto.analyze
from stretto import datasets
from stretto.analyze import Machine, validate
from stretto.dist import link as between
from stretto.analyze.graph_stats import Partitioner
from stretto.observe.models import as_data, make
from stretto.analyze.strategies import OVERLAPPED, STALE
from stretto.dist import Staleness
from tests.dist.ranks import sample
from tests.dist.simulator import matrix, neural
from tests.graphs import random_edges


def cora():
    data = as_data(datasets.load_graph("cora"))
    data.x = data.x[:, :24].contiguous()
    return data


@pytest.mark.parametrize("parts", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_stale_step_counts_as_predicted(monkeypatch, parts):
    torch.set_num_threads(1)
    monkeypatch.setattr(between, "link", lambda: {"link_latency": 1e-4, "link_bandwidth": 1e9})
    data = cora()
    report = stretto.analyze(make("gcn", 24, 16, 7, 3), data, machine=Machine(), procs=[1, parts])
    splitter = Partitioner(data.edge_index, data.num_nodes)
    rows = {row["what"]: row for row in validate.partitioned(report, splitter, STALE, parts, 1)}
    for what in ("bytes", "messages"):
        row = rows[f"{what}, {STALE}, {parts} workers"]
        assert row["predicted"] == row["counted"] == row["measured"] > 0
    for what in ("synchronisations", "oldest rows"):
        row = rows[f"{what}, {STALE}, {parts} workers"]
        assert row["predicted"] == row["counted"] == 1
    assert rows[f"step, {STALE}, {parts} workers"]["measured"] > 0


def test_an_overlapped_step_counts_as_predicted(monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(between, "link", lambda: {"link_latency": 1e-4, "link_bandwidth": 1e9})
    data = cora()
    report = stretto.analyze(make("sage", 24, 16, 7), data, machine=Machine(), procs=[1, 2])
    splitter = Partitioner(data.edge_index, data.num_nodes)
    rows = {row["what"]: row for row in validate.partitioned(report, splitter, OVERLAPPED, 2, 1)}
    for what in ("bytes", "messages", "synchronisations"):
        row = rows[f"{what}, {OVERLAPPED}, 2 workers"]
        assert row["predicted"] == row["counted"] > 0
    assert rows[f"step, {OVERLAPPED}, 2 workers"]["measured"] > 0
    assert not any("oldest" in what for what in rows)


def test_what_the_engine_cannot_run_is_left_out():
    data = cora()
    report = stretto.analyze(make("gat", 24, 16, 7), data, machine=Machine(), procs=[2])
    (row,) = validate.partitioned(report, Partitioner(data.edge_index, data.num_nodes), STALE, 2, 1)
    assert row["measured"] is None
    assert "GATConv has no rule" in row["note"]
    assert report.staleness[0].amplification == ()
    assert "GATConv has no rule" in report.staleness[0].reason


def test_the_plan_names_the_engines_setting():
    report = stretto.analyze(make("sage", 24, 16, 7), cora(), machine=Machine(), procs=[1, 2, 4])
    (strategy,) = [s for s in report.strategies if s.name == STALE and s.workers == 2]
    plan = report.staleness[0]
    assert [plan.workers for plan in report.staleness] == [2, 4]
    assert plan.setting == strategy.staleness == Staleness.halo(1)
    assert plan.expected_age == pytest.approx(report.partitions[1].cut / report.graph.num_edges)
    found = json.loads(report.to_json())
    assert found["staleness"][0]["setting"]["T^R"] == 1
    assert "Stale halo on 2: T^R = 1" in report.explain()


@pytest.mark.parametrize("name", ["gcn", "sage", "gin"])
def test_the_bound_is_never_violated_and_not_empty(name):
    """Rows that others read are off by a little: the result moves by at most the bound, and by more than nothing."""
    n = 40
    data = sample(random_edges(n, n, 160, 4), n, 8, 3)
    model = make(name, 8, 8, 3, 3).double()
    report = stretto.analyze(model, data, machine=Machine(), procs=[2])
    owner = torch.from_numpy(Partitioner(data.edge_index, n).assign(2, report.partitions[0].method))
    same = (owner[:, None] == owner[None, :]).double()
    exact = rough = data.x
    drift = []
    with torch.no_grad():
        for number, conv in enumerate(model.convs):
            A, loop = matrix(conv, data.edge_index, n)
            exact, rough = (h.relu() if number else h for h in (exact, rough))
            stale = rough + 0.1 * torch.randn_like(rough)
            drift.append(float((stale - rough).norm(dim=1).max()))
            exact = neural(conv, A @ exact, exact, loop)
            rough = neural(conv, (A * same) @ rough + (A * (1 - same)) @ stale, rough, loop)
    off = float((exact - rough).norm(dim=1).max())
    bound = report.staleness[0].error(drift)
    assert 0 < off <= bound
    assert bound < 1e4 * off
