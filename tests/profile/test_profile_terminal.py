"""The profile on terminals of several widths, and with names that look like a style."""

import io

import pytest
import torch
from rich.console import Console
from torch import nn
from torch_geometric.nn import GATConv

import stretto
from stretto import datasets
from stretto.analyze import Machine
from stretto.observe.models import as_data
from stretto.page.text import short
from stretto.profile.terminal import show_profile, show_replay


class Named(nn.Module):
    """A layer with an odd name."""

    def __init__(self, name):
        super().__init__()
        self.layers = nn.ModuleDict({name: GATConv(8, 8)})

    def forward(self, x, edge_index):
        return next(iter(self.layers.values()))(x, edge_index).log_softmax(-1)


def profiled(name):
    data = as_data(datasets.load_graph("er:1000:4000"), width=8)
    return stretto.profile(Named(name), data, machine=Machine(), repeats=1)


@pytest.fixture(scope="module")
def found():
    torch.set_num_threads(1)
    profile = profiled("conv")
    profile.replay(share=1.0, repeats=1)
    return profile


def printed(what, profile, width, *more):
    out = io.StringIO()
    what(Console(file=out, width=width), profile, *more)
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_hot_ops_are_legible(found, width):
    """Neither a name, a shape nor a number is cut."""
    text = printed(show_profile, found, width, 1.0)
    table = text[text.index("groups take") :]
    assert "…" not in table
    assert max(map(len, table.splitlines())) <= width
    for g in found.hot(1.0):
        name = g.name if width >= 200 else g.name.removeprefix("aten::")
        assert width == 120 or f"{name} " in table
        assert width == 120 or set(g.shapes.split()) <= set(table.split())
        assert short(g.seconds * 1e3) in table
        assert f"{g.share:.1%}" in table
    assert "layers.conv" in table
    assert "attainable" in table


@pytest.mark.parametrize("width", [80, 120, 200])
def test_replays_are_legible(found, width):
    text = printed(show_replay, found, width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    for row in found.replays:
        assert short(row["ratio"]) in text
        assert width != 80 or f"{row['op'].removeprefix('aten::')} " in text


@pytest.mark.parametrize("width", [80, 160])
@pytest.mark.parametrize("name", ["conv[bold]", "[/b]", "[x]y"])
def test_brackets_in_a_name_are_printed(name, width):
    profile = profiled(name)
    profile.model = f"{name}train.py"
    text = printed(show_profile, profile, width, 1.0)
    assert text.startswith(f"{name}train.py: ")
    assert f"layers.{name}" in text
