"""The operator study: every op of it has cells, candidates agree with fp64, findings are judged from the numbers."""

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks.operator_study import cell as study
from benchmarks.operator_study import findings
from benchmarks.operator_study.__main__ import command
from benchmarks.operator_study.cell import Cell, run
from benchmarks.operator_study.cells import cells
from benchmarks.suites import results, stock
from stretto.machine.timing import Timing

TINY = study.Setting(line=64, side=16, cube=6, tall=(32, 4), small=8)
REPEATS = study.REPEATS  # before a test makes it small


@pytest.fixture(autouse=True)
def small(monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setitem(study.SETTINGS, "cpu", TINY)
    monkeypatch.setattr(study, "REPEATS", 2)


def test_the_grid_is_the_studys():
    found = list(cells(TINY))
    assert {c.op for c in found} >= {
        "addmm", "matmul", "index_select", "gather", "index_add_", "scatter_sum", "scatter_mean", "scatter_mul",
        "scatter_max", "scatter_min", "sort", "sort, stable", "transpose", "spmm", "spspmm", "coalesce",
    }  # fmt: skip
    assert study.SPARSITIES == (0.0, 0.5, 0.9, 0.99)
    for op in ("index_select", "gather", "index_add_", "scatter_sum", "scatter_mean", "scatter_mul", "scatter_max"):
        mine = {(c.shape, c.dim, c.factor) for c in found if c.op == op}
        dims = [(name, dim) for name, shape in TINY.shapes.items() for dim in range(len(shape))]
        assert mine == {(name, dim, factor) for name, dim in dims for factor in (1, 2, 4, 8)}, op
    (addmm,) = [c for c in found if c.op == "addmm" and c.shape == "small square"]
    assert len(addmm.candidates) * len(study.SPARSITIES) == 64
    (dense,) = [c for c in found if c.op == "spmm, zeros in B"]
    assert {name.rpartition(" ")[2] for name in dense.candidates} == {"0%", "50%", "90%", "99%"}
    assert {(c.shape, c.factor) for c in found if c.op == "coalesce"} == {
        (name, factor) for name in ("square", "column") for factor in (1, 2, 4, 8)
    }
    for op in ("spspmm", "sort", "sort, stable", "transpose", "transpose, sparse", "coalesce"):
        assert all(len(c.candidates) >= 2 for c in found if c.op == op), op


def test_a_reduce_factor_divides_the_entries_of_an_index():
    for cell in cells(TINY):
        x = TINY.values(cell.values, 0.0)
        if cell.op in ("index_select", "gather", "index_add_", "scatter_max"):
            size = list(x.shape)
            size[cell.dim] = max(1, size[cell.dim] // cell.factor)
            assert list(cell.reference(x).shape) == size, cell.label


def test_every_candidate_is_right_and_timed():
    for cell in cells(TINY):
        run(cell, 2, TINY)
        assert cell.reasons == {}, cell.label
        assert all(error <= study.ALLOWED for error in cell.errors.values()), cell.label
        wanted = 3 if cell.structural else 4
        assert len(cell.timings) == wanted * len(cell.candidates), cell.label
        assert all(len(t.samples) >= 2 for t in cell.timings.values())


class Fake:
    """torch_scatter and torch_sparse, written with torch."""

    @staticmethod
    def scatter(x, index, dim, dim_size, reduce):
        size = [dim_size if d == dim else s for d, s in enumerate(x.shape)]
        where = index.view(*[-1 if d == dim else 1 for d in range(x.dim())]).expand_as(x)
        word = {"sum": "sum", "mean": "mean", "mul": "prod", "max": "amax", "min": "amin"}[reduce]
        return x.new_full(size, float(reduce == "mul")).scatter_reduce_(
            dim, where, x, word, include_self=reduce == "mul"
        )

    @staticmethod
    def _matrix(index, value, m, n):
        return torch.sparse_coo_tensor(index, value, (m, n)).coalesce()

    @staticmethod
    def spmm(index, value, m, n, dense):
        return Fake._matrix(index, value, m, n) @ dense

    @staticmethod
    def spspmm(a, x, b, y, m, k, n):
        out = torch.sparse.mm(Fake._matrix(a, x, m, k), Fake._matrix(b, y, k, n)).coalesce()
        return out.indices(), out.values()

    @staticmethod
    def coalesce(index, value, m, n, op):
        out = Fake._matrix(index, value, m, n)
        return out.indices(), out.values()

    @staticmethod
    def transpose(index, value, m, n):
        return Fake.coalesce(index.flip(0), value, n, m, "add")


def test_the_studys_own_libraries_are_candidates_where_they_are_there(monkeypatch):
    monkeypatch.setattr(stock, "optional", lambda name: Fake)
    ran = set()
    for cell in cells(TINY):
        other = {"torch_scatter", "torch_sparse"} & set(cell.candidates)
        if other and cell.factor < 4:
            cell.candidates = {name: cell.candidates[name] for name in other}
            run(cell, 1, TINY)
            assert cell.reasons == {}, cell.label
            ran.add(cell.op)
    assert ran == {
        "scatter_sum", "scatter_mean", "scatter_mul", "scatter_max", "scatter_min", "spmm", "spspmm", "coalesce",
        "transpose, sparse",
    }  # fmt: skip


def test_what_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(stock, "optional", lambda name: "not installed")
    named = findings.not_to_be_had(list(cells(TINY)))
    assert set(named) == {"torch_scatter", "torch_sparse"}
    assert named["torch_sparse"].startswith("not installed (spmm, spspmm, coalesce")


def test_every_candidate_meets_each_share_of_zeros():
    met = []
    cell = Cell("look", "1-D", (40_000,), {"look": lambda x: met.append(float((x == 0).float().mean())) or x}, abs)
    run(cell, 1, TINY)
    for share in study.SPARSITIES:
        assert min(abs(zeros - share) for zeros in met) < 0.01
        assert (share, "look") in cell.timings


def test_every_row_has_a_spread(monkeypatch):
    """At least twenty samples, each of its own: quantiles that differ, where the study had none by construction."""
    assert REPEATS >= 20
    monkeypatch.setattr(study, "REPEATS", REPEATS)
    (cell,) = [c for c in cells(TINY) if c.op == "index_select" and c.label.endswith("square dim 0 rf 1")]
    run(cell, 1, TINY)
    for timing in cell.timings.values():
        assert len(timing.samples) >= 20
        assert len(set(timing.samples)) > 5
        row = timing.to_dict()
        assert row["min_ms"] <= row["q20_ms"] <= row["median_ms"] <= row["q80_ms"] <= row["max_ms"]
        assert row["min_ms"] < row["max_ms"]
    for row in findings.rows_of(cell, 1, "cpu"):
        assert float(row["stock_low"]) <= float(row["stock"]) <= float(row["stock_high"])
        assert float(row["stock_low"]) < float(row["stock_high"])


@pytest.mark.parametrize("wrong", [1.5, 1.001], ids=["another op", "off by a thousandth"])
def test_a_wrong_candidate_is_not_timed(wrong):
    ways = {"right": lambda x: 2 * x, "wrong": lambda x: 2 * wrong * x}
    cell = Cell("double", "1-D", (4000,), ways, lambda x: 2 * x)
    run(cell, 2, TINY)
    assert {name for _, name in cell.timings} == {"right"}
    assert all(reason.startswith("wrong") for reason in cell.reasons.values())


def timed(op, dim, times, candidates=("index_select",)):
    cell = Cell(op, "square", (4, 4), dict.fromkeys(candidates, torch.clone), torch.clone, dim=dim)
    cell.timings = {key: Timing((t,) * 3) for key, t in times.items()}
    return cell


def test_findings_follow_the_numbers():
    even = {(s, "index_select"): 1.0 for s in study.SPARSITIES}
    slow = dict.fromkeys(even, 10.0)
    pair = {(s, name): t for s in study.SPARSITIES for name, t in (("torch", 1.0), ("PyG", 2.0))}
    done = [
        timed("index_select", 0, even),
        timed("index_select", 1, slow),
        timed("scatter_sum", 0, pair, ("torch", "PyG")),
    ]
    assert [f.holds for f in findings.findings(done)] == [True, True, True]
    assert "10.0x" in findings.findings(done)[0].numbers
    faster = {(s, "index_select"): 1.0 if s == 0 else 0.1 for s in study.SPARSITIES}
    pair = {(s, name): t for s in study.SPARSITIES for name, t in (("torch", 2.0), ("PyG", 1.0))}
    done = [
        timed("index_select", 0, faster),
        timed("index_select", 1, faster),
        timed("scatter_sum", 0, pair, ("torch", "PyG")),
    ]
    assert [f.holds for f in findings.findings(done)][:2] == [False, False]
    locality, oblivious = findings.findings(done[:2])
    assert not locality.holds
    assert not oblivious.holds
    assert oblivious.numbers.startswith("no benefit from 99 % zeros in 0 of 1 ops")
    assert findings.findings([]) == []


def test_the_middle_of_many_ratios_judges():
    """One ratio far from 1 is chance: of an axis that changes nothing it is no proof, of sparsity no disproof."""

    def done(axis, sparsity):
        found = []
        for shape, slower in axis.items():
            for dim in (0, 1):
                times = {(s, "index_select"): slower if dim else 1.0 for s in study.SPARSITIES}
                times[0.99, "index_select"] *= sparsity if shape == "tall" else 1.0
                found.append(timed("index_select", dim, times))
                found[-1].shape = shape
        return findings.findings(found)[0]

    lucky = done({"square": 1.0, "cube": 1.0, "tall": 1.3}, 1.2)
    assert not lucky.holds
    unlucky = done({"square": 5.0, "cube": 10.0, "tall": 4.0}, 20.0)
    assert unlucky.holds
    assert "5.0x in the middle and 10.0x at most (index_select on the cube)" in unlucky.numbers
    assert "sparsity 1.00x in the middle and 20.00x at most" in unlucky.numbers


def test_the_spread_over_all_operands_is_told():
    cell = timed("addmm", 0, {(s, f"{i}"): 1.0 + 0.01 * i for s in study.SPARSITIES for i in range(16)}, ("0", "15"))
    (found,) = findings.findings([cell])
    assert "64 combinations of zeros in addmm differ by 15%" in found.numbers


def test_command(tmp_path, monkeypatch):
    runner, app = CliRunner(), typer.Typer()
    app.command()(command)
    monkeypatch.setattr(study, "REPEATS", REPEATS)
    result = runner.invoke(app, ["--only", "gather", "--csv", str(tmp_path / "h.csv")])
    assert result.exit_code == 0, result.output
    assert "TRUE in this part" in result.output or "FALSE in this part" in result.output
    assert "many central ops ignore sparsity" in result.output
    assert "judged on a part of the study" in result.output
    assert "those that contain 'gather'" in " ".join(result.output.split())
    told = results.load(tmp_path / "h.csv")
    assert {row["suite"] for row in told} == {"operator_study"}
    assert {row["op"] for row in told} == {"gather"}
    assert {row["sparsity"] for row in told} == {"0", "0.5", "0.9", "0.99"}
    for words, said in (
        (["--repeats", "19"], "'--repeats' is 19, wanted at least 20"),
        (["--threads", "100000"], "'--threads' is 100000, wanted at most 1024"),
        (["--only", "levitate"], "no cell contains 'levitate'"),
    ):
        assert said in str(runner.invoke(app, words).exception)
