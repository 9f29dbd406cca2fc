"""STRETTO_BACKEND=torch: the same plans on torch's own kernels. Calls into our library are counted, in every layer."""

import copy
from dataclasses import replace

import pytest
import torch
import torch_geometric.nn as pyg
from torch.nn import Linear, ReLU, Sequential

import stretto
from stretto import Graph, settings
from stretto.kernels import native
from stretto.machine import rates as profile
from tests.layers.options import SPECS
from tests.layers.test_convs import cases, check

# What reads indices, not features: building, transposing and hashing a graph, how its work is cut, pairs of edges.
GRAPH = {
    "stretto_batch_graph",
    "stretto_csr_build",
    "stretto_csr_rows_sorted",
    "stretto_csr_transpose",
    "stretto_error",
    "stretto_hash",
    "stretto_isa",
    "stretto_minmax",
    "stretto_pairs",
    "stretto_schedule",
}


class Counted:
    """The library, and the names of the functions that were asked of it."""

    def __init__(self, library):
        self._library, self.asked = library, []

    def __getattr__(self, name):
        self.asked.append(name)
        return getattr(self._library, name)

    def kernels(self):
        return sorted(set(self.asked) - GRAPH)


@pytest.fixture
def counted(monkeypatch, needs_native):
    Graph.cache_clear()
    found = Counted(native.library())
    monkeypatch.setattr(native, "_library", found)
    yield found
    Graph.cache_clear()


@pytest.mark.parametrize(("conv", "number"), cases(covered=True))
def test_no_kernel_of_ours_runs_and_the_result_is_stock_s(conv, number, counted, monkeypatch):
    spec = SPECS[conv]
    monkeypatch.setenv("STRETTO_BACKEND", "torch")
    for train in (True, False):
        check(spec, spec.options[number], "unsorted", spec.takes[0], train)
    assert counted.kernels() == []


LARGE = {  # layers whose kernels for many rows differ from those for few
    "GCN": lambda: pyg.GCNConv(32, 48),
    "SAGE max": lambda: pyg.SAGEConv(32, 48, aggr="max"),
    "GIN": lambda: pyg.GINConv(Sequential(Linear(32, 48), ReLU(), Linear(48, 32))),
    "TAG": lambda: pyg.TAGConv(32, 16),
    "APPNP": lambda: pyg.APPNP(3, 0.1),
    "GAT": lambda: pyg.GATConv(32, 8, heads=2),
    "PNA": lambda: pyg.PNAConv(32, 16, ["mean", "max", "std"], ["identity"], torch.tensor([0, 3, 5])),
}


@pytest.mark.parametrize("backend", ["torch", "stretto"])
@pytest.mark.parametrize("name", LARGE)
def test_nor_among_many_rows(name, backend, counted, monkeypatch):
    monkeypatch.setenv("STRETTO_BACKEND", backend)
    conv = stretto.accelerate(LARGE[name]())
    x = torch.randn(20_000, 32, requires_grad=True)
    edge_index = torch.randint(20_000, (2, 60_000))
    for _ in range(2):
        conv(x, edge_index).square().sum().backward()
    assert bool(counted.kernels()) == (backend == "stretto")
    (row,) = stretto.report(conv).rows
    assert row.path == "fast"
    assert row.kernel == ("torch" if backend == "torch" else f"native/{native.isa()}")


def test_rates_of_torch_s_kernels_are_kept_beside_those_of_ours(monkeypatch):
    asked = []

    def calibrate(device):
        asked.append(settings.get("STRETTO_BACKEND"))
        return replace(profile.TYPICAL, gemm=float(len(asked)))

    monkeypatch.setattr(profile, "calibrate", calibrate)
    profile.forget()
    for backend, rate in (("stretto", 1.0), ("torch", 2.0), ("stretto", 1.0), ("torch", 2.0)):
        monkeypatch.setenv("STRETTO_BACKEND", backend)
        assert profile.profile(torch.device("cpu"), measure=True).gemm == rate
        assert profile.known(torch.device("cpu")).gemm == rate  # on disk
    assert asked == ["stretto", "torch"]
    profile.forget()


def test_relations_side_by_side(counted, monkeypatch):
    convs = {("a", "to", "b"): pyg.SAGEConv((6, 5), 4), ("b", "to", "b"): pyg.SAGEConv((5, 5), 4)}
    stock = pyg.HeteroConv(convs).double()
    fast = stretto.accelerate(copy.deepcopy(stock))
    x = {"a": torch.randn(9, 6).double(), "b": torch.randn(7, 5).double().requires_grad_()}
    index = {
        ("a", "to", "b"): torch.stack([torch.randint(9, (30,)), torch.randint(7, (30,))]),
        ("b", "to", "b"): torch.randint(7, (2, 20)),
    }
    wanted = stock(x, index)["b"]
    monkeypatch.setenv("STRETTO_BACKEND", "torch")
    for _ in range(3):
        found = fast(x, index)["b"]
        torch.testing.assert_close(found, wanted)
        parts = [torch.autograd.grad(out.square().sum(), x["b"], retain_graph=True) for out in (found, wanted)]
        torch.testing.assert_close(*parts)
    assert counted.kernels() == []
    assert any("norm(A" in row.plan or "S1 (A1" in row.plan for row in stretto.report(fast).rows)
