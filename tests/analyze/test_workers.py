"""Partitioned steps in real gloo processes: gradients as in one process; bytes, messages and waits as predicted."""

import pytest
import torch

import stretto.analyze
from stretto import StrettoError, datasets
from stretto.analyze import Machine, workers
from stretto.analyze.graph_stats import Partitioner
from stretto.analyze.strategies import OVERLAPPED, STALE, strategies
from stretto.analyze.workers import run_engine
from stretto.dist import Staleness
from stretto.dist import link as between
from stretto.observe.models import as_data, make
from stretto.observe.workload import Workload

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


def graph():
    data = as_data(datasets.load_graph("cora"))
    data.x = data.x[:, :24].contiguous()
    return data


@pytest.mark.parametrize(
    ("name", "parts", "method"),
    [
        ("sage", 2, "blocks"),
        ("gcn", 2, "breadth-first"),
        ("gin", 4, "breadth-first"),
        ("double", 2, "random"),
    ],
)
def test_counted_in_real_processes_equals_predicted(name, parts, method):
    torch.set_num_threads(1)
    data, model = graph(), make("sage" if name == "double" else name, 24, 16, 7)
    if name == "double":
        data.x, model = data.x.double(), model.double()
    report = stretto.analyze(model, data, machine=Machine(), procs=[1, parts])
    splitter = Partitioner(data.edge_index, data.num_nodes)
    part = splitter.split(parts, method)
    (plan,) = [s for s in strategies(report.problem, [part]) if s.name == "partition + halo, pull"]
    owner = torch.from_numpy(splitter.assign(parts, method))
    found = run_engine(report.workload, owner, staleness=plan.staleness, repeats=1)
    assert found["bytes"] == plan.bytes
    assert found["messages"] == plan.messages
    assert found["syncs"] == plan.syncs
    assert found["error"] < 1e-4


@pytest.mark.parametrize("labels", ["some", "a mask"])
def test_losses_without_a_label_for_every_node(labels):
    """A mean is shared out by the rows that have a label."""
    torch.set_num_threads(1)
    data = graph()
    if labels == "some":
        data.y[torch.arange(0, data.num_nodes, 3)] = -1
    else:
        data.train_mask = torch.arange(data.num_nodes) < 40
    report = stretto.analyze(make("sage", 24, 16, 7), data, machine=Machine(), procs=[1, 2])
    splitter = Partitioner(data.edge_index, data.num_nodes)
    owner = torch.from_numpy(splitter.assign(2, "blocks"))
    assert run_engine(report.workload, owner, staleness=Staleness(), repeats=1)["error"] < 1e-4


def test_rounding_is_told_from_a_fault(monkeypatch):
    """A difference that rounding may have made is judged in float64: with none allowed, everything is."""
    torch.set_num_threads(1)
    monkeypatch.setattr(workers, "ALLOWED", 0.0)
    report = stretto.analyze(make("gcn", 24, 16, 7), graph(), machine=Machine(), procs=[1, 2])
    splitter = Partitioner(report.workload.data.edge_index, report.workload.data.num_nodes)
    owner = torch.from_numpy(splitter.assign(2, "blocks"))
    assert 0 < run_engine(report.workload, owner, staleness=Staleness(), repeats=1)["error"] < 1e-12
    assert next(report.workload.model.parameters()).dtype == torch.float32
    monkeypatch.setattr(workers, "EXACT", 0.0)
    with pytest.raises(StrettoError, match="on 2 workers the gradients differ by"):
        run_engine(report.workload, owner, staleness=Staleness(), repeats=1)


@pytest.mark.parametrize(
    ("work", "exchange", "share"), [(2.0, 30.0, 1.0), (30.0, 2.0, 1.0), (2.0, 30.0, 0.5), (30.0, 2.0, 0.0)]
)
def test_the_shorter_of_work_and_exchange_can_be_hidden(work, exchange, share):
    meanwhile = work + exchange - share * min(work, exchange)
    taken = {"short": 1e-4, "long": exchange, "alone": work / 1.5, "both": work, "meanwhile": meanwhile}
    found = between.fields_of(taken)
    assert found["hidden"] == pytest.approx(share)
    assert found["beside"] == pytest.approx(1.5)


def test_a_step_that_knows_one_type_only_is_not_judged_in_another(monkeypatch):
    class Typed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = torch.nn.Linear(24, 7)

        def forward(self, x, edge_index):
            return self.lin(x) @ torch.ones(7, 7)

    work = Workload(Typed(), graph())
    found = [{"gradient": workers._one_process(work) * 1.001}]
    error, fine = workers._judged(work, found, lambda exact, repeats: pytest.fail("never runs"))
    assert (error, fine) == (pytest.approx(1e-3, rel=0.01), False)


def test_validate_runs_two_workers():
    torch.set_num_threads(1)
    report = stretto.analyze(make("sage", 24, 16, 7), graph(), machine=Machine(), procs=[1, 2])
    rows = {row["what"]: row for row in report.validate(repeats=1)}
    for plan in ("partition + halo, pull", OVERLAPPED, STALE):
        for what in ("bytes", "messages", "synchronisations"):
            row = rows[f"{what}, {plan}, 2 workers"]
            assert row["predicted"] == row["counted"]
        assert rows[f"step, {plan}, 2 workers"]["measured"] > 0
