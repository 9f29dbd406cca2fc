"""`stretto bench models` and `bench grid`: their options, and what they say of wrong ones."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from benchmarks.suites import models, results
from stretto import cli
from stretto.errors import StrettoError

WRONG = {
    ("models", "--model", "gcn,gcnx"): "'model' is 'gcnx', wanted some of gcn",
    ("models", "--widths", "16,a"): "'widths' is '16,a', wanted numbers",
    ("models", "--widths", "16,-2"): "'widths' is '16,-2', wanted numbers",
    ("models", "--widths", "16"): "'widths' is '16', wanted features,hidden",
    ("models", "--layer", "GCNConv", "--widths", "x"): "'widths' is 'x', wanted numbers",
    ("models", "--layer", "Nothing"): "'layer' is 'Nothing'",
    ("grid", "--csv", "{}", "--model", "gcnx"): "'model' is 'gcnx'",
    ("grid", "--csv", "{}", "--widths", "8,x"): "'widths' is '8,x'",
}


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_wrong_options_are_refused_before_the_work(words, tmp_path):
    given = [str(tmp_path / "rows.csv") if word == "{}" else word for word in words]
    result = CliRunner().invoke(cli.app, ["bench", *given, "--graph", "er:20:40"])
    assert isinstance(result.exception, StrettoError)
    assert WRONG[words] in str(result.exception)


@pytest.mark.parametrize(("words", "wanted"), [((), True), (("--no-compile",), False), (("--compile",), True)])
def test_torch_compile_of_stock_is_among_the_candidates(words, wanted, monkeypatch):
    seen = []

    def run(name, graph, widths, **options):
        seen.append(options["compiled"])
        return models.Result(name, graph, widths, True)

    monkeypatch.setattr(models, "run", run)
    result = CliRunner().invoke(cli.app, ["bench", "models", "--model", "gcn,sage", *words])
    assert result.exit_code == 0
    assert seen == [wanted] * 2


def test_rows_of_a_small_run(tmp_path):
    file = tmp_path / "rows.csv"
    words = ["bench", "models", "--graph", "er:60:300", "--model", "gcn", "--widths", "8,6,3", "--repeats", "1"]
    result = CliRunner().invoke(cli.app, [*words, "--no-compile", "--csv", str(file)])
    assert result.exit_code == 0, result.output
    (row,) = results.load(file)
    assert (row["model"], row["graph"], row["widths"], row["mode"]) == ("gcn", "er:60:300", "8-6-3", "training")
    assert float(row["error"]) < 1e-5
    assert row["best_name"] in ("stock edge_index", "stock torch CSR", "stock EdgeIndex")
    others = ("stock torch CSR", "stock EdgeIndex", "our plans, torch kernels", "our kernels, stock order")
    for column in ("ours", "stock", "best", "ours_mib", "stock_mib", *(f"{name} ms" for name in others)):
        assert float(row[column]) > 0
    assert float(row["best"]) <= float(row["stock"])
    assert "--no-compile" in row["command"]
