"""Depth against a clock: the fit is least squares, and the command's rows follow the model."""

import json

import pytest
import torch
from typer.testing import CliRunner

from stretto import cli
from stretto.analyze import Machine, machine_file
from stretto.bench import analysis_latency
from stretto.bench.analysis_latency import line


def test_line():
    assert line([1.0, 2.0, 3.0], [5.0, 7.0, 9.0]) == pytest.approx((3.0, 2.0, 1.0))
    start, slope, share = line([0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 0.0, 1.0])
    assert (start, slope) == pytest.approx((0.2, 0.2))
    assert 0 < share < 0.5


def test_command(tmp_path, monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(machine_file, "get", lambda *_, **__: Machine())
    monkeypatch.setattr(analysis_latency, "STARS", (17, 65, 257))
    words = ["bench", "latency", "--models", "gcn", "--repeats", "2", "--json", str(tmp_path / "a.json")]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "a.json").read_text())
    chains = [row["chain"] for row in rows if "chain" in row]
    layers = [row["layers"] for row in rows if "layers" in row]
    per_layer = {(b - a) / (m - n) for (a, n), (b, m) in zip(zip(chains, layers), zip(chains[1:], layers[1:]))}  # noqa: B905
    assert max(per_layer) - min(per_layer) <= 1  # every layer adds as many kernels to the chain
    (depth,) = [row for row in rows if row.get("star") == "depth"]
    assert depth["slope"] >= 1  # a level or more for each doubling of the degree
    assert depth["r2"] > 0.999
