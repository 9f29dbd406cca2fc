"""examples/attention_memory.py: what it foretells is tried, and it says what it could not do."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stretto.kernels import native

EXAMPLE = Path(__file__).parents[1] / "examples" / "attention_memory.py"
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak is read from /proc")
pytestmark = [linux, pytest.mark.usefixtures("needs_native")]


def run(*options, **environment):
    command = [sys.executable, str(EXAMPLE), *options]
    variables = {**os.environ, "PYTHONPATH": str(EXAMPLE.parents[1]), **environment}
    return subprocess.run(command, capture_output=True, text=True, env=variables, timeout=550)


@pytest.fixture
def example(monkeypatch, tmp_path):
    """The module, with a law in place of processes: 11000 bytes a node with stock, a tenth of it with stretto."""
    spec = importlib.util.spec_from_file_location("attention_memory", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "attention_memory", module)
    spec.loader.exec_module(module)
    module.tried = []

    def point(which, nodes):
        module.tried.append((which, nodes))
        bent = 1.0 if nodes <= max(module.NODES) else 1.2  # larger graphs take more than the line says
        return module.Point(nodes, 10 * nodes, int(bent * nodes * (11000 if which == "stock" else 1100)))

    monkeypatch.setattr(module, "point", point)
    monkeypatch.setattr(module, "_available", lambda: 1 << 40)
    monkeypatch.chdir(tmp_path)
    return module


def call(example, monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["attention_memory.py", *options])
    example.main()


def test_what_is_foretold_is_tried_and_made_smaller(example, monkeypatch, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    call(example, monkeypatch)
    memory = 8 << 30
    tries = [nodes for which, nodes in example.tried if which == "stretto"][len(example.NODES) :]
    assert tries[0] == pytest.approx(example.AIM * memory / 1100, rel=1e-3)
    assert len(tries) == 2
    assert tries[1] * 1100 * 1.2 <= memory
    said = capsys.readouterr().out
    assert f"stretto trained on {tries[1]:,} nodes and {10 * tries[1]:,} edges in 7.84 of 8 GiB" in said
    assert (tmp_path / "attention_memory.png").stat().st_size > 0


def test_a_part_of_the_memory_is_confirmed_or_none(example, monkeypatch, capsys):
    call(example, monkeypatch, "--confirm", "0.01")
    assert "of 0.08 GiB" in capsys.readouterr().out
    before = len(example.tried)
    call(example, monkeypatch, "--confirm", "0")
    assert len(example.tried) == before + 2 * len(example.NODES)
    assert "no graph of the size foretold was made" in capsys.readouterr().out


def test_without_matplotlib_the_table_still_comes(example, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    call(example, monkeypatch, "--confirm", "0")
    said = capsys.readouterr().out
    assert "no plot: matplotlib is not installed" in said
    assert "per edge" in said


def test_without_native_kernels_or_memory_it_stops(example, monkeypatch):
    monkeypatch.setattr(example, "_available", lambda: 1 << 30)
    with pytest.raises(SystemExit, match=r"1\.0 GiB are free"):
        call(example, monkeypatch)
    monkeypatch.setattr(native, "library", lambda: None)
    with pytest.raises(SystemExit, match="native kernels are off"):
        call(example, monkeypatch)
    assert not example.tried


def test_a_step_takes_its_inputs_and_more():
    """A real one, in a process of its own: the peak holds x, its gradient, the result and edge_index."""
    nodes = 8192
    done = run("--measure", "stretto", str(nodes))
    assert done.returncode == 0, done.stderr
    edges, taken = map(int, done.stdout.split())
    assert edges > 10 * nodes
    inputs = nodes * 128 * 4 + edges * 16
    assert inputs + nodes * (128 + 2 * 256) * 4 < taken < 1000 * edges


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_example_on_tiny_graphs(tmp_path):
    plot = tmp_path / "memory.png"
    done = run("--memory-gib", "0.125", "--nodes", "1024", "4096", "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained on") == 2
    assert "0.125 GiB, foretold" in done.stdout
    assert plot.exists() or "matplotlib is not installed" in done.stdout
