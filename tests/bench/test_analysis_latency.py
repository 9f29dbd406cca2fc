"""Depth against a clock: the fit is least squares, and the command's rows follow the model."""

import itertools

import pytest
import torch
from typer.testing import CliRunner

from stretto import cli
from stretto.analyze import Machine, machine_file
from stretto.bench import analysis_latency, report, results
from stretto.bench.analysis_latency import line, plane, tell_apart


def test_line():
    assert line([1.0, 2.0, 3.0], [5.0, 7.0, 9.0]) == pytest.approx((3.0, 2.0, 1.0))
    start, slope, share = line([0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 0.0, 1.0])
    assert (start, slope) == pytest.approx((0.2, 0.2))
    assert 0 < share < 0.5


def rows_of(time):
    places = [(8, 8), (8, 4), (8, 2), (4, 4), (4, 2), (2, 2), (2, 1)]
    return [{"model": "m", "kernels": k, "chain": c, "measured": time(k, c)} for k, c in places]


def test_the_chain_and_all_kernels_are_told_apart(capsys):
    found, fit = plane(
        rows_of(lambda kernels, chain: 1.0 + 2.0 * kernels + 3.0 * chain), ("kernels", "chain"), "measured"
    )
    assert found == pytest.approx([1.0, 2.0, 3.0])
    assert fit == pytest.approx(1.0)
    one_queue = tell_apart(report.console(), rows_of(lambda kernels, chain: 8e-6 * kernels))
    assert one_queue["more in the chain"] == pytest.approx(0.0, abs=1e-12)
    assert "waits for the one before" in capsys.readouterr().out.replace("\n", "")
    ideal = tell_apart(report.console(), rows_of(lambda kernels, chain: 8e-6 * chain))
    assert ideal["per kernel"] == pytest.approx(0.0, abs=1e-12)
    assert "time follows the chain" in capsys.readouterr().out.replace("\n", "")


def test_command(tmp_path, monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(machine_file, "get", lambda *_, **__: Machine())
    monkeypatch.setattr(analysis_latency, "STARS", (17, 65, 257))
    monkeypatch.setattr(analysis_latency, "SIDE_BY_SIDE", ((1, 2), (2, 1), (1, 1)))
    words = ["bench", "latency", "--models", "gcn", "--repeats", "2", "--csv", str(tmp_path / "a.csv")]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 0, result.output
    rows = results.load(tmp_path / "a.csv")
    stack = [row for row in rows if row["kind"] == "stack"]
    layers, chains = [int(row["shape"].removeprefix("1 x ")) for row in stack], [int(row["chain"]) for row in stack]
    per_layer = {(b - a) / (m - n) for (a, n), (b, m) in zip(zip(chains, layers), zip(chains[1:], layers[1:]))}  # noqa: B905
    assert max(per_layer) - min(per_layer) <= 1  # every layer adds as many kernels to the chain
    side = {row["shape"]: row for row in rows if row["kind"] == "side by side"}
    assert int(side["2 x 1"]["kernels"]) > int(side["1 x 1"]["kernels"])
    assert int(side["1 x 2"]["chain"]) > int(
        side["2 x 1"]["chain"]
    )  # as many layers, the chain is shorter side by side
    depth = [float(row["depth"]) for row in rows if row["kind"] == "star"]
    (four_times,) = {b - a for a, b in itertools.pairwise(depth)}
    assert four_times >= 2  # a level or more for each doubling of the degree
    assert all(float(row["stock_low"]) <= float(row["stock"]) <= float(row["stock_high"]) for row in rows)
