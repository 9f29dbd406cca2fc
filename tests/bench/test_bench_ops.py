"""`stretto bench ops`: candidates are checked before they are timed; records say all that is needed to repeat them."""

import math

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.suites import foundation, report, results, run, stock
from benchmarks.suites.case import OURS, Spec
from benchmarks.suites.cases import CASES, build
from benchmarks.suites.run import expected
from benchmarks.suites.stock import Candidate
from stretto import cli
from stretto.errors import StrettoError
from stretto.observe.agreement import relative_error
from stretto.ops import OPS

SMALL = "rmat:8:1500"
runner = CliRunner()


def small(**words):
    return Spec(**{"graph": SMALL, "width": 12, "threads": 1, **words})


def measured(spec):
    return run.run(spec, repeats=2, with_ceilings=())


@pytest.mark.parametrize("op", list(OPS))
@pytest.mark.parametrize("direction", ["fwd", "both"])
def test_every_op_passes_its_check_and_is_timed(op, direction):
    result = measured(small(op=op, direction=direction))
    rows = {row.candidate: row for row in result.rows}
    assert rows[OURS].reason == ""
    assert rows[OURS].timing.median > 0
    assert result.best_other is not None
    assert result.speedup()[0] > 0


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("weight", ["none", "edge", "scales"])
def test_every_stock_candidate_of_spmm_agrees_with_the_reference(reduce, weight):
    result = measured(small(reduce=reduce, weight=weight, direction="both"))
    for row in result.rows:
        expected_reasons = ("has no", "not installed", "does not load")
        assert row.timing is not None or row.reason.startswith(expected_reasons), (row.candidate, row.reason)


@pytest.mark.parametrize("dtype", ["f64", "bf16", "f16"])
def test_other_dtypes(dtype):
    result = measured(small(dtype=dtype))
    assert result.ours is not None
    if dtype != "f64":
        assert result.timing("torch csr in f32") is not None


def test_a_wrong_candidate_is_found_out_and_not_timed(monkeypatch):
    offers = stock.spmm

    def with_a_wrong_one(*arguments):
        found, skipped = offers(*arguments)
        broken = Candidate("broken", lambda x: (torch.zeros_like(x) + 1e-3).mul(x.sum()))
        raising = Candidate("raising", lambda x: x @ x)
        return [*found, broken, raising], skipped

    monkeypatch.setattr(stock, "spmm", with_a_wrong_one)
    rows = {row.candidate: row for row in measured(small()).rows}
    assert rows["broken"].timing is None
    assert rows["broken"].reason.startswith("wrong: relative error")
    assert rows["raising"].timing is None
    assert rows["raising"].reason.startswith("raises: ")


def test_candidates_can_be_left_out():
    result = run.run(small(), repeats=1, with_ceilings=(), without=foundation.SLOW)
    assert not {row.candidate for row in result.rows} & set(foundation.SLOW)
    assert result.timing("torch csr") is not None


def test_the_reference_by_columns_is_the_reference(monkeypatch):
    for op in ("spmm", "sddmm", "segment_reduce"):
        case = build(small(op=op, direction="both"))
        torch.manual_seed(3)
        whole, upstream = expected(case, both=True)
        leaves = [t.double().requires_grad_() for t in case.inputs]
        out = case.reference(*leaves)
        gradients = torch.autograd.grad(out, leaves, upstream.double())
        monkeypatch.setattr(run, "REFERENCE_ELEMENTS", 5 * case.num_edges)
        pieces, _ = expected(case, both=False)
        assert relative_error(whole[0], out.detach()) < 1e-14
        assert relative_error(pieces[0], out.detach()) < 1e-14
        assert all(relative_error(w, g) < 1e-14 for w, g in zip(whole[1:], gradients, strict=True))


def test_threads_are_set_and_put_back():
    before = torch.get_num_threads()
    with run.threads(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_command_repeats_the_cell():
    plain = Spec(width=64, threads=2).command(9)
    assert plain == (
        "stretto bench ops --op spmm --graph rmat:17:1200000 --width 64 --dtype f32 --threads 2 --repeats 9"
    )
    assert "--reduce max --weight edge --direction both" in small(
        reduce="max", weight="edge", direction="both"
    ).command(3)


@pytest.mark.parametrize("words", [{"dtype": "f8"}, {"direction": "back"}, {"weight": "heavy"}, {"width": 0}])
def test_wrong_words(words):
    with pytest.raises(StrettoError, match=f"'--{next(iter(words))}' is"):
        Spec(**words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--suite", "foundation", "--op", "spmm"], "'--op' means nothing for a suite"),
        (["--suite", "foundation", "--dtype", "f64"], "'--dtype' means nothing for a suite"),
        (["--op", "spmm", "--only", "spmm"], "'--only' means nothing for one cell"),
        (["--op", "spmm", "--csv", "nowhere/x.csv"], "there is no folder 'nowhere'"),
        (["--suite", "foundation", "--threads", "-1"], "'--threads' is -1, wanted"),
        (["--suite", "foundation", "--repeats", "0"], "'--repeats' is 0, wanted at least 1"),
    ],
    ids=" ".join,
)
def test_options_that_would_do_nothing(words, said):
    assert said in str(CliRunner().invoke(cli.app, ["bench", "ops", *words]).exception)


def test_unknown_op():
    with pytest.raises(StrettoError, match="'--op' is 'spmv', wanted one of spmm"):
        build(Spec(op="spmv"))
    assert set(CASES) <= set(OPS)


def test_command_line_writes_rows(tmp_path):
    path = tmp_path / "ops.csv"
    words = ["--op", "spmm,gather_rows", "--graph", "star:50", "--width", "16,5", "--repeats", "2", "--threads", "1"]
    result = runner.invoke(cli.app, ["bench", "ops", *words, "--csv", str(path)])
    assert result.exit_code == 0, result.output
    assert "as fast as the best other" in result.output
    assert "share of the measured ceilings" in result.output
    assert "repeat: stretto bench ops --op gather_rows --graph star:50 --width 5" in result.output
    rows = results.load(path)
    cells = [("spmm", "16"), ("spmm", "5"), ("gather_rows", "16"), ("gather_rows", "5")]
    assert [(row["op"], row["width"]) for row in rows] == cells
    for row in rows:
        assert row["threads"] == "1"
        assert row["command"].startswith(f"stretto bench ops --op {row['op']}")
        for who in ("ours", "best"):
            assert float(row[f"{who}_low"]) <= float(row[who]) <= float(row[f"{who}_high"])
        assert float(row["best_ratio"]) == pytest.approx(float(row["best"]) / float(row["ours"]), rel=1e-3)
    assert rows[0]["stock"]  # torch csr
    assert all(math.isfinite(float(rows[0][f"share of {kind}"])) for kind in ("copy", "gemm"))


def test_foundation_covers_every_kind_of_target(monkeypatch, tmp_path):
    tiny = [
        foundation.Target("one", Spec(graph=SMALL, width=16), "speedup", 1e-9, foundation.CSR),
        foundation.Target("two", Spec(graph=SMALL, width=16), "share", 1e-9, "random gather"),
        foundation.Target("three", Spec(graph=SMALL, width=16), "overhead", 1e-9),
        foundation.Target("four", Spec(graph="hub:200:500", width=8), "scaling", 1e-9),
    ]
    monkeypatch.setattr(foundation, "TARGETS", tiny)
    path = tmp_path / "suite.csv"
    words = ["--suite", "foundation", "--repeats", "2", "--csv", str(path)]
    result = runner.invoke(cli.app, ["bench", "ops", *words])
    assert result.exit_code == 0, result.output
    lines = {row["measure"]: row for row in results.load(path)}
    assert lines["one"]["met"] == lines["four"]["met"] == "yes"
    assert lines["four"]["stock"]  # one thread
    assert lines["three"]["met"] == "no"  # no call takes a femtosecond
    assert "MISSED" in result.output
    assert "--suite foundation --only" in lines["two"]["command"]
    only = runner.invoke(cli.app, ["bench", "ops", "--suite", "foundation", "--only", "nothing like it"])
    assert isinstance(only.exception, StrettoError)
    assert {t.kind for t in tiny} == set(foundation.KINDS)


def test_targets_are_well_formed():
    assert len({t.label for t in foundation.TARGETS}) == len(foundation.TARGETS)
    assert all(t.kind in foundation.KINDS for t in foundation.TARGETS)
    assert all(bool(t.against) == (t.kind in ("speedup", "share")) for t in foundation.TARGETS)


@pytest.mark.parametrize("graph", ["[/b].npz", "[x]/cora.npz"])
def test_brackets_in_the_name_of_a_graph_are_printed(graph, capsys):
    """rich would take them for a style."""
    result = run.Result(Spec("spmm", graph, 8), 3, 10, 20, 1.0, 1.0)
    result.rows.append(run.Row(OURS, None, None, f"no file {graph}"))
    report.show(Console(width=200), result)
    said = capsys.readouterr().out
    assert f"spmm, {graph}, width 8" in said
    assert f"no file {graph}" in said
    assert f"--graph {graph}" in said
