"""`stretto bench loader` on a small graph: every measure runs, checks itself and can be written down."""

import json

from typer.testing import CliRunner

from stretto.cli import app


def test_every_measure_runs_and_is_recorded(tmp_path):
    out = tmp_path / "rows.json"
    measures = "sampling,layered,weighted,temporal,gather,labor"
    arguments = ["--graph", "rmat:10:5000", "--batch", "64", "--batches", "2", "--repeats", "2", "--features", "8"]
    done = CliRunner().invoke(app, ["bench", "loader", *arguments, "--only", measures, "--json", str(out)])
    assert done.exit_code == 0, done.output
    rows = json.loads(out.read_text())
    ours = [row for row in rows if row["candidate"] == "stretto"]
    assert len(ours) == 5
    assert all(row["rate"] > 0 for row in ours)
    for row in rows:
        assert row["reason"] or row["median_ms"] > 0
    labor = {
        row["candidate"]: row["rate"] * row["median_ms"] / 1e3 for row in rows if row["measure"] == "nodes per batch"
    }
    assert labor["labor"] < labor["uniform"]


def test_an_unknown_measure_is_told():
    done = CliRunner().invoke(app, ["bench", "loader", "--only", "nothing"])
    assert done.exit_code != 0
