"""Random walks: every step is an edge, draws have node2vec's weights, and PyG's Node2Vec runs on them."""

import pytest
import torch
from scipy import stats
from torch_geometric.nn import Node2Vec

from stretto.errors import StrettoError
from stretto.loader import random_walk, walk
from stretto.plug.accelerate import patch, unpatch
from tests.loader.graphs import AWKWARD, awkward


def csr(edge_index, n):
    order = torch.argsort(edge_index[0] * n + edge_index[1])
    rowptr = torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(edge_index[0], minlength=n).cumsum(0)])
    return rowptr, edge_index[1][order]


@pytest.mark.parametrize("name", AWKWARD)
@pytest.mark.parametrize(("p", "q"), [(1.0, 1.0), (0.5, 2.0)])
def test_every_step_is_an_edge(name, p, q):
    edge_index, n = awkward(name)
    rowptr, col = csr(edge_index, n)
    start = torch.arange(n).repeat(3)
    walks = random_walk(rowptr, col, start, 6, p, q, generator=torch.Generator().manual_seed(0))
    assert walks.shape == (3 * n, 7)
    assert torch.equal(walks[:, 0], start)
    edges = set(map(tuple, edge_index.t().tolist()))
    ends = set(edge_index[0].tolist())
    for a, b in zip(walks[:, :-1].reshape(-1).tolist(), walks[:, 1:].reshape(-1).tolist(), strict=True):
        assert (a, b) in edges if a in ends else a == b


def test_no_walks_and_no_steps():
    rowptr, col = csr(*awkward("random"))
    assert random_walk(rowptr, col, torch.empty(0, dtype=torch.int64), 4).shape == (0, 5)
    assert random_walk(rowptr, col, torch.tensor([3, 5]), 0).tolist() == [[3], [5]]


def test_the_second_step_has_the_weights_of_node2vec():
    # 0 - 1; from 1 one goes back to 0, to 2 (a neighbour of 0) or to 3 (none).
    edge_index = torch.tensor([[0, 1, 1, 1, 0], [1, 0, 2, 3, 2]])
    rowptr, col = csr(edge_index, 4)
    p, q = 4.0, 0.5
    walks = random_walk(
        rowptr, col, torch.zeros(120_000, dtype=torch.int64), 2, p, q, generator=torch.Generator().manual_seed(1)
    )
    second = walks[walks[:, 1] == 1, 2]
    counts = torch.bincount(second, minlength=4)[[0, 2, 3]].double()
    wanted = torch.tensor([1 / p, 1.0, 1 / q], dtype=torch.float64)
    wanted *= counts.sum() / wanted.sum()
    assert stats.chi2.sf(float(((counts - wanted) ** 2 / wanted).sum()), 2) > 1e-4


def test_first_order_is_uniform_and_reproducible():
    rowptr, col = csr(torch.stack([torch.zeros(50, dtype=torch.int64), torch.arange(1, 51)]), 51)
    start = torch.zeros(100_000, dtype=torch.int64)
    walks = random_walk(rowptr, col, start, 1, generator=torch.Generator().manual_seed(2))
    counts = torch.bincount(walks[:, 1] - 1, minlength=50).double()
    assert stats.chi2.sf(float(((counts - 2000) ** 2 / 2000).sum()), 49) > 1e-4
    torch.manual_seed(3)
    first = random_walk(rowptr, col, start[:100], 3)
    torch.manual_seed(3)
    assert torch.equal(first, random_walk(rowptr, col, start[:100], 3))


def test_bad_arguments():
    rowptr, col = csr(*awkward("random"))
    for kwargs, text in (
        ({"start": torch.tensor([200])}, "start"),
        ({"walk_length": -1}, "walk_length"),
        ({"p": 0.0}, "'p' is 0.0"),
        ({"col": col.flip(0), "q": 2.0}, "ascending"),
    ):
        with pytest.raises(StrettoError, match=text):
            random_walk(**{"rowptr": rowptr, "col": col, "start": torch.tensor([0]), "walk_length": 2, **kwargs})


@pytest.mark.parametrize(("p", "q"), [(1.0, 1.0), (0.5, 2.0)])
def test_pygs_node2vec_learns_under_patch(p, q):
    if hasattr(torch.ops.pyg, "random_walk"):
        pytest.skip("pyg-lib is there, and its own walks are used")
    edge_index, n = awkward("random")
    with pytest.raises(ImportError):
        Node2Vec(edge_index, 8, walk_length=6, context_size=3)
    patch()
    try:
        torch.manual_seed(0)
        model = Node2Vec(edge_index, 8, walk_length=6, context_size=3, walks_per_node=2, p=p, q=q, num_nodes=n)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        losses = []
        for _ in range(5):
            total = 0.0
            for positive, negative in model.loader(batch_size=50, shuffle=True):
                optimizer.zero_grad()
                loss = model.loss(positive, negative)
                loss.backward()
                optimizer.step()
                total += float(loss.detach())
            losses.append(total)
        assert losses[-1] < losses[0]
    finally:
        unpatch()
    with pytest.raises(ImportError):
        Node2Vec(edge_index, 8, walk_length=6, context_size=3)
    assert not hasattr(torch.ops.pyg, "random_walk")
    walk.remove()
