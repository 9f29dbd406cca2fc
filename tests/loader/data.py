"""Data objects that the tests of the loaders share."""

import torch
from torch_geometric.data import Data, HeteroData


def homogeneous(num_nodes: int = 300, num_edges: int = 2400, seed: int = 0) -> Data:
    g = torch.Generator().manual_seed(seed)
    return Data(
        x=torch.randn(num_nodes, 9, generator=g),
        y=torch.randint(0, 4, (num_nodes,), generator=g),
        edge_index=torch.randint(0, num_nodes, (2, num_edges), generator=g),
        edge_attr=torch.randn(num_edges, 3, generator=g),
        edge_weight=torch.rand(num_edges, generator=g),
        time=torch.randint(0, 100, (num_nodes,), generator=g),
        edge_time=torch.randint(0, 100, (num_edges,), generator=g),
        train_mask=torch.rand(num_nodes, generator=g) < 0.5,
        transposed=torch.randn(5, num_nodes, generator=g).t(),  # not contiguous: indexed, not sliced
        name="a name",
        scalar=torch.tensor(3.0),
    )


def heterogeneous(seed: int = 0) -> HeteroData:
    g = torch.Generator().manual_seed(seed)
    data = HeteroData()
    sizes = {"paper": 200, "author": 120, "venue": 7}
    for name, n in sizes.items():
        data[name].x = torch.randn(n, 4, generator=g)
        data[name].time = torch.randint(0, 50, (n,), generator=g)
    data["paper"].y = torch.randint(0, 3, (200,), generator=g)
    data["lonely"].num_nodes = 5
    for source, relation, target, m in (
        ("author", "writes", "paper", 600),
        ("paper", "rev_writes", "author", 600),
        ("paper", "cites", "paper", 900),
        ("venue", "prints", "paper", 200),
    ):
        store = data[source, relation, target]
        store.edge_index = torch.stack(
            [torch.randint(0, sizes[source], (m,), generator=g), torch.randint(0, sizes[target], (m,), generator=g)]
        )
        store.edge_attr = torch.randn(m, 2, generator=g)
    return data


def check(batch: Data, data: Data, *, e_id: bool = True) -> None:
    """Every attribute of a homogeneous batch is what n_id and e_id say."""
    ends = batch.n_id[batch.edge_index]
    if e_id:
        assert torch.equal(ends, data.edge_index[:, batch.e_id])
        for key in ("edge_attr", "edge_weight", "edge_time"):
            assert torch.equal(batch[key], data[key][batch.e_id])
    for key in ("x", "y", "time", "train_mask", "transposed"):
        assert torch.equal(batch[key], data[key][batch.n_id])
    assert batch.name == data.name
    assert batch.num_nodes == batch.n_id.numel()


def check_hetero(batch: HeteroData, data: HeteroData) -> None:
    for node_type in data.node_types:
        store = batch[node_type]
        assert store.num_nodes == store.n_id.numel()
        for key in ("x", "time", "y"):
            if key in data[node_type]:
                assert torch.equal(store[key], data[node_type][key][store.n_id])
    for edge_type in data.edge_types:
        store = batch[edge_type]
        local = store.edge_index
        ends = torch.stack([batch[edge_type[0]].n_id[local[0]], batch[edge_type[2]].n_id[local[1]]])
        assert torch.equal(ends, data[edge_type].edge_index[:, store.e_id])
        assert torch.equal(store.edge_attr, data[edge_type].edge_attr[store.e_id])


def equal(a, b) -> bool:
    """Whether two batches hold the same, attribute by attribute."""
    left, right = a.to_dict(), b.to_dict()
    return _same(left, right)


def _same(a, b) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    return a == b
