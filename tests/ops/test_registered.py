"""The torch.library side: every registered op passes opcheck; autocast and torch.export work."""

import pytest
import torch

from stretto import Graph, ops
from tests.graphs import random_edges

GRAPH = Graph.of(random_edges(9, 7, 30, 1), (9, 7))
HANDLE = GRAPH.handle
OVER = (HANDLE, 7, 9, 30)  # as a node is handed its graph


def _float(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=grad)


def _extremum_pieces() -> tuple[object, ...]:
    x, weight = _float(9, 4, grad=False), _float(30, grad=False)
    results = torch.ops.stretto.extremum(*OVER, x, weight, _float(7, 4, grad=False), "max")
    saved = [x, weight, results[0], *results]
    return *OVER, saved, [torch.randn_like(results[0])], [True, True, True], "max"


SEGMENTS = (GRAPH.segments.handle, 7, 30, 30)
# op -> the argument lists it is checked with
CALLS = {
    "graph": lambda: [(random_edges(9, 7, 30, 1), 9, 7, "source_to_target")],
    "segments": lambda: [(random_edges(9, 9, 30, 1)[0], 9)],
    "transposed": lambda: [(HANDLE,)],
    "segments_of": lambda: [(HANDLE,)],
    "segment_index": lambda: [(HANDLE, 30, torch.device("cpu"))],
    "mean_scale": lambda: [(HANDLE, 7, torch.float32, torch.device("cpu"))],
    "spmm": lambda: [
        (*OVER, _float(9, 4), None, None, None, None, 1.0),
        (*OVER, _float(9, 2, 3), _float(30, 2), torch.rand(7), torch.rand(9), _float(7, 2, 3), 0.5),
        (GRAPH.T.handle, 9, 7, 30, _float(7, 4), _float(30), None, None, None, 1.0),
    ],
    "extremum": lambda: [
        (*OVER, _float(9, 4), None, None, "max"),
        (*OVER, _float(9, 4), _float(30), None, "min"),
        (*OVER, _float(9, 4), None, _float(7, 4), "max"),
    ],
    "extremum_grad": lambda: [_extremum_pieces()],
    "sddmm": lambda: [
        (*OVER, _float(7, 2, 5), _float(9, 2, 5), "dot"),
        (*OVER, _float(7, 2), _float(9, 2), "add"),
        (GRAPH.T.handle, 9, 7, 30, _float(9, 2, 5), _float(7, 2, 5), "dot"),
    ],
    "edge_softmax": lambda: [(*OVER, _float(30, 3))],
    "edge_softmax_grad": lambda: [(*OVER, [_float(30, 3, grad=False)], [_float(30, 3, grad=False)], [True])],
    "gather_rows": lambda: [(_float(9, 4), GRAPH.edge_index[0], 9)],
    "scatter_rows": lambda: [(_float(30, 4), GRAPH.edge_index[1], 7)],
    "segment_mul": lambda: [(*SEGMENTS, _float(30, 4))],
    "segment_mul_grad": lambda: [(*SEGMENTS, [_float(30, 4, grad=False)], [_float(7, 4, grad=False)], [True])],
    "segment_matmul": lambda: [(_float(9, 4), _float(3, 4, 2), [0, 3, 3, 9])],
}


ELSEWHERE = ("attention", "edge_messages", "softmax_sum", "statistics")  # in the tests of these ops


@pytest.mark.parametrize("name", list(CALLS))
def test_opcheck(name):
    for arguments in CALLS[name]():
        torch.library.opcheck(getattr(torch.ops.stretto, name).default, arguments)


def test_every_node_is_checked():
    nodes = {name.removeprefix("stretto::") for name in torch._C._dispatch_get_all_op_names() if "stretto::" in name}
    assert {name for name in nodes if not name.startswith(ELSEWHERE)} == set(CALLS)
    assert {k.name for k in ops.KERNELS if k.run is not None} <= nodes


def test_eager_and_registered_ops_agree_bit_for_bit():
    x, weight = torch.randn(9, 4), torch.randn(30)
    through = torch.ops.stretto.spmm(*OVER, x, weight, None, None, None, 1.0)
    assert torch.equal(through, ops.spmm(GRAPH, x, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_autocast(dtype):
    """A layer under autocast: the types that plain torch would give, and gradients in the type of the parameters."""
    linear = torch.nn.Linear(4, 8)
    x, weight = torch.randn(9, 4), torch.rand(30, requires_grad=True)
    source, target = GRAPH.edge_index
    with torch.autocast("cpu", dtype=dtype):
        h = linear(x)
        assert h.dtype == dtype
        plain, weighted = ops.spmm(GRAPH, h), ops.spmm(GRAPH, h, weight, reduce="mean")
        dots, score = ops.sddmm(GRAPH, plain, h), ops.edge_softmax(GRAPH, ops.sddmm(GRAPH, plain, h))
        stock = (h[source] * weight.unsqueeze(1)).dtype
    assert (plain.dtype, dots.dtype, score.dtype) == (dtype, dtype, dtype)
    assert weighted.dtype == stock
    (weighted.float().sum() + score.float().square().sum()).backward()
    assert linear.weight.grad.dtype == weight.grad.dtype == torch.float32
    truth = torch.zeros(7, 8).index_add_(0, target, linear(x)[source])
    assert (plain.float() - truth).abs().max() <= 0.05 * truth.abs().max()


class _Layer(torch.nn.Module):
    def __init__(self, num_nodes: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 6)
        self.num_nodes = num_nodes

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        graph = Graph.of(edge_index, self.num_nodes)
        h = ops.spmm(graph, self.linear(x), reduce="mean")
        alpha = ops.edge_softmax(graph, ops.sddmm(graph, h, h))
        return ops.spmm(graph, h, alpha) + ops.spmm(graph, h, reduce="max")


def test_export():
    layer, x, edge_index = _Layer(9), torch.randn(9, 4), random_edges(9, 9, 30, 2)
    edges = torch.export.Dim("edges", min=2)
    program = torch.export.export(layer, (x, edge_index), dynamic_shapes=({}, {1: edges}))
    names = {str(node.target) for node in program.graph.nodes}
    assert {"stretto.graph.default", "stretto.spmm.default", "stretto.extremum.default"} <= names
    for count in (30, 17):
        other = random_edges(9, 9, count, 3)
        torch.testing.assert_close(program.module()(x, other), layer(x, other))


def test_a_graph_that_is_gone_says_so():
    graph = Graph(Graph.of(random_edges(3, 3, 4, 9), 3).csr)
    handle = graph.handle.clone()
    del graph
    with pytest.raises(ValueError, match="is gone"):
        torch.ops.stretto.edge_softmax(handle, 3, 3, 4, torch.randn(4, 1))
