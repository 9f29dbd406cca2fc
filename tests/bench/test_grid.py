"""bench grid: a cell has what it promises, rows are kept, and a cell that is there is not measured again."""

import json

import pytest

from stretto.bench import grid, models
from stretto.page.terminal import console


@pytest.mark.parametrize("model", grid.MODELS)
@pytest.mark.parametrize("train", [True, False])
def test_a_cell_agrees_with_stock_and_names_the_best(model, train):
    row = grid.run("er:300:2000", model, 8, 16, train)
    assert row[f"error {models.OURS}"] < 1e-4
    assert all(error < 1e-4 for name, error in row.items() if name.startswith("error stock"))
    assert row["best_stock"].startswith("stock")
    assert row["times_stock"] == pytest.approx(row["best_stock_ms"] / row["ours_ms"])
    assert row["regret"] >= 1


def test_all_plans_of_a_layer_compete():
    row = grid.run("er:300:2000", "gcn", 8, 16, True)
    assert row["plans"] > 1


@pytest.mark.slow
def test_torch_compile_competes_where_asked():
    row = grid.run("er:300:2000", "gcn", 8, 16, True, compiled=True)
    assert row["error stock torch.compile"] < 1e-4
    assert set(row["stock_ms"]) == {"stock edge_index", "stock torch CSR", "stock torch.compile"}


def test_rows_are_kept_and_not_measured_again(tmp_path, monkeypatch):
    path = tmp_path / "rows.json"
    arguments = {"json": path, "graph": "er:100:400", "model": "gcn", "widths": "4", "compiled": False, "minutes": 1.0}
    grid.command(**arguments)
    rows = json.loads(path.read_text())
    assert [(r["model"], r["in"], r["out"], r["train"]) for r in rows] == [("gcn", 4, 4, True), ("gcn", 4, 4, False)]
    monkeypatch.setattr(grid, "run", lambda *cell, **how: pytest.fail("measured again"))
    grid.command(**arguments)
    assert json.loads(path.read_text()) == rows


def test_what_is_short_is_listed(capsys):
    row = {"graph": "g", "model": "gcn", "in": 1, "out": 2, "train": True, "ours_ms": 2.0, "best_stock": "stock"}
    slow = {**row, "best_stock_ms": 1.0, "times_stock": 0.5, "plans": 1, "regret": 1.0}
    sorry = {**row, "out": 3, "best_stock_ms": 4.0, "times_stock": 2.0, "plans": 2, "regret": 1.2}
    fine = {**row, "out": 4, "best_stock_ms": 4.0, "times_stock": 2.0, "plans": 2, "regret": 1.0}

    grid.show(console(), [slow, sorry, fine])
    said = capsys.readouterr().out
    assert "3 cells; stock runs in 3: ours is at least 0.95x of the best stock in 2" in said
    assert "several plans in 2: the chosen one is within 5% of the fastest in 1" in said
    assert "gcn 1-2" in said
    assert "gcn 1-3" in said
    assert "gcn 1-4" not in said
