"""`stretto bench models --layer`: every layer is checked, measured and told; memory is counted, not guessed."""

import os

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.suites import layers, results
from stretto import datasets
from stretto.cli import app
from stretto.memory import pool
from stretto.observe.peak_memory import peak_bytes


def test_peak_is_counted_from_allocations():
    size = 1 << 20

    def step():
        a = torch.ones(size)  # 4 MiB
        b = a + 1  # 8 MiB
        del a
        return (b * 2).sum()  # still 8 MiB

    assert peak_bytes(step) == pytest.approx(8 * size, rel=0.01)


def test_kept_buffers_do_not_hide_memory():
    def step():
        pool.empty((1 << 20,), torch.float32).zero_()

    step()  # the pool now has a buffer to give
    assert peak_bytes(step) >= 4 << 20


@pytest.mark.parametrize("name", [n for n, layer in layers.LAYERS.items() if not layer.molecules])
def test_layers_agree_with_stock(name):
    result = layers.run(name, "er:200:1500", (8, 8), repeats=1)
    ours = result.get(layers.OURS)
    assert ours is not None
    assert ours.error is not None
    assert ours.error < 1e-4
    assert result.plan
    row = result.to_row()
    assert bool(row.get("stretto, update first ms")) == layers.LAYERS[name].orders
    assert float(row["ours_mib"]) >= 0


@pytest.mark.parametrize("name", [n for n, layer in layers.LAYERS.items() if layer.molecules])
def test_molecules(name):
    if "qm9-20k" not in datasets.names():
        pytest.skip("no qm9-20k.npz in the data folder")
    result = layers.run(name, "", (16, 16), repeats=1)
    assert result.num_edges > 1000
    assert {o.name for o in result.outcomes if o.timing} == {"stock edge_index", layers.OURS}


def test_command(tmp_path):
    path = tmp_path / "rows.csv"
    words = ["bench", "models", "--layer", "GATConv,EdgeConv", "--graph", "er:100:500", "--widths", "8,8"]
    found = CliRunner().invoke(app, [*words, "--repeats", "1", "--csv", str(path)])
    assert found.exit_code == 0, found.output
    rows = results.load(path)
    assert {row["layer"] for row in rows} == {"GATConv", "EdgeConv"}
    assert all(float(row["ours_mib"]) > 0 and float(row["stock_mib"]) > 0 for row in rows)
    wrong = CliRunner().invoke(app, [*words[:3], "NoConv"])
    assert "NoConv" in str(wrong.exception)


def test_the_profilers_own_lines_are_not_shown_but_others_are(capfd):
    def step() -> object:
        os.write(2, b"USDT: profiler_start\nsomething went wrong\n")
        return torch.ones(8)

    peak_bytes(step)
    assert capfd.readouterr().err.splitlines().count("something went wrong") == 2
    peak_bytes(step)
    assert capfd.readouterr().err.count("USDT") == 1  # the call before the profiled one is not held back
