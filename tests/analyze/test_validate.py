"""validate(): what the report says against what runs, in a process as the report assumed it; and what does not run."""

import pytest
import torch

import stretto.analyze
from stretto import datasets
from stretto.analyze import Machine, validate, workers
from stretto.analyze.strategies import STALE
from stretto.dist import link as between
from stretto.memory import allocator
from stretto.observe.models import as_data, make

FREE = {"flops", "compulsory bytes", "peak memory of the step", "step, as given"}


def cora():
    data = as_data(datasets.load_graph("cora"))
    data.x = data.x[:, :24].contiguous()
    return data


def rows_of(report, **options):
    return {row["what"]: row for row in report.validate(repeats=1, **options)}


def test_the_reported_prediction_is_the_one_that_is_checked(monkeypatch):
    """In the state of the allocator that it was made for, whatever accelerating a copy does meanwhile."""
    seen = []

    def seconds(workload, repeats):
        seen.append((type(workload.model).__name__, allocator.is_kept()))
        return 1.0

    monkeypatch.setattr(validate, "seconds", seconds)
    allocator.switch(False)
    # A machine on which new memory is dear: a prediction for a process that keeps memory would be another.
    report = stretto.analyze(make("edgeconv", 24, 16, 7), cora(), machine=Machine(memory=1e10, fresh=1e7), procs=[1])
    assert not report.memory_kept
    rows = rows_of(report, workers=0)
    assert rows["step, as given"]["predicted"] == report.seconds
    assert seen[0] == ("Stack", False)
    assert not allocator.is_kept()
    if "step, accelerated" in rows and not torch.cuda.is_available():
        assert seen[1] == ("Stack", True)


def test_the_strategys_own_row_is_checked_and_a_second_price_is_called_one(monkeypatch):
    monkeypatch.setattr(between, "link", lambda: {"link_latency": 1e-3, "link_bandwidth": 1e8, "beside": 1.5})
    found = {"bytes": 1, "messages": 2, "syncs": 3, "tallied bytes": 1, "tallied messages": 2, "seconds": 0.5}
    monkeypatch.setattr(workers, "run_engine", lambda *args, **options: found)
    report = stretto.analyze(make("sage", 24, 16, 7), cora(), machine=Machine(memory=1e10), procs=[1, 2])
    (own,) = [s for s in report.strategies if s.name == validate.PULL]
    rows = {row["what"]: row for row in validate.partitioned(report, _splitter(report), validate.PULL, 2, 1)}
    name = f"step, {validate.PULL}, 2 workers"
    assert rows[name]["predicted"] == own.seconds
    again = rows[f"{name}, {validate.REPRICED}"]
    assert again["predicted"] > own.seconds
    assert again["note"]
    assert rows[f"bytes, {validate.PULL}, 2 workers"]["predicted"] == own.bytes
    # A number of workers that the report has no row for is priced by the same machine.
    three = {row["what"]: row for row in validate.partitioned(report, _splitter(report), validate.PULL, 3, 1)}
    assert three[f"step, {validate.PULL}, 3 workers"]["predicted"] > 0


def test_workers_that_ran_with_one_thread_are_priced_with_one(monkeypatch):
    """And with memory that they keep, whatever this process does."""
    asked = []
    slow = Machine(memory=1e10, host=1e-2, host_far=1e-2)

    def get(machine="auto", **options):
        if machine == "auto":
            asked.append(torch.get_num_threads())
        return slow if machine == "auto" else machine

    monkeypatch.setattr(validate.this_machine, "get", get)
    monkeypatch.setattr("stretto.observe.predict.fresh_bytes", lambda trace: {0: 1e6})
    monkeypatch.setattr(between, "link", lambda: {"link_latency": 0.0})
    found = {"bytes": 1, "messages": 2, "syncs": 3, "tallied bytes": 1, "tallied messages": 2, "seconds": 0.5}
    monkeypatch.setattr(workers, "run_engine", lambda *args, **options: found)
    name = f"step, {validate.PULL}, 2 workers"
    for threads in (1, 2):
        machine = Machine(memory=1e10, threads=threads, fresh=1e3, link_latency=0.0)
        with validate.memory_as(False):
            report = stretto.analyze(make("sage", 24, 16, 7), cora(), machine=machine, procs=[1, 2])
        rows = {row["what"]: row for row in validate.partitioned(report, _splitter(report), validate.PULL, 2, 1)}
        again = rows[f"{name}, {validate.REPRICED}"]["predicted"]
        assert rows[name]["note"] == ("" if threads == 1 else "priced with 2 threads a worker, run with one thread")
        if threads == 1:
            assert asked == []
            assert again < 1 < rows[name]["predicted"] / 100  # which clears memory, slowly
        else:
            assert asked == [1]
            assert again > 1e-2 * len(report.trace.ops)  # every worker runs the code around all ops


def _splitter(report):
    return validate.Partitioner(report.inputs.edge_index, report.graph.num_nodes)


def test_what_does_not_fit_is_not_run(monkeypatch):
    report = stretto.analyze(make("sage", 24, 16, 7), cora(), machine=Machine(memory=1e6), procs=[1, 2])

    def never(*args, **options):
        raise AssertionError("the step ran")

    monkeypatch.setattr(report.workload.model, "forward", never)
    rows = rows_of(report)
    for what in FREE:
        assert rows[what]["measured"] is None
        assert "0.001 GB" in rows[what]["note"]
    assert rows["halo rows, 2 parts"]["counted"] == rows["halo rows, 2 parts"]["predicted"]
    assert "GB" in rows[f"step, {validate.PULL}, 2 workers"]["note"]
    assert "step, accelerated" not in rows


@pytest.mark.parametrize("name", ["sgc", "gat"])
def test_reasons_are_in_the_rows(name):
    report = stretto.analyze(make(name, 24, 16, 7), cora(), machine=Machine(memory=1e10), procs=[1, 2])
    rows = rows_of(report)
    for plan in validate.RUN:
        assert "has no rule" in rows[f"step, {plan}, 2 workers"]["note"]


def test_a_run_that_fails_is_told(monkeypatch):
    monkeypatch.setattr(workers, "run_engine", lambda *args, **options: stretto.errors.fail("no processes here"))
    report = stretto.analyze(make("sage", 24, 16, 7), cora(), machine=Machine(memory=1e10), procs=[1, 2])
    assert rows_of(report)[f"step, {STALE}, 2 workers"]["note"] == "failed: no processes here"


def test_data_that_stretto_dist_cannot_train_on_are_not_run():
    for name, value, words in (("y", None, "no labels"), ("train_mask", torch.arange(40), "mask over the nodes")):
        data = cora()
        setattr(data, name, value)
        report = stretto.analyze(make("sage", 24, 16, 7), data, machine=Machine(memory=1e10), procs=[1, 2])
        assert words in rows_of(report)[f"step, {STALE}, 2 workers"]["note"]
