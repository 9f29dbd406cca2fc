"""Steps that are not like the others: half precision, no nodes, sizes that follow an index, places from the end."""

import random

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, GraphUNet, HGTConv, SAGEConv

import stretto
from stretto import datasets
from stretto.analyze import Machine
from stretto.machine.timing import Timing
from stretto.observe import agreement
from stretto.observe.models import as_data, make
from stretto.observe.trace import Recorder
from stretto.observe.workload import merge_times
from stretto.profile import recommend


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
    assert done["error"] <= agreement.ALLOWED[dtype]


def test_an_error_is_judged_by_the_type():
    ones = torch.ones(10, dtype=torch.float64)
    for dtype, allowed in agreement.ALLOWED.items():
        stock = [ones.to(dtype)]
        assert agreement.difference(stock, [ones * (1 + allowed / 2)]) == ""
        assert "differ" in agreement.difference(stock, [ones * (1 + allowed * 2)])
        # Of many outputs none is left out: nor one that is not there.
        assert "differ" in agreement.difference([*stock, ones], [*stock, ones * 1.1])
        assert agreement.difference(stock, [*stock, ones]) == "the outputs are other ones"
    assert agreement.worst([ones, ones], [ones, ones * 1.1]) == pytest.approx(0.1)


def test_a_graph_without_nodes():
    empty = Data(x=torch.zeros(0, 16), edge_index=torch.zeros(2, 0, dtype=torch.long))
    profile = profiled(make("gat", 16, 8, 8), empty)
    assert profile.replay(share=1.0, repeats=1)
    profile.apply(repeats=2)
    assert profile.to_json()


def test_a_sparse_matrix_in_place_of_edges():
    """Normalising it merges equal entries: in another order of its index there may be others."""
    edges = torch.randint(300, (2, 1500), generator=torch.Generator().manual_seed(0))
    matrix = torch.sparse_coo_tensor(edges, torch.ones(1500), (300, 300)).coalesce().to_sparse_csr()
    assert profiled(GCNConv(16, 4), (torch.randn(300, 16), matrix)).replay(share=1.0, repeats=1)


def test_places_from_the_end():
    data = as_data(datasets.load_graph("er:300:1500"), width=16)
    profile = profiled(GraphUNet(16, 8, 8, 2), data)
    assert profile.replay(share=1.0, repeats=1)


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


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_computes_again_belongs_to_the_module_that_does(reentrant):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = SAGEConv(8, 8), SAGEConv(8, 8)

        def forward(self, x, edge_index):
            for conv in (self.first, self.second):
                x = checkpoint(conv, x, edge_index, use_reentrant=reentrant)
            return x

    data = Data(x=torch.randn(50, 8, requires_grad=True), edge_index=torch.randint(50, (2, 200)))
    trace = stretto.profile(Net(), data, machine=Machine(), repeats=1).trace
    for name in ("first", "second"):
        gathers = [op.phase for op in trace if op.name == "aten::index_select" and op.path == name]
        assert gathers == ["forward", "backward"]
        assert {op.path for op in trace if op.name == "aten::addmm" and op.path.startswith(name)} == {f"{name}.lin_l"}
        # What differentiates it is of what was computed again, or of the first time, whose graph is the one there is.
        sites = [trace.ops[op.site] for op in trace if op.site is not None and op.path == f"{name}.lin_r"]
        assert {op.phase for op in sites} == {"backward" if reentrant else "forward"}
        assert all(op.path == f"{name}.lin_r" for op in sites)


def test_a_gradient_inside_forward_belongs_to_what_is_differentiated():
    class Force(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = SAGEConv(8, 1)

        def forward(self, x, edge_index):
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.conv(x, edge_index).sum(), x, create_graph=True)[0]

    data = Data(x=torch.randn(50, 8), edge_index=torch.randint(50, (2, 200)))
    trace = stretto.profile(Force(), data, machine=Machine(), repeats=1).trace
    assert any(op.phase == "backward" and "mm" in op.name and op.path == "conv.lin_r" for op in trace)


def test_the_times_are_those_of_the_pass_that_is_most_like_the_others():
    def light(*seconds):
        found = Recorder(full=False)
        found.times = [("aten::relu", s, 0.0) for s in seconds]
        found.trace.traced_seconds = sum(seconds)
        return found

    x = torch.ones(4)
    recorder = Recorder()
    with recorder.recording():
        x.relu().relu().relu()
    trace = recorder.trace
    # The middle one of five by the sum of its ops was interrupted in one of them, and fast in the others.
    passes = [light(1, 1, 1), light(1, 1, 1.1), light(0.1, 0.1, 3), light(1.2, 1.2, 1.2), light(1.3, 1.3, 1.3)]
    merge_times(trace, passes, [3.0] * 5)
    assert [op.seconds for op in trace] == [1, 1, 1.1]
    assert [op.typical for op in trace] == [1.0, 1.0, 1.2]


class Drawn(torch.utils.data.Dataset):
    """Graphs with features drawn by every generator that there is."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        drawn = [random.random(), np.random.rand(), float(torch.rand(()))]
        return Data(x=torch.tensor([drawn] * 4), edge_index=torch.tensor([[0, 1], [1, 2]]), place=index)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_gives_the_same_first_batch_again(shuffle, own):
    generator = torch.Generator().manual_seed(3) if own else None
    model, loader = make("gcn", 3, 8, 2), DataLoader(Drawn(), batch_size=4, shuffle=shuffle, generator=generator)
    profile = stretto.profile(model, loader, machine=Machine(), repeats=1)
    first, again = profile.workload.data, next(iter(loader))
    assert torch.equal(first.place, again.place)
    assert torch.equal(first.x, again.x)


def test_ops_on_matrices_alone_have_sizes():
    matrix = torch.eye(20).to_sparse_csr()

    class Twice(torch.nn.Module):
        def forward(self, x, edge_index):
            return (edge_index @ edge_index) @ x

    profile = stretto.profile(Twice(), (torch.randn(20, 4), matrix), mode="infer", repeats=1, machine=Machine())
    found = {(g.shapes, g.dtypes, g.strides) for g in profile.groups if g.name == "aten::mm"}
    assert ("20x20 of 20, 20x20 of 20", "sparse, sparse", "sparse, sparse") in found
    assert "20x20 of 20, 20x20 of 20" in {row["shapes"] for row in profile.replay(share=1.0, repeats=1)}
