"""The operator study: every op of it has cells, candidates agree with fp64, findings are judged from the numbers."""

import pytest
import torch
from typer.testing import CliRunner

from stretto import cli
from stretto.bench import findings, hosseini
from stretto.bench.hosseini import Cell, cells, run
from stretto.tune.timing import Timing

TINY = hosseini.Setting(line=64, side=16, cube=6, tall=(32, 4))
REPEATS = hosseini.REPEATS  # before a test makes it small


@pytest.fixture(autouse=True)
def small(monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setitem(hosseini.SETTINGS, "cpu", TINY)
    monkeypatch.setattr(hosseini, "SMALL", 8)
    monkeypatch.setattr(hosseini, "REPEATS", 2)


def test_the_grid_is_the_studys():
    found = list(cells(TINY))
    assert {c.op for c in found} >= {
        "addmm", "matmul", "index_select", "gather", "index_add_", "scatter_sum", "scatter_mean", "scatter_mul",
        "scatter_max", "scatter_min", "sort", "sort, stable", "transpose", "spmm", "spspmm", "coalesce",
    }  # fmt: skip
    assert {c.factor for c in found if c.op == "scatter_sum"} == {1, 2, 4, 8}
    assert {c.dim for c in found if c.op == "index_select"} == {0, 1, 2}
    assert hosseini.SPARSITIES == (0.0, 0.5, 0.9, 0.99)


def test_every_candidate_is_right_and_timed():
    for cell in cells(TINY):
        run(cell, 2, TINY)
        assert cell.reasons == {}, cell.label
        assert all(error <= hosseini.ALLOWED for error in cell.errors.values()), cell.label
        wanted = 3 if cell.structural else 4
        assert len(cell.timings) == wanted * len(cell.candidates), cell.label
        assert all(len(t.samples) >= 2 for t in cell.timings.values())


def test_every_row_has_a_spread(monkeypatch):
    """At least twenty samples, each of its own: quantiles that differ, where the study had none by construction."""
    assert REPEATS >= 20
    monkeypatch.setattr(hosseini, "REPEATS", REPEATS)
    (cell,) = [c for c in cells(TINY) if c.op == "index_select" and c.shape == "square" and c.dim == 0]
    run(cell, 1, TINY)
    for timing in cell.timings.values():
        assert len(timing.samples) >= 20
        assert len(set(timing.samples)) > 5
        row = timing.to_dict()
        assert row["min_ms"] <= row["q20_ms"] <= row["median_ms"] <= row["q80_ms"] <= row["max_ms"]
        assert row["min_ms"] < row["max_ms"]


def test_a_wrong_candidate_is_not_timed():
    cell = Cell("double", "1-D", (4000,), {"right": lambda x: 2 * x, "wrong": lambda x: 3 * x}, lambda x: 2 * x)
    run(cell, 2, TINY)
    assert {name for _, name in cell.timings} == {"right"}
    assert all(reason.startswith("wrong") for reason in cell.reasons.values())


def timed(op, dim, times, candidates=("index_select",)):
    cell = Cell(op, "square", (4, 4), dict.fromkeys(candidates, torch.clone), torch.clone, dim=dim)
    cell.timings = {key: Timing((t,) * 3) for key, t in times.items()}
    return cell


def test_findings_follow_the_numbers():
    even = {(s, "index_select"): 1.0 for s in hosseini.SPARSITIES}
    slow = dict.fromkeys(even, 10.0)
    pair = {(s, name): t for s in hosseini.SPARSITIES for name, t in (("torch", 1.0), ("PyG", 2.0))}
    done = [
        timed("index_select", 0, even),
        timed("index_select", 1, slow),
        timed("scatter_sum", 0, pair, ("torch", "PyG")),
    ]
    assert [f.holds for f in findings.findings(done)] == [True, True, True]
    assert "10.0x" in findings.findings(done)[0].numbers
    faster = {(s, "index_select"): 1.0 if s == 0 else 0.1 for s in hosseini.SPARSITIES}
    pair = {(s, name): t for s in hosseini.SPARSITIES for name, t in (("torch", 2.0), ("PyG", 1.0))}
    done = [
        timed("index_select", 0, faster),
        timed("index_select", 1, faster),
        timed("scatter_sum", 0, pair, ("torch", "PyG")),
    ]
    assert [f.holds for f in findings.findings(done)][:2] == [False, False]
    assert findings.findings([]) == []


def test_command(tmp_path):
    words = ["bench", "ops", "--suite", "hosseini", "--only", "gather", "--json", str(tmp_path / "h.json")]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 0, result.output
    assert "many central ops ignore sparsity" in result.output
    missing = CliRunner().invoke(cli.app, ["bench", "ops", "--suite", "hosseini", "--only", "levitate"])
    assert "no cell of the suite" in str(missing.exception)
