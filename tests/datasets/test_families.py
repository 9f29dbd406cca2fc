"""Random families: structure, seeds, names."""

import pytest
import torch

from stretto import datasets
from stretto.errors import StrettoError

SMALL = ["rmat:8:2000", "er:100:400", "star:9", "grid:5", "hub:200:500"]


def keys(graph):
    return graph.edge_index[0] * graph.num_nodes + graph.edge_index[1]


@pytest.mark.parametrize("name", SMALL)
def test_simple_graph(name):
    g = datasets.load_graph(name)
    assert g.name == name
    assert g.edge_index.dtype == torch.int64
    assert int(g.edge_index.max()) < g.num_nodes
    assert int(g.edge_index.min()) >= 0
    assert keys(g).unique().numel() == g.num_edges
    assert not (g.edge_index[0] == g.edge_index[1]).any()
    assert torch.equal(g.edge_index, datasets.load_graph(name).edge_index)


@pytest.mark.parametrize("name", [n for n in SMALL if not n.startswith("hub")])
def test_both_directions_are_stored(name):
    g = datasets.load_graph(name)
    back = g.edge_index[1] * g.num_nodes + g.edge_index[0]
    assert torch.equal(keys(g).sort().values, back.sort().values)


def test_seed_changes_the_graph():
    one, _ = datasets.rmat(8, 2000, seed=1)
    two, _ = datasets.rmat(8, 2000, seed=2)
    assert one.shape != two.shape or not torch.equal(one, two)


def test_rmat_resembles_a_citation_graph():
    g = datasets.load_graph("rmat:17:1200000")
    degree = torch.bincount(g.edge_index[1], minlength=g.num_nodes)
    assert g.num_nodes == 131_072
    assert 2_190_000 < g.num_edges < 2_220_000
    assert 10_000 < int(degree.max()) < 12_000
    assert 49_000 < int((degree == 0).sum()) < 53_000


def test_star_grid_and_hub():
    star = datasets.load_graph("star:9")
    assert torch.bincount(star.edge_index[1]).tolist() == [8] + [1] * 8
    grid = datasets.load_graph("grid:5")
    assert (grid.num_nodes, grid.num_edges) == (25, 80)
    assert torch.bincount(torch.bincount(grid.edge_index[1])).tolist() == [0, 0, 4, 12, 9]
    hub = datasets.load_graph("hub:200:500")
    assert hub.num_edges == 500
    assert int((hub.edge_index[1] == 0).sum()) == 150


@pytest.mark.parametrize("name", ["star:1", "grid:1", "er:1:10", "er:5:0", "rmat:1:0", "hub:4:0"])
def test_smallest(name):
    assert datasets.load_graph(name).num_edges == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rmat:17", "not of the form rmat:SCALE:EDGES"),
        ("grid:x", "not of the form grid:N"),
        ("star:-1", "not of the form star:N"),
        ("star:0", "'num_nodes' is 0"),
        ("rmat:40:5", "'scale' is 40"),
        ("hub:10:100", "want more nodes"),
        ("nosuchgraph", "no graph 'nosuchgraph', wanted a path to .npz, one of .*cora.*rmat:SCALE:EDGES"),
    ],
)
def test_wrong_names(name, message):
    with pytest.raises(StrettoError, match=message):
        datasets.load(name)


def test_data_folder_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("STRETTO_DATA", str(tmp_path / "absent"))
    for ask in (datasets.data_folder, datasets.names):
        with pytest.raises(StrettoError, match=r"STRETTO_DATA='.*absent': wanted a folder that is there"):
            ask()
    assert datasets.load_graph("cora").num_nodes == 2708  # which is not in that folder
    monkeypatch.setenv("STRETTO_DATA", str(tmp_path))
    assert datasets.names() == ["cora"]
    (tmp_path / "mine.npz").write_bytes((datasets.named.EMBEDDED["cora"]).read_bytes())
    assert datasets.names() == ["cora", "mine"]
    assert datasets.load_graph("mine").num_nodes == 2708
