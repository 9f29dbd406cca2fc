"""The analyzer and the engine: what a strategy says that a step sends and waits for is what the ranks count."""

import pytest
import torch

import stretto.analyze
from stretto import datasets, dist
from stretto.analyze import Machine, validate
from stretto.analyze.graph_stats import Partitioner
from stretto.analyze.strategies import OVERLAPPED, PULL, STALE, strategies
from stretto.dist import Staleness
from stretto.observe.models import as_data, make
from tests.dist.ranks import sent_through_torch


def cora():
    data = as_data(datasets.load_graph("cora"))
    data.x = data.x[:, :24].contiguous()
    return data


@pytest.mark.parametrize("name", validate.RUN)
def test_a_step_counts_as_predicted(name):
    report = stretto.analyze(make("gcn", 24, 16, 7, 3), cora(), machine=Machine(), procs=[1, 2])
    rows = {row["what"]: row for row in validate.partitioned(report, name, 2, 1)}
    (own,) = [s for s in report.strategies if (s.name, s.workers) == (name, 2)]
    for what, predicted in (("bytes", own.bytes), ("messages", own.messages), ("synchronisations", own.syncs)):
        row = rows[f"{what}, {name}, 2 workers"]
        assert row["predicted"] == row["counted"] == predicted > 0
    step = rows[f"step, {name}, 2 workers"]
    assert step["predicted"] == own.seconds
    assert step["measured"] > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("labels", ["all", "some", "a mask"])
@pytest.mark.parametrize(
    ("name", "parts", "method"),
    [("sage", 2, "blocks"), ("gcn", 3, "breadth-first"), ("gin", 4, "breadth-first"), ("double", 2, "random")],
)
def test_any_partition_counts_as_predicted(name, parts, method, labels):
    data, model = cora(), make("sage" if name == "double" else name, 24, 16, 7)
    if name == "double":
        data.x, model = data.x.double(), model.double()
    if labels == "some":
        data.y[torch.arange(0, data.num_nodes, 3)] = -1
    elif labels == "a mask":
        data.train_mask = torch.arange(data.num_nodes) < 40
    report = stretto.analyze(model, data, machine=Machine(), procs=[1, parts])
    splitter = Partitioner(data.edge_index, data.num_nodes)
    (plan,) = [s for s in strategies(report.problem, [splitter.split(parts, method)]) if s.name == PULL]
    owner = torch.from_numpy(splitter.assign(parts, method))
    run = validate._run(report.workload, plan, owner, 1)
    assert run.sent() == {"bytes": plan.bytes, "messages": plan.messages, "syncs": plan.syncs}


@pytest.mark.parametrize("staleness", [Staleness(), Staleness.halo(1)], ids=["fresh", "stale"])
def test_the_engine_counts_what_torch_sends(staleness):
    data = cora()
    owner = dist.partition(data.edge_index, data.num_nodes, 2)
    for counted, sent in dist.launch(sent_through_torch, 2, make("gcn", 24, 16, 7), data, owner, staleness):
        assert counted == sent
        assert min(counted) > 0


def test_a_model_that_gives_other_results_in_parts_has_no_numbers(monkeypatch):
    report = stretto.analyze(make("sage", 24, 16, 7), cora(), machine=Machine(), procs=[1, 2])
    train = dist.train

    def wrong(*args, **options):
        run = train(*args, **options)
        run.predictions[0] += 1.0
        return run

    monkeypatch.setattr(dist, "train", wrong)
    (row,) = validate.partitioned(report, PULL, 2, 1)
    assert row["measured"] is None
    assert "outputs differ by" in row["note"]
    assert "between 2 workers and one process" in row["note"]


def test_what_the_engine_cannot_run_is_left_out():
    report = stretto.analyze(make("gat", 24, 16, 7), cora(), machine=Machine(), procs=[2])
    (row,) = validate.partitioned(report, STALE, 2, 1)
    assert row["measured"] is None
    assert "GATConv has no rule" in row["note"]


def test_a_strategy_names_the_engines_setting():
    report = stretto.analyze(make("sage", 24, 16, 7), cora(), machine=Machine(), procs=[1, 2, 4])
    for workers in (2, 4):
        plans = {s.name: s for s in report.strategies if s.workers == workers}
        assert plans[STALE].staleness == Staleness.halo(1)
        assert plans[OVERLAPPED].schedule == dist.Schedule("async", "async")
        assert "read rows that are one step old" in plans[STALE].reason
