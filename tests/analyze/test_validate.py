"""validate(): what the report says against what runs, in a process as the report assumed it; and what does not run."""

from types import SimpleNamespace

import pytest
import torch

import stretto.analyze
from stretto import datasets
from stretto.analyze import Machine, validate
from stretto.analyze.strategies import PULL, STALE
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


def test_workers_that_ran_with_one_thread_are_told_where_they_were_priced_with_more(monkeypatch):
    run = SimpleNamespace(sent=lambda: {"bytes": 1, "messages": 2, "syncs": 3}, seconds=[9.0, 0.5])
    monkeypatch.setattr(validate, "_run", lambda *args: run)
    for threads in (1, 2):
        machine = Machine(memory=1e10, threads=threads)
        report = stretto.analyze(make("sage", 24, 16, 7), cora(), machine=machine, procs=[1, 2])
        *_, row = validate.partitioned(report, PULL, 2, 1)
        assert row["measured"] == 0.5
        assert row["note"] == ("" if threads == 1 else "priced with 2 threads a worker, run with one thread")
    # A number of workers that the report has no row for is priced by the same machine.
    *_, three = validate.partitioned(report, PULL, 3, 1)
    assert three["predicted"] > 0


def test_what_does_not_fit_is_not_run(monkeypatch):
    report = stretto.analyze(make("sage", 24, 16, 7), cora(), machine=Machine(memory=1e6), procs=[1, 2])

    def never(*args, **options):
        raise AssertionError("the step ran")

    monkeypatch.setattr(report.workload.model, "forward", never)
    rows = rows_of(report)
    for what in FREE:
        assert rows[what]["measured"] is None
        assert "0.001 GB" in rows[what]["note"]
    assert "GB" in rows[f"step, {PULL}, 2 workers"]["note"]
    assert "step, accelerated" not in rows


@pytest.mark.parametrize("name", ["sgc", "gat"])
def test_reasons_are_in_the_rows(name):
    report = stretto.analyze(make(name, 24, 16, 7), cora(), machine=Machine(memory=1e10), procs=[1, 2])
    rows = rows_of(report)
    for plan in validate.RUN:
        assert "has no rule" in rows[f"step, {plan}, 2 workers"]["note"]


def test_a_run_that_fails_is_told(monkeypatch):
    monkeypatch.setattr(validate, "_run", lambda *args: stretto.errors.fail("no processes here"))
    report = stretto.analyze(make("sage", 24, 16, 7), cora(), machine=Machine(memory=1e10), procs=[1, 2])
    assert rows_of(report)[f"step, {STALE}, 2 workers"]["note"] == "failed: no processes here"


def test_data_that_stretto_dist_cannot_train_on_are_not_run():
    for name, value, words in (("y", None, "no labels"), ("train_mask", torch.arange(40), "mask over the nodes")):
        data = cora()
        setattr(data, name, value)
        report = stretto.analyze(make("sage", 24, 16, 7), data, machine=Machine(memory=1e10), procs=[1, 2])
        assert words in rows_of(report)[f"step, {STALE}, 2 workers"]["note"]
