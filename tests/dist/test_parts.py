"""Parts, rules and settings in this process: what a rank holds, which models can be split, what is refused."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch_geometric import nn as pyg

from stretto import StrettoError, accelerate
from stretto.observe.models import make
from stretto.dist import PARTITIONERS, Age, Part, PartitionParallel, Staleness, partition
from stretto.dist import layers as rules
from tests.dist.ranks import sample
from tests.graphs import random_edges


@pytest.fixture
def alone(tmp_path):
    """A process group of this process only."""
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@given(n=st.integers(1, 25), m=st.integers(0, 80), parts=st.integers(1, 4), seed=st.integers(0, 99), data=st.data())
def test_parts_put_together_are_the_graph(n, m, parts, seed, data):
    edges = random_edges(n, n, m, seed)
    owner = torch.tensor(data.draw(st.lists(st.integers(0, parts - 1), min_size=n, max_size=n)))
    found, whole = [], [Part.of(edges, owner, rank) for rank in range(parts)]
    for part in whole:
        held = torch.cat([part.own, part.halo])
        found.append(held[part.edge_index])
        assert (owner[part.own] == part.rank).all()
        assert (owner[part.halo] != part.rank).all()
        assert held.unique().numel() == held.numel()
        interior, boundary = part.piece("interior"), part.piece("boundary")
        assert interior.edge_index.size(1) + boundary.edge_index.size(1) == part.edge_index.size(1)
        assert (interior.edge_index[0] < part.own.numel()).all()  # interior rows read own rows only
        assert part.degree.tolist() == torch.bincount(edges[1], minlength=n)[held].tolist()
        for peer, first, last in part.receives:  # what a part receives is what the other sends, row for row
            (rows,) = [rows for other, rows in whole[peer].sends if other == part.rank]
            assert torch.equal(whole[peer].own[rows], part.halo[first:last])
    together = torch.cat(found, dim=1)
    assert sorted(map(tuple, together.t().tolist())) == sorted(map(tuple, edges.t().tolist()))


@pytest.mark.parametrize("method", PARTITIONERS)
def test_partition_shares_out_the_edges(method):
    edges = random_edges(200, 200, 2000)
    owner = partition(edges, 200, 4, method)
    assert torch.bincount(owner[edges[1]], minlength=4).max() < 1.2 * 500
    with pytest.raises(StrettoError, match="'method' is 'metis'"):
        partition(edges, 200, 4, "metis")


def test_accelerated_layers_aggregate_by_stretto_kernels(alone, monkeypatch):
    counted = []
    plain = rules.spmm
    monkeypatch.setattr(rules, "spmm", lambda *args, **options: counted.append(1) or plain(*args, **options))
    data = sample(random_edges(30, 30, 90), 30, 8, 3, torch.float32)
    owner = torch.zeros(30, dtype=torch.long)
    for name in ("gcn", "sage", "gin"):
        outs = []
        for model in (make(name, 8, 8, 3), accelerate(make(name, 8, 8, 3))):
            with PartitionParallel(model, data, owner) as parts:
                outs.append((parts.predict()[parts.part.own.argsort()], len(counted)))
            counted.clear()
        (stock, none), (fast, two) = outs
        assert (none, two) == (0, 2)
        torch.testing.assert_close(stock, fast)


def test_one_rank_is_the_plain_step_and_sends_nothing(alone):
    data = sample(random_edges(30, 30, 90), 30, 8, 3)
    model = make("gcn", 8, 8, 3).double()
    wanted = torch.nn.functional.cross_entropy(model(data.x, data.edge_index)[data.train_mask], data.y[data.train_mask])
    with PartitionParallel(model, data, torch.zeros(30, dtype=torch.long), staleness=Staleness.halo(1)) as parts:
        assert parts.step() == pytest.approx(float(wanted.detach()), rel=1e-12)
        assert (parts.traffic[0].bytes, parts.traffic[0].messages) == (0, 0)
    assert "forward" not in model.convs[0].__dict__
    model(data.x, data.edge_index)


class Weighted(nn.Module):
    """Calls its layer with an edge weight."""

    def __init__(self):
        super().__init__()
        self.conv = pyg.GCNConv(8, 3)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index, torch.ones(edge_index.size(1)))


def test_what_cannot_be_split_is_refused(alone):
    data = sample(random_edges(30, 30, 90), 30, 8, 3, torch.float32)
    owner = torch.zeros(30, dtype=torch.long)
    refused = {
        "GATConv has no rule, only GCNConv, SAGEConv, GINConv have": make("gat", 8, 8, 3),
        "no layer of message passing": nn.Linear(8, 3),
        "BatchNorm would see the rows of one part only": pyg.GCN(8, 8, 2, norm="batch_norm"),
        "BatchNorm1d would see": nn.Sequential(pyg.SAGEConv(8, 3), nn.BatchNorm1d(3)),
        "LayerNorm would see": pyg.GCN(8, 8, 2, norm="layer_norm"),
        "flow of SAGEConv is target_to_source": pyg.SAGEConv(8, 3, flow="target_to_source"),
    }
    for reason, model in refused.items():
        with pytest.raises(StrettoError, match=reason):
            PartitionParallel(model, data, owner)
    with pytest.raises(StrettoError, match="'owner' names rank 2, but there are 1 ranks"):
        PartitionParallel(make("gcn", 8, 8, 3), data, owner + 2)
    with pytest.raises(StrettoError, match="'owner' is"):
        PartitionParallel(make("gcn", 8, 8, 3), data, owner[1:])
    model = Weighted()
    with pytest.raises(StrettoError, match="with more arguments"), PartitionParallel(model, data, owner) as parts:
        parts.step()
    assert "forward" not in model.conv.__dict__  # given back after a failure too


def test_settings_name_the_ten_numbers():
    assert set(Staleness().bounds.values()) == {Age()}
    assert Staleness.halo(2).bounds["remote"] == Age(2)
    assert Age(1, 1).within(Age(1, 2))
    assert not Age(1, 2).within(Age(2, 1))
    for wrong in ({"steps": -1}, {"layers": 0}):
        with pytest.raises(StrettoError, match="or more"):
            Age(**wrong)


def test_a_weight_that_is_none_is_no_argument():
    """PyG's own GCN calls its layers with edge_weight=None."""
    edges = random_edges(5, 5, 8, 0)
    conv = pyg.GCNConv(4, 4)
    rules.check_call(conv, (edges,), {"edge_weight": None}, edges)
    for args, kwargs in (((edges.clone(),), {}), ((edges,), {"edge_weight": torch.ones(8)}), ((None,), {})):
        with pytest.raises(StrettoError, match="another edge_index than the part's"):
            rules.check_call(conv, args, kwargs, edges)
