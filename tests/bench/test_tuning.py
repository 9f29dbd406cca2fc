"""`stretto bench tune`: the choices of the tuner are found anew, beside the time of every variant."""

import pytest
from typer.testing import CliRunner

from benchmarks.suites import results, tuning
from benchmarks.suites.case import Spec
from stretto import cli
from stretto.cli.tune import inputs
from stretto.datasets import load_graph
from stretto.kernels import native
from stretto.ops.variants import legal

runner = CliRunner()
pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels: nothing to choose from")


@pytest.mark.parametrize("words", [{}, {"weight": "edge"}, {"dtype": "bf16"}])
def test_verify_measures_every_legal_variant(words):
    spec = Spec(graph="rmat:10:8000", width=64, threads=1, **words)
    verdict = tuning.verify(spec, repeats=2)
    names = {v.name for v in legal("spmm", "cpu", width=64, plain=spec.dtype == "f32")}
    assert set(verdict.variants) == names
    assert verdict.chosen in names
    assert verdict.best in names
    assert verdict.ratio >= 1.0


def test_all_variants_give_the_same_sum():
    graph, x, _ = inputs(load_graph("rmat:10:8000"), 256, "f32", "none")
    outs = [tuning._call(graph, x, None, v)() for v in legal("spmm", "cpu", width=256, plain=True)]
    assert len(outs) > 1
    assert all((out - outs[0]).abs().max() < 1e-3 for out in outs)


def test_verify_command(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "ALLOWED", 1e9)  # this machine may be busy: the form is tested here, not the speed
    path = tmp_path / "verdicts.csv"
    words = ["--graph", "rmat:8:1500", "--width", "16,32", "--repeats", "2", "--csv", str(path)]
    result = runner.invoke(cli.app, ["bench", "tune", *words])
    assert result.exit_code == 0, result.output
    assert "2 of 2 choices within" in result.output
    rows = results.load(path)
    assert [row["width"] for row in rows] == ["16", "32"]
    assert all(row["chosen"] and float(row["regret"]) >= 1 for row in rows)
