"""Steps that are not like the others: half precision, no nodes, sizes that follow an index, places from the end."""

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, GraphUNet, HGTConv

import stretto
from stretto import datasets
from stretto.analyze import Machine
from stretto.analyze.models import as_data, make
from stretto.profile import recommend, replay
from stretto.profile.chain_run import run
from stretto.profile.replay import fingerprint
from stretto.tune.timing import Timing


def profiled(model, data):
    return stretto.profile(model, data, machine=Machine(), repeats=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_advice_is_applied_in_every_type(dtype, monkeypatch):
    data = as_data(datasets.load_graph("er:300:1500"), width=16)
    data.x = data.x.to(dtype)
    slow = lambda steps, *_: {n: Timing((3.0 if n.startswith("stock") else 1.0,) * 4) for n in steps}  # noqa: E731
    monkeypatch.setattr(recommend, "_in_turns", slow)
    profile = profiled(make("gcn", 16, 8, 8).to(dtype), data)
    done = profile.apply()
    assert done["applied"], done["reason"]
    assert done["error"] <= recommend.ALLOWED[dtype]


def test_an_error_is_judged_by_the_type():
    ones = torch.ones(10, dtype=torch.float64)
    for dtype, allowed in recommend.ALLOWED.items():
        stock = [ones.to(dtype)]
        assert recommend.difference(stock, [ones * (1 + allowed / 2)]) == ""
        assert "differ" in recommend.difference(stock, [ones * (1 + allowed * 2)])
        # Of many outputs none is left out: nor one that is not there.
        assert "differ" in recommend.difference([*stock, ones], [*stock, ones * 1.1])
        assert recommend.difference(stock, [*stock, ones]) == "the outputs are other ones"
    assert recommend.worst([ones, ones], [ones, ones * 1.1]) == pytest.approx(0.1)


def test_a_graph_without_nodes():
    empty = Data(x=torch.zeros(0, 16), edge_index=torch.zeros(2, 0, dtype=torch.long))
    profile = profiled(make("gat", 16, 8, 8), empty)
    assert profile.replay(share=1.0, repeats=1, seconds=0)
    profile.sweep(budget=0.5, share=1.0, repeats=2)
    profile.apply(repeats=2)
    assert profile.to_json()


def test_a_step_that_does_not_run_with_other_indices(caplog, monkeypatch):
    def broken(tape, *, instead=None, **options):
        if instead:
            raise IndexError("index 7 is out of bounds")
        return run(tape, instead=instead, **options)

    monkeypatch.setattr(replay, "run", broken)
    data = as_data(datasets.load_graph("er:300:1500"), width=16)
    rows = profiled(make("gcn", 16, 8, 8), data).replay(share=1.0, repeats=1, seconds=0)
    assert rows
    assert not any("shuffled indices" in row for row in rows)
    assert "does not run with shuffled indices (index 7 is out of bounds)" in caplog.text


def test_a_sparse_matrix_in_place_of_edges():
    """Normalising it merges equal entries: in another order of its index there may be others."""
    edges = torch.randint(300, (2, 1500), generator=torch.Generator().manual_seed(0))
    matrix = torch.sparse_coo_tensor(edges, torch.ones(1500), (300, 300)).coalesce().to_sparse_csr()
    assert profiled(GCNConv(16, 4), (torch.randn(300, 16), matrix)).replay(share=1.0, repeats=1, seconds=0)


def test_places_from_the_end():
    index = torch.tensor([-1, 0, 2, 0])
    assert fingerprint(index)["degrees"] == fingerprint(index + 1)["degrees"]
    data = as_data(datasets.load_graph("er:300:1500"), width=16)
    profile = profiled(GraphUNet(16, 8, 8, 2), data)
    assert profile.replay(share=1.0, repeats=1, seconds=0)
    profile.sweep(budget=1.0, share=1.0, repeats=2)


def test_an_index_into_a_longer_table_is_not_cut():
    """Half of the table would lack rows that it names."""

    class Picks(torch.nn.Module):
        def forward(self, x, edge_index):
            return x.index_select(0, edge_index[0, -50:]).sum()

    data = as_data(datasets.load_graph("er:300:1500"), width=16)
    rows = stretto.profile(Picks(), data, machine=Machine(), repeats=1, mode="infer").check_bounds(share=1.0, repeats=1)
    assert not any("index_select" in row["op"] for row in rows)


def test_a_layer_that_answers_for_several_types_is_advised():
    torch.manual_seed(0)
    kinds = ["user", "item"]
    edges = {("user", "buys", "item"): torch.randint(20, (2, 60)), ("item", "by", "user"): torch.randint(20, (2, 60))}
    x = {kind: torch.randn(20, 8) for kind in kinds}
    model = torch.nn.Sequential(HGTConv(8, 8, (kinds, list(edges)), heads=2))
    step = lambda model, data: sum(out.sum() for out in model[0](*data).values())  # noqa: E731
    (row,) = stretto.profile(model, (x, edges), step=step, repeats=1, machine=Machine()).recommend(repeats=2)
    assert row["site"] == "0"
    assert row["stock"]["repeats"] == 2


def test_ops_on_matrices_alone_have_sizes():
    matrix = torch.eye(20).to_sparse_csr()

    class Twice(torch.nn.Module):
        def forward(self, x, edge_index):
            return (edge_index @ edge_index) @ x

    profile = stretto.profile(Twice(), (torch.randn(20, 4), matrix), mode="infer", repeats=1, machine=Machine())
    found = {(g.shapes, g.dtypes, g.strides) for g in profile.groups if g.name == "aten::mm"}
    assert ("20x20 of 20, 20x20 of 20", "sparse, sparse", "sparse, sparse") in found
    assert "20x20 of 20, 20x20 of 20" in {row["shapes"] for row in profile.replay(share=1.0, repeats=1, seconds=0)}
