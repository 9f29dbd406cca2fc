"""run_trimmed: the seeds' outputs and the gradients of a whole forward, from the least work."""

import copy

import pytest
import torch
from torch_geometric.nn import GAT, GCN, GIN, GraphSAGE

from stretto.graph import Graph
from stretto.loader import NeighborLoader, run_trimmed
from stretto.loader.trim import why_not_trimmed
from stretto.plug.accelerate import accelerate
from tests.loader.data import homogeneous

MODELS = {
    "sage": lambda: GraphSAGE(9, 16, 3, 4, norm="layer_norm", norm_kwargs={"mode": "node"}),
    "sage max, act first": lambda: GraphSAGE(
        9, 16, 3, 4, aggr="max", act_first=True, norm="layer_norm", norm_kwargs={"mode": "node"}
    ),
    "gin": lambda: GIN(9, 16, 3, 4),
    "gat": lambda: GAT(9, 16, 3, 4, heads=2),
    "gatv2": lambda: GAT(9, 16, 3, 4, v2=True),
}
WHOLE = {
    "gcn": (lambda: GCN(9, 16, 3, 4), "GCNConv"),
    "jk": (lambda: GraphSAGE(9, 16, 3, 4, jk="cat"), "jumping knowledge"),
    "batch norm": (lambda: GraphSAGE(9, 16, 3, 4, norm="batch_norm"), "BatchNorm"),
    "own forward": (lambda: Mine(9, 16, 3, 4), "forward of its own"),
    "no layers": (lambda: torch.nn.Linear(9, 4), "inference_per_layer"),
}


class Mine(GraphSAGE):
    def forward(self, x, edge_index):
        return super().forward(x, edge_index) * 2


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("trim", [False, True])
def test_outputs_and_gradients_of_the_seeds(name, fast, trim):
    torch.manual_seed(0)
    data = homogeneous()
    data.x = data.x.double()
    whole = MODELS[name]().double()
    part = copy.deepcopy(whole)
    part = accelerate(part) if fast else part
    assert not why_not_trimmed(part)
    for batch in NeighborLoader(data, [4, 3, 2], batch_size=64, trim=trim):
        whole.zero_grad()
        part.zero_grad()
        wanted = whole(batch.x, batch.edge_index)[: batch.batch_size]
        got = run_trimmed(part, batch)
        assert torch.allclose(got, wanted, atol=1e-9)
        wanted.square().sum().backward()
        got.square().sum().backward()
        for a, b in zip(part.parameters(), whole.parameters(), strict=True):
            assert torch.allclose(a.grad, b.grad, atol=1e-8)


@pytest.mark.parametrize("name", WHOLE)
def test_models_that_need_the_whole_batch(name):
    make, reason = WHOLE[name]
    model = make()
    assert reason in why_not_trimmed(model)
    if name == "no layers":
        return
    batch = next(iter(NeighborLoader(homogeneous(), [4, 3, 2], batch_size=64)))
    model.eval()
    assert torch.allclose(run_trimmed(model, batch), model(batch.x, batch.edge_index)[:64], atol=1e-5)


def test_hooks_see_the_whole_forward():
    model, seen = GraphSAGE(9, 16, 2, 4), []
    model.register_forward_hook(lambda *args: seen.append(1))
    batch = next(iter(NeighborLoader(homogeneous(), [4, 3], batch_size=64)))
    assert run_trimmed(model, batch).shape == (64, 4)
    assert seen == [1]


def test_fewer_hops_than_layers_run_whole():
    torch.manual_seed(0)
    model = GraphSAGE(9, 16, 3, 4)
    batch = next(iter(NeighborLoader(homogeneous(), [4, 3], batch_size=64)))
    assert torch.allclose(run_trimmed(model, batch), model(batch.x, batch.edge_index)[:64], atol=1e-5)


def test_nothing_is_sorted():
    model = accelerate(GraphSAGE(9, 16, 3, 4))
    batch = next(iter(NeighborLoader(homogeneous(), [4, 3, 2], batch_size=64)))
    built = Graph.cache_info().built
    run_trimmed(model, batch).sum().backward()
    assert Graph.cache_info().built == built


def _by_hops(batch):
    return {
        "num_sampled_nodes_per_hop": batch.num_sampled_nodes,
        "num_sampled_edges_per_hop": batch.num_sampled_edges,
    }


@pytest.mark.parametrize("fanout", [[4, 3], [4, 3, 2]])
@pytest.mark.parametrize("norm", [None, "layer_norm"])
@pytest.mark.parametrize("semantics", ["frontier", "layered"])
def test_pygs_trimming_of_an_accelerated_model(fanout, norm, semantics, monkeypatch):
    data = homogeneous()
    torch.manual_seed(0)
    stock = GraphSAGE(9, 8, 2, 4, norm=norm, norm_kwargs={"mode": "node"} if norm else None).double()
    fast = accelerate(copy.deepcopy(stock))
    rows = []
    forward = type(fast.convs[0]).forward

    def count(conv, x, *args, **kwargs):
        rows.append(x[1].size(0) if isinstance(x, tuple) else x.size(0))
        return forward(conv, x, *args, **kwargs)

    monkeypatch.setattr(type(fast.convs[0]), "forward", count)
    for batch in NeighborLoader(data, fanout, input_nodes=torch.arange(40), batch_size=16, semantics=semantics):
        rows.clear()
        got = fast(batch.x.double(), batch.edge_index, **_by_hops(batch))
        if semantics == "frontier":  # the first layer left out what the second would have dropped
            assert rows[0] == sum(batch.num_sampled_nodes[:-1])
        want = stock(batch.x.double(), batch.edge_index, **_by_hops(batch))
        assert torch.allclose(got, want, rtol=1e-9, atol=1e-9)
        for model, out in ((fast, got), (stock, want)):
            model.zero_grad()
            out[: batch.batch_size].square().sum().backward()
        for a, b in zip(fast.parameters(), stock.parameters(), strict=True):
            assert torch.allclose(a.grad, b.grad, rtol=1e-9, atol=1e-9)


def test_trimming_of_edges_that_no_loader_gave():
    """An edge_index of the user's own, and one with an edge into the outermost nodes, run as stock has them."""
    data = homogeneous()
    torch.manual_seed(0)
    stock = GraphSAGE(9, 8, 2, 4).double()
    fast = accelerate(copy.deepcopy(stock))
    batch = next(iter(NeighborLoader(data, [4, 3], batch_size=16)))
    hops, x = _by_hops(batch), batch.x.double()
    bent = batch.edge_index.clone()
    bent[1, -1] = batch.num_nodes - 1
    for edge_index in (batch.edge_index.clone(), bent):
        assert torch.allclose(fast(x, edge_index, **hops), stock(x, edge_index, **hops), rtol=1e-9, atol=1e-9)
    batch.edge_index[1, -1] = batch.num_nodes - 1  # in place: it is no longer what the loader gave
    got, want = (model(x, batch.edge_index, **hops) for model in (fast, stock))
    assert torch.allclose(got, want, rtol=1e-9, atol=1e-9)
