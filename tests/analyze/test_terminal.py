"""The analysis on terminals of several widths, and with names that look like a style."""

import io

import pytest
import torch
from rich.console import Console
from torch import nn
from torch_geometric.nn import GCNConv

import stretto.analyze
from stretto import datasets
from stretto.analyze import Machine
from stretto.analyze.terminal import show_analysis
from stretto.observe.models import as_data


class Named(nn.Module):
    """A layer with an odd name."""

    def __init__(self, name):
        super().__init__()
        self.layers = nn.ModuleDict({name: GCNConv(8, 8)})

    def forward(self, x, edge_index):
        return next(iter(self.layers.values()))(x, edge_index)


def printed(name, width):
    torch.set_num_threads(1)
    data = as_data(datasets.load_graph("er:100:400"), width=8)
    report = stretto.analyze(Named(name), data, machine=Machine(), procs=[1, 2])
    out = io.StringIO()
    show_analysis(Console(file=out, width=width), report)
    return report, out.getvalue()


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_strategies_are_legible(width):
    """Neither the name of one nor a word of its reason is cut."""
    report, text = printed("conv", width)
    part = text[text.index("Strategies, fastest first") :]
    words = " ".join(part.replace("│", " ").replace("┃", " ").split())
    assert "…" not in part
    for s in report.strategies:
        assert s.name.split()[0] in words
    assert max(len(line) for line in part[: part.index("└")].splitlines()) <= width
    assert {"exchanged;", "activations"} <= set(words.split())


@pytest.mark.parametrize("name", ["conv[bold]", "[/b]", "[x]y"])
def test_brackets_in_a_name_are_printed(name):
    _, text = printed(name, 160)
    depths = text[text.index("Work and depth by layer") :]
    assert f"layers.{name}" in depths[: depths.index("└")]
