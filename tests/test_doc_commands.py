"""Commands in the pages on analysis are understood as they are printed, and name graphs that are there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import typer.main

from stretto import cli, datasets

ROOT = Path(__file__).parents[1]
PAGES = ("why_slow.md",)


def commands(page):
    """Every `stretto ...` of a page with more than its name, as words; variables before it are left out."""
    text = (ROOT / "docs" / page).read_text()
    blocks = re.findall(r"```\n(.*?)```", text, re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += re.findall(r"`([^`]*)`", re.sub(r"```.*?```", "", text, flags=re.S))
    for line in lines:
        found = re.fullmatch(r"(?:[A-Z_]+=\S+ )*stretto ((?:profile|analyze|bench) .*)", " ".join(line.split()))
        if found:
            yield shlex.split(found[1], comments=True)


ALL = sorted({(page, tuple(words)) for page in PAGES for words in commands(page)})


@pytest.mark.parametrize(("page", "words"), ALL, ids=[f"{page}: {' '.join(words)}" for page, words in ALL])
def test_options_and_graphs_are_there(page, words, monkeypatch, tmp_path):
    monkeypatch.setenv("STRETTO_DATA", str(tmp_path))  # a reader has no data of ours
    command = typer.main.get_command(cli.app)
    while hasattr(command, "get_command"):
        command, words = command.get_command(command.context_class(command), words[0]), words[1:]
    with command.make_context("stretto", list(words), allow_extra_args=False) as context:
        graph = context.params.get("graph", "cora")
    assert graph.endswith(".npz") or datasets.load_graph(graph).num_nodes


def test_pages_have_commands():
    assert {page for page, _ in ALL} == set(PAGES)
    assert len(ALL) > 8


def test_a_graph_is_written_as_the_page_says(tmp_path):
    edges, x, y = torch.tensor([[0, 1], [1, 2]]), torch.eye(3), torch.arange(3)
    np.savez(tmp_path / "amazon-photo.npz", edge_index=edges, num_nodes=3, x=x, y=y)
    read = datasets.load_graph(str(tmp_path / "amazon-photo.npz"))
    assert torch.equal(read.edge_index, edges)
    assert torch.equal(read.features.float(), x)


@pytest.mark.slow
def test_explain(tmp_path):
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(ROOT / "examples" / "explain.py"), "gcn"]
    done = subprocess.run(words, capture_output=True, text=True, env=variables, timeout=290, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "flops [flop]: predicted" in done.stdout
    assert "None" not in done.stdout
    assert (tmp_path / "profile.html").exists()
    assert (tmp_path / "analysis.html").exists()
