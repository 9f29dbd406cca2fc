"""The GPU benchmark's bookkeeping: ratios, geometric means, losses; nothing here needs a GPU."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.suites import gpu, gpu_errors, gpu_rows, results
from stretto.errors import StrettoError
from stretto.machine.timing import Timing

ROOT = Path(__file__).resolve().parents[2]


def sheet() -> gpu.Sheet:
    rows = gpu.Sheet(budget=1e9)
    rows.add(kind="spmm", graph="g1", width=32, dtype="float32", speedup=0.5)
    rows.add(kind="step", graph="g1", model="gcn", layers=2, speedup={gpu.STOCK: 8.0, gpu.CSR: 2.0})
    rows.add(kind="step", graph="g1", model="gat", layers=2, speedup={gpu.STOCK: 2.0})
    return rows


def test_losses_are_named():
    assert list(gpu.losses(sheet())) == ["spmm g1 32 float32: cusparse 2.00x faster"]


def test_summary_takes_geometric_means():
    rows = sheet()
    gpu._summary(rows)
    found = {row["name"]: row for row in rows.rows if row["kind"] == "summary"}
    assert found[f"training steps vs {gpu.STOCK}"]["geomean"] == pytest.approx(4.0)
    assert found["training steps vs best stock"]["least"] == pytest.approx(2.0)


def test_targets_say_what_was_met():
    rows = sheet()
    rows.add(kind="layer", graph="g2", model="gat", ms={gpu.OURS: 60.0}, gib={gpu.OURS: 15.0})
    rows.add(kind="layer", graph="g1", model="gat", speedup={gpu.STOCK: 13.0}, memory_ratio={gpu.STOCK: 14.0})
    gpu._summary(rows)
    found = {row["name"]: (row["wanted"], row["got"], row["met"]) for row in rows.rows if row["kind"] == "target"}
    assert found["gat on g2, at most ms"] == (250.0, 60.0, True)
    assert found["gat on g2, at most GiB"] == (14.0, 15.0, False)
    assert found[f"gat layer vs {gpu.STOCK}"] == (12.0, 13.0, True)
    assert found[f"gat layer, memory vs {gpu.STOCK}"] == (15.0, 14.0, False)
    assert found["spmm float32 vs cusparse, least of all"] == (1.0, 0.5, False)
    assert found[f"steps vs {gpu.STOCK}, geometric mean"] == (6.0, pytest.approx(4.0), False)
    assert not any("transformer" in name for name in found)  # no row, no line


def test_what_was_timed_is_written_down(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    rows = sheet()
    gpu._summary(rows)
    timings = {gpu.OURS: Timing((1e-3, 2e-3, 3e-3)), gpu.STOCK: Timing((8e-3,) * 3), gpu.CSR: Timing((4e-3,) * 3)}
    rows.add(timings, kind="layer", graph="g1", model="gcn", widths="8 -> 4", gib={gpu.OURS: 0.5}, failed={"x": "no"})
    rows.add(kind="ceiling", name="copy", ms=1.0, rate=4.2, unit="TB/s")
    *_, layer, ceiling = gpu_rows.to_rows(rows)
    assert [layer[c] for c in ("kind", "graph", "name", "size", "machine")] == [
        "layer",
        "g1",
        "gcn",
        "8 -> 4",
        "a card",
    ]
    assert [layer[c] for c in ("ours", "stock", "best", "best_name", "ratio")] == ["2", "8", "4", gpu.CSR, "4"]
    assert (layer["stretto GiB"], layer["note"]) == ("0.5", "x: no")
    assert (ceiling["best"], ceiling["unit"], ceiling["ours"]) == ("4.2", "TB/s", "")
    assert not {"target", "summary"} & {row["kind"] for row in gpu_rows.to_rows(rows)}
    assert len({results.key(row) for row in gpu_rows.to_rows(rows)}) == 5  # the three of the sheet, and these


def test_it_needs_neither_typer_nor_rich():
    code = "import sys; sys.modules.update(typer=None, rich=None); from benchmarks.suites import "
    subprocess.run([sys.executable, "-c", code + "gpu, gpu_batches, gpu_errors, breadth"], check=True, cwd=ROOT)


def test_errors_of_vanishing_gradients_are_judged_by_the_others():
    assert gpu.relative(torch.full((4,), 1e-9), torch.full((4,), 2e-9), least=1.0) < 1e-8


def test_without_a_device_it_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    with pytest.raises(StrettoError, match="no CUDA device"):
        gpu.run()


def test_stock_with_a_cached_norm_computes_the_same():
    edge_index = torch.tensor([[0, 1, 2, 3, 1, 0], [1, 0, 3, 2, 0, 1]]).unique(dim=1)
    adj = torch.sparse_coo_tensor(edge_index, torch.ones(edge_index.size(1)), (5, 5)).to_sparse_csr()
    net = gpu.Net("gcn", (3, 4, 2))
    x = torch.randn(5, 3)
    wanted = net(x, edge_index)
    normed, matrix = gpu._normed(net, adj, "gcn")
    torch.testing.assert_close(normed(x, matrix), wanted)


def test_gat_with_given_signs_is_gat():
    """What errors are judged by where a score has the other sign: with fp64's own signs, fp64's own gradient."""
    edge_index = torch.randint(0, 30, (2, 200))
    edge_index = edge_index[:, edge_index[0] != edge_index[1]]  # stock replaces self-loops
    loops = torch.arange(30)
    edges = torch.cat([edge_index, torch.stack([loops, loops])], dim=1)
    layer = gpu.LAYERS["gat"](8, 16, False)
    x, upstream = torch.randn(30, 8), torch.randn(30, 16)
    wide = x.double().requires_grad_()
    wanted = torch.autograd.grad(copy.deepcopy(layer).double()(wide, edge_index), wide, upstream.double())[0]
    positive = gpu_errors._positive(layer, x.double(), edges)
    torch.testing.assert_close(gpu_errors._with_signs(layer, x, edges, upstream, positive), wanted)
    positive[3, 0] = ~positive[3, 0]
    assert not torch.allclose(gpu_errors._with_signs(layer, x, edges, upstream, positive), wanted)
