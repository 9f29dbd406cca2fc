"""Every kernel of ours is seen by the recorder, with flops that a formula by hand agrees with."""

import pytest
import torch
from torch_geometric import nn as pyg
from torch_geometric.data import Data

import stretto
from stretto import datasets
from stretto.kernels import denormals, native, tall
from stretto.kernels.abi import SIGNATURES
from stretto.observe import kernel_costs
from stretto.observe.watched_kernels import _holders
from stretto.observe.workload import Workload
from stretto.ops import tall_product
from stretto.ops.variants import VARIANTS

# Exported function -> the kernel that calls it; None: it builds a graph or sets a mode, once.
WATCHED = {
    "stretto_version": None, "stretto_error": None, "stretto_isas": None, "stretto_isa": None, "stretto_set_isa": None,
    "stretto_threading": None, "stretto_flush_denormals": None, "stretto_minmax": None, "stretto_csr_build": None,
    "stretto_csr_rows_sorted": None, "stretto_csr_transpose": None, "stretto_schedule": None, "stretto_hash": None,
    "stretto_batch_graph": None,
    "stretto_pairs": None, "stretto_pair_rows": None, "stretto_gather_ceiling": None,
    "stretto_spmm": "spmm", "stretto_spmm_extremum_grad": "spmm_extremum_grad", "stretto_sddmm": "sddmm",
    "stretto_sddmm_add": "sddmm_add", "stretto_edge_softmax": "edge_softmax",
    "stretto_edge_softmax_grad": "edge_softmax_grad", "stretto_mul_grad": "mul_grad",
    "stretto_gather_rows": "gather_rows", "stretto_attention_forward": "attention",
    "stretto_attention_backward": "attention_grad", "stretto_attention_left": "attention_grad",
    "stretto_row_dot": "attention_grad", "stretto_edge_messages": "edge_messages",
    "stretto_edge_softmax_sum": "softmax_sum", "stretto_relu_dense": "relu_dense",
    "stretto_relu_dense_grad": "relu_dense_grad", "stretto_chain": "chain", "stretto_chain_grad": "chain_grad",
    "stretto_neighbour_statistics": "statistics", "stretto_softplus": "softplus",
    "stretto_tall_product": "tall_product", "stretto_sum_product": "sum_product",
}  # fmt: skip


def test_every_native_kernel_is_watched():
    others = ("stretto_sampler_", "stretto_slot_", "stretto_engine_")
    assert set(WATCHED) == {name for name in SIGNATURES if not name.startswith(others)}, (
        "a native function came or went: say here which kernel calls it"
    )
    holders = [vars(holder) for holder, _ in _holders()]
    for name in {name for name in WATCHED.values() if name}:
        assert name in kernel_costs.KERNELS
        assert any(name in holder for holder in holders), name


@pytest.fixture
def data():
    torch.manual_seed(0)
    graph = datasets.load_graph("er:700:3000")
    edges = graph.edge_index
    return Data(x=torch.randn(700, 12), edge_index=edges, edge_attr=torch.randn(edges.size(1), 6))


def traced(model, data, monkeypatch, step=None):
    if native.library() is None:
        pytest.skip(f"native kernels are off: {native.why_not()}")
    monkeypatch.setenv("STRETTO_TUNE", "analytic")
    monkeypatch.setattr(denormals, "LEAST", 1)  # small products take the way of large ones
    trace = Workload(stretto.accelerate(model), data, step=step).trace()
    assert trace.unknown == []
    return trace


def of(trace, name):
    return [op.cost for op in trace if op.name == f"stretto::{name}"]


def test_relu_dense(data, monkeypatch):
    def lin(i, o):
        return torch.nn.Linear(i, o)

    net = torch.nn.Sequential(lin(12, 8), torch.nn.ReLU(), lin(8, 5))
    trace = traced(pyg.GINConv(net), data, monkeypatch)
    (ahead,), (back,) = of(trace, "relu_dense"), of(trace, "relu_dense_grad")
    n, i, o = 700, 8, 5
    biased = ahead.flops - (2 * n * i * o + n * i + n * o)  # the bias of the first Linear may be added on the way
    assert biased in (0, n * i)
    assert back.flops == 4 * n * i * o + n * o + 2 * n * i + 2 * biased
    assert ahead.row == o


@pytest.mark.parametrize("conv", [pyg.GCNConv, pyg.SAGEConv])
def test_tall_product_costs_what_torch_s_product_does(data, monkeypatch, conv):
    def gemms():
        trace = traced(conv(12, 8), data, monkeypatch)
        found = [op.cost for op in trace if op.cost.family == "gemm"]
        return len(of(trace, "tall_product")), sum(c.flops for c in found), sum(c.stream for c in found)

    by_torch = gemms()
    monkeypatch.setattr(tall, "TALL", 100)
    monkeypatch.setattr(tall_product, "LEAST_WORK", 0)
    monkeypatch.setattr(tall_product, "_free", lambda x: True)
    monkeypatch.setattr(tall_product, "_choose", lambda *_: VARIANTS["product"]["cpu"][1])
    ours = gemms()
    assert by_torch[0] == 0
    assert ours[0] >= 1
    assert ours[1] == by_torch[1]
    between = 2 * 700 * 8 * 4 if conv is pyg.SAGEConv else 0  # of two products only the sum is written
    assert ours[2] == by_torch[2] - between


def test_statistics(data, monkeypatch):
    degree = torch.bincount(torch.bincount(data.edge_index[1], minlength=700))
    conv = pyg.PNAConv(12, 8, ["mean", "min", "max", "std"], ["identity"], degree)
    trace = traced(conv, data, monkeypatch, step=lambda m, d: m(d.x, d.edge_index))
    (ahead,), (back,) = of(trace, "statistics"), of(trace, "statistics_grad")
    assert ahead.flops == 8 * data.edge_index.size(1) * 12
    assert ahead.random == data.edge_index.size(1) * 12 * 4
    assert (back.flops, back.random) == (2 * ahead.flops, 2 * ahead.random)


def test_chain(data, monkeypatch):
    net = torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.ReLU(), torch.nn.Linear(8, 5))
    conv = pyg.GINEConv(net, edge_dim=6)
    trace = traced(conv, data, monkeypatch, step=lambda m, d: m(d.x, d.edge_index, d.edge_attr))
    chains = of(trace, "chain")
    n, e = 700, data.edge_index.size(1)
    flops = {2 * n * 12 * 8 + n * 8 + n * 8 + 2 * n * 8 * 5 + n * 5, 2 * e * 6 * 12 + e * 12, 0}
    assert {c.flops for c in chains} == flops
    assert max(c.flops for c in of(trace, "chain_grad")) > max(flops)
