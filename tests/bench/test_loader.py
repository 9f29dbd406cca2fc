"""`stretto bench loader` on a small graph: every measure runs, checks itself and can be written down."""

from typer.testing import CliRunner

from benchmarks.suites import results
from stretto.cli import app


def test_every_measure_runs_and_is_recorded(tmp_path):
    out = tmp_path / "rows.csv"
    measures = "sampling,layered,weighted,temporal,gather,labor"
    arguments = ["--graph", "rmat:10:5000", "--batch", "64", "--batches", "2", "--repeats", "2", "--features", "8"]
    done = CliRunner().invoke(app, ["bench", "loader", *arguments, "--only", measures, "--csv", str(out)])
    assert done.exit_code == 0, done.output
    rows = results.load(out)
    assert [row["measure"].split(" [")[0] for row in rows] == [
        "sampling", "sampling, layered", "sampling, weighted", "sampling, temporal", "gather", "nodes per batch"
    ]  # fmt: skip
    assert all(float(row["ours"]) > 0 for row in rows)
    assert all(row["stock"] or "not installed" in row["note"] for row in rows if row["measure"] != "gather")
    assert all(float(row["work"]) > 0 for row in rows[:5])
    labor = rows[-1]
    assert labor["unit"] == "nodes"
    assert float(labor["ours"]) < float(labor["stock"])


def test_an_unknown_measure_is_told():
    done = CliRunner().invoke(app, ["bench", "loader", "--only", "nothing"])
    assert done.exit_code != 0
