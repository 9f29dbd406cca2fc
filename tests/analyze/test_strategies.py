"""Strategies say what they would do: who does not apply, how uneven blocks are, what overlaps, and who comes first."""

import dataclasses

import pytest
import torch
from torch_geometric import nn as pyg
from torch_geometric.data import Batch, Data

import stretto.analyze
from stretto import datasets
from stretto.analyze import Machine
from stretto.analyze.graph_stats import Partitioner, grids, replicas
from stretto.analyze.strategies import OVERLAPPED, STALE
from stretto.dist import Schedule
from stretto.observe.models import as_data, make

PULL = "partition + halo, pull"
MACHINE = Machine(memory=1e10)


def report_of(name, data=None, machine=MACHINE, **options):
    data = as_data(datasets.load_graph("er:200:800"), width=24) if data is None else data
    classes = int(data.y.max()) + 1
    return stretto.analyze(make(name, data.x.size(1), 16, classes), data, machine=machine, **options)


def star(n):
    """Every node sends to the first."""
    edges = torch.stack([torch.arange(1, n), torch.zeros(n - 1, dtype=torch.long)])
    return Data(x=torch.randn(n, 24), edge_index=edges, y=torch.arange(n) % 4)


@pytest.mark.parametrize(
    ("model", "words"), [("gat", "score of an edge"), ("edgeconv", "product on edges"), ("gcn", "")], ids=str
)
def test_columns_apart_only_where_no_edge_needs_whole_rows(model, words):
    report = report_of(model, procs=[4])
    refused = {r.name: r.reason for r in report.refusals}
    assert ("feature-parallel" in refused) == bool(words)
    assert words in refused.get("feature-parallel", "")


def test_blocks_add_up_partial_sums_which_attention_has_not():
    refused = {(r.name, r.workers): r.reason for r in report_of("gat", procs=[4, 8]).refusals}
    for place in (("1.5-D, replicated", 4), ("2-D", 4), ("3-D", 8)):
        assert "softmax" in refused[place]
    applied = {(s.name, s.workers) for s in report_of("gcn", procs=[4, 8]).strategies}
    assert applied >= {("1.5-D, replicated", 4), ("2-D", 4), ("3-D", 8)}


@pytest.mark.parametrize("conv", [pyg.GraphConv, pyg.SAGEConv])
def test_a_median_is_an_aggregation_but_not_of_parts(conv):
    data = as_data(datasets.load_graph("er:200:800"), width=24)
    model = pyg.Sequential("x, edge_index", [(conv(24, 16, aggr="median"), "x, edge_index -> x")])
    report = stretto.analyze(model, data, machine=MACHINE, procs=[4, 8])
    assert [cost.name for cost in report.costs] == ["C, L"]
    assert {way.rule for way in report.rewrites} <= {"cache A X"}
    refused = {(r.name, r.workers): r.reason for r in report.refusals}
    for place in (("partition + halo, push", 4), ("1.5-D, replicated", 4), ("2-D", 4), ("3-D", 8)):
        assert "median" in refused[place]
    assert (PULL, 4) in {(s.name, s.workers) for s in report.strategies}


def test_layers_as_stages_are_exact_only_for_graphs_apart():
    one = report_of("gcn", procs=[2])
    (plan,) = [s for s in one.strategies if s.name == "pipelined by layers"]
    assert not plan.exact
    assert "a step before" in plan.reason
    graphs = [Data(x=torch.randn(9, 24), edge_index=torch.randint(9, (2, 20)), y=torch.arange(9) % 4)] * 16
    many = report_of("gcn", Batch.from_data_list(graphs), procs=[2])
    (plan,) = [s for s in many.strategies if s.name == "pipelined by layers"]
    assert plan.exact
    assert "a step before" not in plan.reason


def test_blocks_are_as_uneven_as_a_count_finds():
    data = as_data(datasets.load_graph("rmat:8:2000"), width=24)
    splitter = Partitioner(data.edge_index, data.num_nodes)
    for parts in (4, 8):
        assert splitter.split(parts).blocks == tuple(
            splitter.uneven(*sides) if sides else 0.0 for sides in grids(parts)
        )
    assert (replicas(8), replicas(7), grids(4), grids(8)[2]) == (2, 0, ((2, 2), (2, 2), None), (2, 4))
    sender = Partitioner(star(401).edge_index, 401)
    assert sender.uneven(2, 2) == pytest.approx(2, rel=0.05)  # one row of blocks has all edges
    assert sender.uneven(4, 1) == 4
    even = Partitioner(torch.cartesian_prod(torch.arange(8), torch.arange(8)).T.contiguous(), 8)
    assert even.uneven(2, 4) == 1


def test_uneven_blocks_cost_time():
    report = report_of("gcn", star(400), procs=[4])
    plans = {s.name: s for s in report.strategies}
    problem = report.problem
    skew = report.partitions[0].blocks[1]
    assert skew > 1.5
    assert plans["2-D"].compute == pytest.approx(problem.compute(skew / 4, 1 / 4))
    assert f"{skew:.2f}x uneven" in plans["2-D"].reason


SLOW = Machine(memory=1e10, link_latency=0.0, link_bandwidth=1e5)  # the exchange is longer than all else
FAST = Machine(memory=1e10, link_latency=0.0, link_bandwidth=1e15, beside=1.5)


@pytest.mark.parametrize("hidden", [0.0, 0.25, 1.0])
@pytest.mark.parametrize(("machine", "shorter"), [(SLOW, "interior"), (FAST, "exchange")])
def test_the_exchange_hides_behind_interior_rows(machine, shorter, hidden):
    machine = dataclasses.replace(machine, hidden=hidden)
    data = as_data(datasets.load_graph("grid:20"), width=24)
    report = report_of("sage", data, machine, procs=[2])
    plans = {s.name: s for s in report.strategies}
    pull, over, part = plans[PULL], plans[OVERLAPPED], report.partitions[0]
    assert (over.bytes, over.messages, over.syncs, over.memory) == (
        pull.bytes,
        pull.messages,
        pull.syncs,
        pull.memory,
    )
    assert over.exact
    assert over.schedule == Schedule("async", "async")
    gradients = report.problem.allreduce(2) / machine.link_bandwidth
    halo = pull.communicate - gradients
    by_part = []
    for own, edges, inner, pulled in zip(part.rows, part.edges, part.interior, part.halo, strict=True):
        whole = report.problem.compute(edges / report.graph.num_edges, (own + pulled) / report.graph.num_nodes)
        interior = whole * inner / edges
        assert (interior < halo) == (shorter == "interior")
        by_part.append(whole + halo - (interior if interior < hidden * halo else hidden * halo))
    again = report.problem.around * machine.beside  # rows that wait and rows that do not
    assert again > 0
    assert over.seconds == pytest.approx(max(by_part) + again + gradients)
    assert (over.seconds < pull.seconds) == (shorter == "interior" and hidden > 0)
    assert over.reason.startswith("the exchange hides" if hidden == 1 else f"{hidden:.0%} of the exchange hides")


@pytest.mark.parametrize("hidden", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("machine", [SLOW, FAST])
def test_old_rows_hide_as_much_as_the_machine_does(machine, hidden):
    report = report_of("sage", machine=dataclasses.replace(machine, hidden=hidden), procs=[2])
    plans = {s.name: s for s in report.strategies}
    pull, stale = plans[PULL], plans[STALE]
    assert (stale.compute, stale.communicate) == (pull.compute, pull.communicate)
    gradients = report.problem.allreduce(2) / machine.link_bandwidth  # a step waits for their sum
    halo = stale.communicate - gradients
    assert 0 < gradients < stale.communicate
    seconds = stale.compute + halo - min(stale.compute, hidden * halo) + gradients
    assert stale.seconds == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("hidden", [0.0, 0.25, 1.0])
def test_stages_run_the_code_around_their_layers_for_every_chunk(hidden):
    machine = Machine(memory=1e10, link_latency=0.0, link_bandwidth=1e7, hidden=hidden, host=1e-4)
    report = report_of("gcn", machine=machine, procs=[2])
    problem, (plan,) = report.problem, [s for s in report.strategies if s.name == "pipelined by layers"]
    chunks = 4 * 2
    work = (problem.step - problem.around) / 2 + problem.around / 2 * chunks  # of one of the two stages
    assert plan.compute == pytest.approx(work * (chunks + 1) / chunks)
    assert plan.communicate == pytest.approx(plan.bytes / 1e7)
    unseen = min(plan.compute, hidden * plan.communicate)
    assert plan.seconds == pytest.approx(plan.compute + plan.communicate - unseen)


def sampled(report):
    return next(s for s in report.strategies if s.name == "data-parallel sampling")


def test_a_sampled_step_holds_what_it_fetches_and_reads_the_edges_it_samples():
    """64 nodes, all a neighbour of all: of 63 neighbours ten are read, twice."""
    edges = (torch.ones(64, 64) - torch.eye(64)).nonzero().t()
    data = Data(x=torch.randn(64, 500), edge_index=edges, y=torch.arange(64) % 4)
    report = report_of("gcn", data, procs=[4])
    plan, problem = sampled(report), report.problem
    nodes = 64  # 16 seeds reach all others in one round
    fetched = nodes * 500 * 4 * (1 - 1 / 4)
    assert plan.memory == pytest.approx(problem.fixed + problem.features / 4 + fetched + problem.activations)
    assert plan.compute == pytest.approx(problem.compute(nodes * 10 / edges.size(1), 1.0))


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_without_gradients_every_node_is_a_target(mode):
    data = as_data(datasets.load_graph("er:20000:40000"), width=24)
    data.train_mask = torch.arange(20_000) < 20
    report = report_of("gcn", data, procs=[16], mode=mode)
    reason = sampled(report).reason
    assert report.problem.targets == (20 if mode == "train" else 20_000)
    assert ("1 step of 2 seeds" in reason) == (mode == "train")
    assert " 0% of the graph" not in reason
    assert reason.endswith("gradients are estimates" if mode == "train" else "results are estimates")


def test_clearing_memory_for_edges_is_work_on_edges(monkeypatch):
    from stretto.memory import allocator

    monkeypatch.setattr(allocator, "is_kept", lambda: False)
    data = as_data(datasets.load_graph("er:500:40000"), width=24)
    reports = [
        report_of("gcn", data, Machine(memory=1e10, host=0.0, host_far=0.0, fresh=rate), procs=[1])
        for rate in (1e15, 1e7)
    ]
    more = [getattr(reports[1].problem, name) - getattr(reports[0].problem, name) for name in ("step", "on_edges")]
    assert more[0] > 0.5
    assert more[1] > 0.95 * more[0]
    for report in reports:
        assert sum(row["ms"] for row in report.rows()) == pytest.approx(report.seconds * 1e3)
    assert sum(row["new memory ms"] for row in reports[1].rows()) == pytest.approx(more[0] * 1e3)


def test_one_number_says_whether_a_step_fits():
    class Known(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.conv = torch.nn.Embedding(300, 200), pyg.GCNConv(200, 8)

        def forward(self, x, edge_index):
            return self.conv(self.table.weight, edge_index)

    data = as_data(datasets.load_graph("er:300:900"), width=4)
    need = stretto.analyze(Known(), data, machine=MACHINE, procs=[1]).memory["total"]
    for room, fits in ((need, True), (need - 1, False)):
        report = stretto.analyze(Known(), data, machine=Machine(memory=room), procs=[1])
        assert (bool(report.memory["fits"]), report.best.fits) == (fits, fits)
        assert report.best.memory == need
        assert ("Nothing fits" in report.explain()) == (not fits)


@pytest.mark.parametrize(("workers", "skew"), [(2, 1.0), (16, 2 * 16 / 24), (3, 6 * 3 / 16), (17, 0.0)])
def test_rows_are_cut_into_columns_while_there_are_any(workers, skew):
    """Rows of 24 and of 16 values: the widest share is two of 24, six of 16."""
    report = report_of("gcn", procs=[workers])
    if not skew:
        refused = {r.name: r.reason for r in report.refusals}
        assert refused["feature-parallel"] == "rows of 16 values cannot be cut into 17 columns"
        return
    (plan,) = [s for s in report.strategies if s.name == "feature-parallel"]
    assert f"{skew:.2f}x uneven" in plan.reason
    assert plan.compute == pytest.approx(report.problem.compute(skew / workers, skew / workers))


def test_interior_edges_by_hand():
    """0 - 1 - 2 - 3, both ways; cut in the middle, 0 and 3 need nobody else."""
    edges = torch.tensor([[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]])
    part = Partitioner(edges, 4).split(2, "blocks")
    assert part.rows == (2, 2)
    assert part.interior == (1, 1)


@pytest.mark.parametrize("edges", [0, 1])
def test_one_node_needs_one_worker(edges):
    data = Data(x=torch.randn(1, 24), edge_index=torch.zeros(2, edges, dtype=torch.long), y=torch.tensor([1]))
    report = report_of("gcn", data, procs=[1, 2, 4])
    assert report.best.workers == 1


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_the_sum_of_gradients_is_a_round_of_messages_and_a_wait_where_something_is_trained(mode):
    """By hand: a GCN of two layers reads rows of 24 and 16, and in training sends gradients of the 16 back."""
    train, parts, copies, side = mode == "train", 8, 2, 2
    report = report_of("gcn", procs=[parts], mode=mode)
    plans = {s.name: s for s in report.strategies if s.workers == parts}
    rounds, ring = 2 + train, 2 * (parts - 1) * train
    messages = {
        "feature-parallel": 2 * rounds * (parts - 1) + ring,
        "1.5-D, replicated": rounds * parts // copies + ring,
        "3-D": rounds * 2 * (side - 1) + ring,
    }
    for name, each in messages.items():
        assert plans[name].messages == parts * each, name
    waits = {"feature-parallel": 2 * rounds, "1.5-D, replicated": rounds, "3-D": rounds * side, PULL: rounds}
    for name, between in waits.items():
        assert plans[name].syncs == between + train, name
    seen = plans["data-parallel sampling"]
    assert seen.messages % (parts * (parts - 1 + ring)) == 0
    (stages,) = [s for s in report_of("gcn", procs=[2], mode=mode).strategies if s.name == "pipelined by layers"]
    assert (stages.messages, stages.syncs) == (8 * (1 + train), 1 + train)
