"""What the analysis must print: work and depth in two forms, bounds, strategies with their limits."""

import dataclasses
import io
import json
import re

import pytest
import sympy
import torch
from rich.console import Console
from torch_geometric import nn as pyg

import stretto.analyze
from stretto import StrettoError, datasets
from stretto.analyze import Machine, tables
from stretto.analyze.depth import depth, levels
from stretto.analyze.strategies import MANY, strategies
from stretto.analyze.terminal import show_analysis
from stretto.machine import link as between
from stretto.observe import this_machine
from stretto.observe.lift import Sizes
from stretto.observe.models import MODELS, as_data, make
from stretto.observe.workload import Workload

MACHINE = Machine(memory=1e10, workers=2)


def cora(width=24):
    data = as_data(datasets.load_graph("cora"))
    data.x = data.x[:, :width].contiguous()
    return data


def report_of(name, procs=(1, 2, 4, 8), machine=MACHINE, data=None):
    return stretto.analyze(make(name, 24, 16, 7), data or cora(), machine=machine, procs=list(procs))


def value(formula, data):
    """A formula of the report at the sizes of the data."""
    words = re.sub(r"(?<=[0-9a-z)]) (?=[a-z(])", "*", formula.replace("^", "**"))
    sizes = dataclasses.asdict(Sizes.of(data))
    return float(sympy.sympify(words, locals={n: sympy.Symbol(n) for n in "nmaetg"}).subs(sizes))


@pytest.mark.parametrize("name", MODELS)
def test_formulas_and_numbers_of_what_runs_and_of_the_best_agree(name):
    data = cora()
    report = report_of(name, data=data)
    for cost in report.costs:
        assert value(cost.formula, data) == pytest.approx(cost.flops)
        assert value(cost.best_formula, data) == pytest.approx(cost.best_flops)
        assert 0 < cost.best_depth <= cost.depth <= report.depth.steps


def test_every_layer_has_its_forms():
    rows = report_of("gcn").costs[0].rows()
    assert [row["form"] for row in rows] == ["as it runs", "best re-association"]
    assert all(row[key] for row in rows for key in ("layer", "class", "work", "flops", "depth", "steps"))
    assert rows[1]["flops"] < rows[0]["flops"]


def test_depth_of_a_layer_is_its_part_of_the_path():
    data = cora()
    trace = Workload(make("gcn", 24, 16, 7, 1), data, "infer").trace()
    whole = depth(trace, 168)
    assert depth(trace, 168, only=range(len(trace.ops))) == whole
    assert depth(trace, 168, only=()).steps == 0
    assert depth(trace, 168, free=range(len(trace.ops))).launches == 0


def test_levels_are_readable():
    n, d = sympy.Symbol("n", positive=True), sympy.Symbol("d", positive=True)
    terms = {1 + sympy.log(d, 2): 3, sympy.log(8 * n, 2): 1, sympy.log(n, 2) ** 2: 1}
    assert levels(terms) == "3 log d + 1 log n + 1 (log n)^2 + 6"
    assert levels({}) == "0"


def test_the_longest_chain_has_the_value_of_its_formula():
    report = report_of("gat", procs=[1])
    sizes = {"d": report.graph.max_degree, "n": 2708, "t": 140, "e": 13264, "m": 10556, "a": 10556}
    total = 0.0
    for term in report.depth.symbolic.split(" + "):
        number, _, letter = term.partition(" log ")
        total += float(number) * (float(sympy.log(sizes[letter], 2)) if letter else 1.0)
    assert total == pytest.approx(report.depth.steps, abs=1)


class Own(pyg.MessagePassing):
    def __init__(self):
        super().__init__(aggr="add")
        self.lin = torch.nn.Linear(24, 8)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x))

    def message(self, x_j):
        return x_j


def test_sparse_and_dense_are_all_of_it():
    report = report_of("gcn")
    for what, whole in (("flops", report.work), ("bytes", report.bytes)):
        assert sum(part[what] for part in report.split.values()) == pytest.approx(whole)
    assert report.split["sparse"]["flops"] > 0
    assert report_of("edgeconv").split["sparse"]["flops"] > report_of("edgeconv").split["dense"]["flops"]


# ---- strategies ----


def test_what_does_not_apply_is_listed_with_its_reason():
    report = report_of("gat")
    applied = {(s.name, s.workers) for s in report.strategies if s.workers > 1}
    refused = {(r.name, r.workers): r.reason for r in report.refusals}
    assert not applied & refused.keys()
    assert applied | refused.keys() == {(name, P) for name in MANY for P in (2, 4, 8)}
    assert "softmax" in refused["partition + halo, push", 2]
    assert "copies" in refused["1.5-D, replicated", 2]
    assert "no square" in refused["2-D", 8]
    assert "2 layers" in refused["pipelined by layers", 4]
    assert any(line.startswith("3-D on 2, 4: ") for line in tables.refusal_lines(report))
    assert json.loads(report.to_json())["refusals"][0]["reason"]


def test_words_of_grids():
    report = report_of("sage", procs=[1, 4, 8, 64])
    found = {(s.name, s.workers): s for s in report.strategies}
    n, m, width, rounds = report.graph.num_nodes, report.graph.num_edges, (24 + 16) + 16, 3
    reduce = {P: 2 * (P - 1) * report.problem.parameters * 4 for P in (4, 8, 64)}
    assert found["2-D", 4].bytes == pytest.approx(4 * 4 * (n * width + m * rounds) / 2 + reduce[4])
    assert found["3-D", 8].bytes == pytest.approx(8 * 4 * (n * width + m * rounds) / 4 + reduce[8])
    assert found["3-D", 64].bytes < found["2-D", 64].bytes
    assert found["1.5-D, replicated", 8].bytes == pytest.approx(8 * 4 * width * (n / 2 + n * 2 / 8) + reduce[8])


def test_more_workers_than_there_are_is_elsewhere():
    report = report_of("gcn", machine=Machine(memory=1e10, workers=2, link_bandwidth=1e13, link_latency=0.0))
    assert report.best.workers == 8
    assert not report.best.here
    assert report.best_here.workers <= 2
    assert "That is elsewhere: this machine runs 2 workers at once, best" in report.verdict()
    plenty = report_of("gcn", machine=Machine(memory=1e10, workers=8, link_bandwidth=1e13, link_latency=0.0))
    assert "elsewhere" not in plenty.explain()


def test_nothing_fits_is_said():
    report = report_of("edgeconv", machine=Machine(memory=1e4))
    assert not any(s.fits for s in report.strategies)
    assert report.best_here is None
    assert "Nothing fits into 1e-05 GB: least is" in report.explain()
    assert "Best:" not in report.explain()


def test_an_assumed_link_is_called_one(tmp_path):
    assert "are assumed" in report_of("gcn").explain()
    assert "are assumed" not in report_of("gcn", procs=[1]).explain()
    (tmp_path / "m.json").write_text('{"link_latency": 1e-6, "link_bandwidth": 1e10}')
    given = Machine.load(tmp_path / "m.json")
    assert given.link == "given"
    assert "are assumed" not in report_of("gcn", machine=given).explain()


def test_the_link_is_measured_once_where_it_matters(monkeypatch):
    calls = []

    def link():
        calls.append(1)
        return {"link_latency": 1e-4, "link_bandwidth": 2e9, "beside": 1.25, "hidden": 0.5}

    monkeypatch.setattr("stretto.observe.this_machine.probe", lambda device: Machine(name="probed"))
    monkeypatch.setattr(between, "link", link)
    assert this_machine.get().link == "assumed"  # a profile needs none
    assert not calls
    for _ in range(2):
        found = report_of("gcn", machine="auto").machine
        assert (found.name, found.link, found.link_bandwidth) == ("probed", "measured", 2e9)
        assert (found.link_latency, found.beside, found.hidden) == (1e-4, 1.25, 0.5)
    assert len(calls) == 1


def test_a_link_that_cannot_be_measured_stays_assumed(monkeypatch, caplog):
    def link():
        raise StrettoError("no gloo")

    monkeypatch.setattr("stretto.observe.this_machine.probe", lambda device: Machine())
    monkeypatch.setattr(between, "link", link)
    assert this_machine.get(link=True).link == "assumed"
    assert "no gloo" in caplog.text


# ---- terminal ----


def printed(report, width=200):
    out = io.StringIO()
    show_analysis(Console(file=out, width=width), report)
    return out.getvalue()


def test_the_terminal_shows_all_of_it():
    report = report_of("gcn", procs=[1, 2, 4, 8, 16])
    text = printed(report)
    for title in (
        "Graph", "Memory", "Sparse and dense work", "Work and depth by layer", "Partitions",
        "Strategies, fastest first", "Not applicable",
    ):  # fmt: skip
        assert title in text, title
    assert "one worker, full batch" in text  # the slowest of them here, and always there
    for name in MANY:
        assert name in text.replace("\n", " "), name
    assert "elsewhere" in text


def test_one_worker_and_the_best_of_each_kind_are_always_shown():
    report = report_of("gcn", procs=[1, 2, 4, 8, 16], machine=Machine(memory=1e10, link_bandwidth=1e13))
    names = [row["name"] for row in tables.fastest(report)]
    assert set(names) == {s.name for s in report.strategies}
    assert names[: tables.FASTEST] == [s.name for s in report.strategies[: tables.FASTEST]]
    assert len(names) < len(report.strategies)


def test_strategies_say_whether_they_fit():
    report = report_of("gcn")
    limit = sorted(s.memory for s in report.strategies)[1] + 1
    problem = dataclasses.replace(report.problem, machine=Machine(memory=limit, workers=2))
    again = strategies(problem, report.partitions)
    assert [s.fits for s in again] == sorted((s.memory <= limit for s in again), reverse=True)
    assert any(s.fits for s in again)
    assert {s.here for s in again if s.workers <= 2} == {True}
    assert {s.here for s in again if s.workers > 2} == {False}


def test_what_print_and_a_notebook_show():
    report = report_of("gcn")
    assert str(report) == repr(report) == report.explain()
    found = stretto.profile(make("gcn", 8, 4, 8), as_data(datasets.load_graph("er:40:80"), width=8), machine=Machine())
    assert repr(found) == str(found)
    assert str(found).startswith("Stack, train: ")
