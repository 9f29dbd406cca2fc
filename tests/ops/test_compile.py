"""torch.compile(fullgraph=True, dynamic=True): one compute node per op, results and gradients as in eager mode."""

from functools import partial

import pytest
import torch

from stretto import Graph, ops
from stretto.ops.extremum import extremum
from tests.graphs import random_edges

N, E = 30, 100
HELPERS = {"stretto.graph", "stretto.segments", "stretto.segments_of", "stretto.segment_index", "stretto.mean_scale"}

# name -> (function of a graph, x [N, 8] and per-edge values [E, 4]; compute nodes expected)
FUNCTIONS = {
    "sum": (lambda g, x, e: ops.spmm(g, x), 1),
    "weighted": (lambda g, x, e: ops.spmm(g, x, e[:, 0]), 1),
    "heads": (lambda g, x, e: ops.spmm(g, x.view(-1, 4, 2), e), 1),
    "mean": (lambda g, x, e: ops.spmm(g, x, reduce="mean"), 1),
    "max": (lambda g, x, e: ops.spmm(g, x, e[:, 1], reduce="max"), 1),
    "max plus own": (lambda g, x, e: extremum(g, x, None, "max", x.sin()), 1),
    "one dimension": (lambda g, x, e: ops.spmm(g, x[:, 0]), 1),
    "sddmm": (lambda g, x, e: ops.sddmm(g, x, x.cos()), 1),
    "sddmm add": (lambda g, x, e: ops.sddmm(g, x, x.cos(), op="add"), 1),
    "edge_softmax": (lambda g, x, e: ops.edge_softmax(g, e), 1),
    "segment sum": (lambda g, x, e: ops.segment_reduce(e, g), 1),
    "segment mean": (lambda g, x, e: ops.segment_reduce(e, g, reduce="mean"), 1),
    "segment max": (lambda g, x, e: ops.segment_reduce(e, g, reduce="max"), 1),
    "segment mul": (lambda g, x, e: ops.segment_reduce(e, g, reduce="mul"), 1),
    "segment softmax": (lambda g, x, e: ops.segment_reduce(e, g, reduce="softmax"), 1),
    "segment std": (lambda g, x, e: ops.segment_reduce(e, g, reduce="std"), 3),
    "segment median": (lambda g, x, e: ops.segment_reduce(e, g, reduce="median"), 0),
    "transposed": (lambda g, x, e: ops.spmm(g.T, x), 1),
}


@pytest.fixture(autouse=True)
def fresh_dynamo(fresh_memo):
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counter:
    """A backend that runs what it is given and remembers the stretto nodes in it."""

    def __init__(self) -> None:
        self.nodes: list[str] = []

    def __call__(self, module, inputs):
        self.nodes += [str(n.target) for n in module.graph.nodes if str(n.target).startswith("stretto.")]
        return module

    @property
    def compute(self) -> list[str]:
        return [n for n in self.nodes if n not in HELPERS and n != "stretto.transposed"]


def results(function, *tensors):
    """The value and the gradients of the floating tensors it depends on."""
    leaves = [t.detach().clone().requires_grad_() if t.is_floating_point() else t for t in tensors]
    out = function(*leaves)
    wanted = [t for t in leaves if t.is_floating_point()]
    gradients = torch.autograd.grad(out, wanted, torch.ones_like(out).cumsum(0), allow_unused=True)
    return [out, *gradients]


def same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


def inputs(seed: int = 0, edges: int = E):
    generator = torch.Generator().manual_seed(seed)
    return random_edges(N, N, edges, seed), torch.randn(N, 8, generator=generator), torch.rand(edges, 4)


@pytest.mark.parametrize("where", ["outside", "inside"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_node(name, where):
    function, nodes = FUNCTIONS[name]
    edge_index, x, e = inputs()
    eager = results(lambda x, e: function(Graph.of(edge_index.clone(), N), x, e), x, e)
    Graph.cache_clear()  # nothing has been derived from the graph when it is traced
    counter = Counter()
    if where == "outside":
        graph = Graph.of(edge_index, N)
        compiled = torch.compile(lambda x, e: function(graph, x, e), fullgraph=True, dynamic=True, backend=counter)
        same(results(compiled, x, e), eager)
    else:
        compiled = torch.compile(
            lambda i, x, e: function(Graph.of(i, N), x, e), fullgraph=True, dynamic=True, backend=counter
        )
        same(results(compiled, edge_index, x, e), eager)
        assert counter.nodes.count("stretto.graph") == 1
    assert len(counter.compute) == nodes, counter.nodes


def _network(edge_index, x, e):
    graph = Graph.of(edge_index, x.shape[0])
    h = ops.spmm(graph, x, e[:, 0], reduce="mean").relu()
    alpha = ops.edge_softmax(graph, ops.sddmm(graph, h, h))
    kept = ops.spmm(graph, h, alpha) + ops.spmm(graph, h, reduce="max")
    messages = ops.gather_rows(kept, edge_index[0])
    return kept + ops.scatter_rows(messages, edge_index[1], x.shape[0]) + ops.segment_reduce(messages, graph)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_forward_and_backward_through_the_whole_compiler(backend):
    """Ahead-of-time autograd traces the backward ops too; graphs of another size do not compile again."""
    compiled = torch.compile(_network, fullgraph=True, dynamic=True, backend=backend)
    for seed, edges in ((0, E), (1, E), (2, 77)):
        given = inputs(seed, edges)
        same(results(compiled, *given), results(_network, *given))
    with torch._dynamo.config.patch(error_on_recompile=True):
        given = inputs(3, 91)
        same(results(compiled, *given), results(_network, *given))


def test_inductor():
    def layer(edge_index, x, e):
        return ops.spmm(Graph.of(edge_index, x.shape[0]), x, e[:, 0])

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="inductor")
    for seed in range(2):
        given = inputs(seed)
        same(results(compiled, *given), results(layer, *given))


def test_autocast_compiled():
    linear = torch.nn.Linear(8, 6)

    def layer(edge_index, x, e):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            graph = Graph.of(edge_index, N)
            return ops.spmm(graph, linear(x), e[:, 0]), ops.spmm(graph, linear(x), reduce="max")

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    given = inputs()
    for ours, theirs in zip(compiled(*given), layer(*given), strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs)


def test_another_graph_object_does_not_meet_stale_constants():
    """Sizes, degrees and transposes belong to the graph that is passed, not to the one that was traced."""
    compiled = torch.compile(lambda g, x: ops.spmm(g, x, reduce="mean"), fullgraph=True, dynamic=True, backend="eager")
    for seed in range(3):
        edge_index, x, _ = inputs(seed, 60 + seed)
        graph = Graph.of(edge_index, N)
        same(results(partial(compiled, graph), x), results(partial(ops.spmm, graph, reduce="mean"), x))


def test_segment_matmul_compiles():
    compiled = torch.compile(
        lambda x, w: ops.segment_matmul(x, [0, 10, 10, 30], w), fullgraph=True, backend="aot_eager"
    )
    x, w = torch.randn(30, 5), torch.randn(3, 5, 4)
    same(results(compiled, x, w), results(lambda x, w: ops.segment_matmul(x, [0, 10, 10, 30], w), x, w))


def test_what_cannot_be_traced_says_so():
    with pytest.raises(Exception, match="num_nodes"):
        torch.compile(lambda i, x: ops.spmm(Graph.of(i), x), fullgraph=True, backend="eager")(*inputs()[:2])
