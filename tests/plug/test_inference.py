"""Inference: exact equals one forward over the whole graph; so does sampling all neighbours; the model is put back."""

import pytest
import torch
from torch_geometric.nn import GAT, GCN, GIN, GraphSAGE, SAGEConv
from torch_geometric.nn.models import MLP

from stretto.errors import StrettoError
from stretto.loader import Store
from stretto.plug.inference import inference
from tests.loader.data import homogeneous


def full(model, data):
    was = model.training
    model.eval()
    with torch.no_grad():
        out = model(data.x, data.edge_index)
    model.train(was)
    return out


MODELS = {
    "sage": lambda: GraphSAGE(9, 16, 3, out_channels=4, norm="batch_norm", dropout=0.5),
    "sage jk": lambda: GraphSAGE(9, 16, 3, out_channels=4, jk="cat"),
    "gcn": lambda: GCN(9, 16, 2, out_channels=4),
    "gin": lambda: GIN(9, 16, 2, out_channels=4),
    "gat": lambda: GAT(9, 16, 2, out_channels=4, heads=2),
}


@pytest.mark.parametrize("name", MODELS)
def test_exact_equals_one_forward(name):
    torch.manual_seed(0)
    data, model = homogeneous(), MODELS[name]()
    model.convs[0].eval()  # a mode of its own, which must survive
    out = inference(model, data)
    assert model.training
    assert not model.convs[0].training
    wanted = full(model, data)
    assert torch.allclose(out, wanted, atol=1e-5)
    some = torch.tensor([5, 3, 3])
    assert torch.allclose(inference(model, data, input_nodes=some), wanted[some], atol=1e-5)


@pytest.mark.parametrize("name", ["sage", "gin", "gat"])
def test_layer_by_layer_in_pieces_equals_one_forward(name):
    torch.manual_seed(0)
    data, model = homogeneous(), MODELS[name]()
    seen = []
    out = inference(model, data, memory=1, batch_size=37, progress=lambda done, total: seen.append(done / total))
    assert torch.allclose(out, full(model, data), atol=1e-5)
    assert seen == sorted(seen)
    assert seen[-1] == 1


@pytest.mark.parametrize("name", ["gcn", "sage jk"])
def test_what_cannot_go_in_pieces_says_so(name):
    with pytest.raises(StrettoError, match="layer by layer is not possible"):
        inference(MODELS[name](), homogeneous(), memory=1)


@pytest.mark.parametrize("name", ["sage", "gin", "gat", "sage jk"])
def test_sampling_all_neighbours_is_exact(name):
    torch.manual_seed(0)
    data, model = homogeneous(), MODELS[name]()
    depth = model.num_layers
    out = inference(model, data, num_neighbors=[-1] * depth, batch_size=64)
    assert torch.allclose(out, full(model, data), atol=1e-5)
    mask = data.train_mask
    out = inference(model, data, num_neighbors=[-1] * depth, batch_size=64, input_nodes=mask)
    assert torch.allclose(out, full(model, data)[mask], atol=1e-5)


def test_sampled_is_reproducible_and_close():
    torch.manual_seed(0)
    data, model = homogeneous(), MODELS["sage"]()
    outs = []
    for _ in range(2):
        torch.manual_seed(4)
        outs.append(inference(model, data, num_neighbors=[5, 5, 5], batch_size=64))
    assert torch.equal(*outs)
    assert outs[0].shape == (300, 4)


def test_own_models_files_and_stores(tmp_path):
    torch.manual_seed(0)
    data = homogeneous()

    class Mine(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = SAGEConv(9, 8), MLP([8, 8, 2], norm=None)

        def forward(self, x, edge_index, scale=1.0):
            return self.head(self.conv(x, edge_index).relu()) * scale

    model = Mine()
    wanted = full(model, data)
    out = inference(model, data, out=tmp_path / "out.bin")
    assert torch.allclose(out, wanted, atol=1e-5)
    assert (tmp_path / "out.bin").stat().st_size == out.numel() * 4
    doubled = inference(model, data, forward=lambda m, b: m(b.x, b.edge_index, scale=2.0))
    assert torch.allclose(doubled, 2 * wanted, atol=1e-5)
    sampled = inference(model, data, num_neighbors=[-1], out=tmp_path / "sampled.bin")
    assert torch.allclose(sampled, wanted, atol=1e-5)

    for key in ("transposed", "name", "scalar"):
        del data[key]
    store = Store.create(tmp_path / "store", data)
    sage = MODELS["sage"]()
    assert torch.allclose(inference(sage, store), full(sage, data), atol=1e-5)
    assert torch.allclose(inference(sage, store, batch_size=50, memory=1), full(sage, data), atol=1e-5)
    assert torch.allclose(inference(model, store, num_neighbors=[-1]), wanted, atol=1e-5)


def test_bad_arguments():
    with pytest.raises(StrettoError, match="'data' is int"):
        inference(MODELS["sage"](), 3)
    with pytest.raises(StrettoError, match="empty"):
        inference(
            MODELS["sage"](), homogeneous(), num_neighbors=[2, 2, 2], input_nodes=torch.empty(0, dtype=torch.int64)
        )
