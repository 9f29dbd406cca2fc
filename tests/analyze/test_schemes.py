"""An epoch by training scheme, counted from real batches."""

import pytest
import torch
from rich.console import Console
from torch_geometric.data import HeteroData
from torch_geometric.nn import HeteroConv, RGCNConv, SAGEConv

import stretto.analyze
from stretto import StrettoError, datasets
from stretto.analyze import Machine
from stretto.analyze.terminal import show_schemes
from stretto.observe.models import as_data, make
from stretto.observe.workload import Workload


@pytest.fixture(scope="module")
def data():
    torch.set_num_threads(1)
    found = as_data(datasets.load_graph("er:4000:40000"), width=8)
    del found.train_mask
    return found


def test_schemes(data):
    model = make("sage", 8, 16, 8)
    report = stretto.analyze(model, data, machine=Machine(), procs=[1])
    rows = {row["name"]: row for row in report.schemes(fanout=5, batch=200)}
    full = rows["full batch"]
    assert full["flops"] == float(Workload(model, data).trace().flops)
    assert full["batches"] == 1
    for name, row in rows.items():
        assert row["flops"] > 0
        assert row["nodes"] > 0, name
    sampled, clusters = rows["GraphSAGE, VR-GCN"], rows["Cluster-GCN, GraphSAINT"]
    assert sampled["batches"] == clusters["batches"] == 20
    assert sampled["flops"] > full["flops"]  # support vertices are computed again and again
    assert 200 * (1 + 5) < sampled["nodes"] <= 200 * (1 + 5 + 25)
    assert clusters["nodes"] == pytest.approx(200, rel=0.3)
    assert clusters["flops"] < full["flops"]  # edges between clusters are left out


def test_clusters_keep_most_of_their_edges():
    grid = as_data(datasets.load_graph("grid:40"), width=8)
    report = stretto.analyze(make("sage", 8, 16, 8), grid, machine=Machine(), procs=[1])
    rows = {row["name"]: row for row in report.schemes(fanout=5, batch=200)}
    clusters = rows["Cluster-GCN, GraphSAINT"]
    assert clusters["edges"] * clusters["batches"] > 0.7 * grid.num_edges  # of nodes drawn at random, an eighth


def test_attributes_of_edges_go_with_them():
    data = as_data(datasets.load_graph("er:300:1200"), width=8)
    data.edge_type = torch.randint(3, (data.num_edges,))
    report = stretto.analyze(RGCNConv(8, 8, 3), data, machine=Machine(), procs=[1])
    assert [row["batches"] for row in report.schemes(batch=64)] == [1, 5, 5, 5]


def test_what_schemes_are_not_about_is_refused_in_words(capsys):
    hetero = HeteroData({"a": {"x": torch.ones(4, 8)}, ("a", "to", "a"): {"edge_index": torch.tensor([[0], [1]])}})
    model = HeteroConv({("a", "to", "a"): SAGEConv(8, 4)})
    step = lambda m, d: m(d.x_dict, d.edge_index_dict)  # noqa: E731
    report = stretto.analyze(model, hetero, machine=Machine(), procs=[1], step=step)
    with pytest.raises(StrettoError, match="only one graph with nodes of one type"):
        report.schemes()
    show_schemes(Console(), report)
    assert "only one graph" in capsys.readouterr().out
    for wrong in ("fanout", "batch"):
        with pytest.raises(StrettoError, match=f"'{wrong}' is 0, wanted at least 1"):
            report.schemes(**{wrong: 0})
