"""bench grid: a cell has what it promises, rows are kept, and a cell that is there is not measured again."""

import pytest

from benchmarks.suites import grid, results
from stretto.page.terminal import console


@pytest.mark.parametrize("model", grid.MODELS)
@pytest.mark.parametrize("train", [True, False])
def test_a_cell_agrees_with_stock_and_names_the_best(model, train):
    row = grid.run("er:300:2000", model, 8, 16, train)
    assert float(row["error"]) < 1e-4
    assert row["best_name"].startswith("stock")
    assert float(row["best_ratio"]) == pytest.approx(float(row["best"]) / float(row["ours"]), rel=1e-3)
    assert float(row["regret"]) >= 1


def test_all_plans_of_a_layer_compete():
    row = grid.run("er:300:2000", "gcn", 8, 16, True)
    assert int(row["plans"]) > 1


@pytest.mark.slow
def test_torch_compile_competes_where_asked(monkeypatch):
    seen = []
    measure = grid.measure
    monkeypatch.setattr(grid, "measure", lambda calls, **how: seen.extend(calls) or measure(calls, **how))
    row = grid.run("er:300:2000", "gcn", 8, 16, True, compiled=True)
    assert float(row["error"]) < 1e-4
    assert {"stock edge_index", "stock torch CSR", "stock torch.compile"} <= set(seen)
    assert row["command"].endswith("--compile")


def test_rows_are_kept_and_not_measured_again(tmp_path, monkeypatch):
    path = tmp_path / "rows.csv"
    arguments = {"csv": path, "graph": "er:100:400", "model": "gcn", "widths": "4", "compiled": False, "minutes": 1.0}
    grid.command(**arguments)
    text, rows = path.read_text(), results.load(path)
    cells = [(row["model"], row["in"], row["out"], row["mode"]) for row in rows]
    assert cells == [("gcn", "4", "4", "training"), ("gcn", "4", "4", "inference")]
    measured = []
    run = grid.run
    monkeypatch.setattr(grid, "run", lambda *cell, **how: measured.append(cell) or run(*cell, **how))
    grid.command(**arguments)
    assert not measured
    assert path.read_text() == text
    monkeypatch.setattr(results, "commit", lambda: "later")
    grid.command(**arguments)
    assert len(measured) == 2  # of another commit
    assert [row["commit"] for row in results.load(path)] == ["later"] * 2


def test_what_is_short_is_listed(capsys):
    row = {"graph": "g", "model": "gcn", "in": "1", "out": "2", "mode": "training", "ours": "2.0", "best": "1.0"}
    slow = {**row, "best_ratio": "0.5", "plans": "1", "regret": "1"}
    sorry = {**row, "out": "3", "best_ratio": "2", "plans": "2", "regret": "1.2"}
    fine = {**row, "out": "4", "best_ratio": "2", "plans": "2", "regret": "1"}
    grid.show(console(), [slow, sorry, fine])
    said = capsys.readouterr().out
    assert "3 cells; stock runs in 3: ours is at least 0.95x of the best stock in 2" in said
    assert "several plans in 2: the chosen one is within 5% of the fastest in 1" in said
    assert "gcn 1-2" in said
    assert "gcn 1-3" in said
    assert "gcn 1-4" not in said
