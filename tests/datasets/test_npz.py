"""The `.npz` reader: the embedded graph, every stored one, and files that are wrong."""

import numpy as np
import pytest
import torch

from stretto import datasets
from stretto.datasets import Dataset, HeteroDataset
from stretto.errors import StrettoError


def write(path, **arrays):
    np.savez(path, **arrays)
    return path


def test_cora_is_embedded():
    cora = datasets.load_graph("cora")
    assert (cora.num_nodes, cora.num_edges, cora.num_classes, cora.num_graphs) == (2708, 10556, 7, 1)
    assert cora.edge_index.dtype == torch.int64
    assert {name: int(mask.sum()) for name, mask in cora.masks.items()} == {"train": 140, "val": 500, "test": 1000}
    assert cora.features.layout == torch.sparse_csr
    assert cora.x.shape == (2708, 1433)
    assert cora.x.layout == torch.strided
    assert set(cora.x.unique().tolist()) == {0.0, 1.0}
    assert cora.x is cora.x  # densified once


def test_dense_features_and_extras(tmp_path):
    x = np.arange(6, dtype=np.float64).reshape(3, 2)
    path = write(
        tmp_path / "g.npz",
        edge_index=np.array([[0, 2], [1, 1]], np.int32),
        num_nodes=3,
        x=x,
        y=np.array([0, -1, 4], np.int16),
        train_mask=np.array([True, False, False]),
        edge_type=np.array([1, 0], np.int8),
        pos=np.zeros((3, 2), np.float16),
    )
    g = datasets.load_graph(str(path))
    assert g.name == "g"
    assert g.edge_index.tolist() == [[0, 2], [1, 1]]
    assert g.x.dtype == torch.float32
    assert torch.equal(g.x, torch.from_numpy(x).float())
    assert g.num_classes == 5
    assert list(g.masks) == ["train"]
    assert g.extras["edge_type"].dtype == torch.int64
    assert g.extras["pos"].dtype == torch.float32


def test_graph_without_anything_else(tmp_path):
    path = write(tmp_path / "bare.npz", edge_index=np.zeros((2, 0), np.int32), num_nodes=4)
    g = datasets.load_graph(str(path))
    assert (g.num_edges, g.num_nodes, g.x, g.y, g.num_classes) == (0, 4, None, None, 0)


def test_hetero(tmp_path):
    path = write(
        tmp_path / "h.npz",
        num_nodes__a=2,
        num_nodes__b=3,
        edge_index__a__to__b=np.array([[1], [2]], np.int32),
        x_data__a=np.ones(1, np.float32),
        x_indices__a=np.array([3], np.int32),
        x_indptr__a=np.array([0, 0, 1], np.int32),
        x_shape__a=np.array([2, 4]),
        target="b",
        y=np.array([0, 1, 1], np.int16),
        test_mask=np.ones(3, bool),
    )
    h = datasets.load(str(path))
    assert isinstance(h, HeteroDataset)
    assert h.num_nodes == {"a": 2, "b": 3}
    assert h.edge_index["a", "to", "b"].tolist() == [[1], [2]]
    assert list(h.x) == ["a"]
    assert h.x["a"].tolist() == [[0, 0, 0, 0], [0, 0, 0, 1]]
    assert (h.target, h.num_classes) == ("b", 2)
    with pytest.raises(StrettoError, match="heterogeneous"):
        datasets.load_graph(str(path))


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ([[0, 3], [1, 1]], r"sources .* span 0\.\.3, but there are 3"),
        ([[0, 1], [1, -1]], r"destinations .* span -1\.\.1"),
        ([[0, 1, 2]], r"shape \[1, 3\], wanted \[2, E\]"),
    ],
)
def test_wrong_edges(tmp_path, edges, message):
    path = write(tmp_path / "bad.npz", edge_index=np.array(edges, np.int32), num_nodes=3)
    with pytest.raises(StrettoError, match=message):
        datasets.load(str(path))


def test_missing_file_and_missing_array(tmp_path):
    with pytest.raises(StrettoError, match="no file"):
        datasets.load(str(tmp_path / "nowhere.npz"))
    path = write(tmp_path / "no_edges.npz", num_nodes=3)
    with pytest.raises(StrettoError, match="has no 'edge_index', only num_nodes"):
        datasets.load(str(path))


def test_every_stored_graph():
    if datasets.data_folder() is None:
        pytest.skip("no data folder: neither $STRETTO_DATA nor ../shared/data")
    for name in datasets.names():
        data = datasets.load(name)
        assert data.name == name
        if isinstance(data, HeteroDataset):
            assert data.y.numel() == data.num_nodes[data.target]
            assert all(x.shape[0] == data.num_nodes[kind] for kind, x in data.features.items())
            continue
        assert isinstance(data, Dataset)
        assert data.num_edges > 0
        labelled = data.num_graphs if "node_ptr" in data.extras else data.num_nodes
        assert data.y is None or data.y.shape[0] == labelled
        assert all(mask.dtype == torch.bool and mask.numel() == labelled for mask in data.masks.values())
        if "node_ptr" in data.extras:
            assert data.extras["node_ptr"][-1] == data.num_nodes
            assert data.extras["edge_ptr"][-1] == data.num_edges
