"""Statistics of neighbours in one pass: beside PyG's aggregations, in digits, ties and NaN."""

import pytest
import torch
from torch_geometric.nn.resolver import aggregation_resolver

from stretto import Graph, StrettoError
from stretto.kernels import native
from stretto.ops import statistics
from stretto.ops.edge_statistics import KERNEL, STATISTICS
from tests.compare import DTYPES, compare
from tests.graphs import graph_of

GRAPHS = ("unsorted", "isolated", "duplicates", "self_loops", "hub", "wide", "empty", "one_node")


@pytest.mark.parametrize("isa", native.isas() or ["none"])
def test_every_instruction_set(isa, needs_native):
    native.set_isa(isa)
    for dtype in DTYPES:
        for sample in KERNEL.samples(graph_of("unsorted"), dtype):
            compare(KERNEL.function, KERNEL.reference, sample, KERNEL.name)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("own", [True, False])
def test_is_what_pyg_computes(name, own):
    graph = graph_of(name)
    source, target = graph.edge_index
    x = torch.randn(graph.num_cols, 19, dtype=torch.float64, requires_grad=True)
    shift = torch.randn(graph.num_rows, 19, dtype=torch.float64, requires_grad=True) if own else None
    message = x[source] if shift is None else x[source] + shift[target]
    leaves = [x] if shift is None else [x, shift]
    ours = statistics(graph, x, shift, names=STATISTICS)
    for at, key in enumerate(STATISTICS):
        stock = aggregation_resolver(key)(message, target, dim_size=graph.num_rows)
        keep = ours[:, STATISTICS.index("var")] > 1e-3 if key == "std" else torch.ones_like(stock, dtype=torch.bool)
        cotangent = torch.where(keep, torch.randn_like(stock), 0.0)  # at the threshold rounding decides
        torch.testing.assert_close(ours[:, at][keep], stock[keep], rtol=1e-9, atol=1e-10)
        found = torch.autograd.grad(ours[:, at], leaves, cotangent, retain_graph=True)
        wanted = torch.autograd.grad(stock, leaves, cotangent, retain_graph=True)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


def test_gradcheck():
    graph = graph_of("unsorted")
    x = torch.randn(graph.num_cols, 2, dtype=torch.float64, requires_grad=True)
    own = torch.randn(graph.num_rows, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: statistics(graph, a, b, names=("mean", "max", "var", "min")), (x, own))
    assert torch.autograd.gradgradcheck(lambda a, b: statistics(graph, a, b, names=("mean", "var")), (x, own))


def test_a_large_mean_costs_no_digits():
    """In fp32, where the mean of squares minus the square of the mean has no digit left."""
    graph = graph_of("unsorted")
    x = torch.randn(graph.num_cols, 8, dtype=torch.float64) + 1e4
    ours = statistics(graph, x.float(), names=("var",))[:, 0].double()
    truth = KERNEL.reference(graph, x.float().double(), names=("var",))[:, 0]
    assert (ours - truth).abs().max() < 1e-4 * truth.abs().max()


def test_ties_share_and_count_the_zero():
    """Two equal neighbours share a gradient; an extremum of 0 shares it with the zero torch's result starts from."""
    edges = torch.tensor([[0, 1, 2, 0, 1], [3, 3, 3, 4, 4]])
    graph = Graph.of(edges, 5)
    for value in (2.0, 0.0):
        x = torch.tensor([[value], [value], [value - 1.0], [0.0], [0.0]], requires_grad=True)
        theirs = x.detach().clone().requires_grad_()
        ours = statistics(graph, x, names=("max",))[:, 0]
        stock = aggregation_resolver("max")(theirs[edges[0]], edges[1], dim_size=5)
        assert torch.equal(ours, stock)
        ours.sum().backward()
        stock.sum().backward()
        torch.testing.assert_close(x.grad, theirs.grad)


def test_nan_reaches_its_own_rows_only():
    graph = Graph.of(torch.tensor([[0, 1, 1, 2], [0, 0, 1, 2]]), 3)
    x = torch.tensor([[torch.nan], [1.0], [2.0]], requires_grad=True)
    out = statistics(graph, x, names=("mean", "min", "max", "std"))
    assert out[0].isnan().all()
    assert out[1:].isfinite().all()
    out[1:].sum().backward()
    assert x.grad[2].isfinite().all()


def test_bits_do_not_depend_on_threads():
    for sample in KERNEL.samples(graph_of("hub"), torch.float32):
        leaves = [t.requires_grad_() for t in sample.args[1:]]
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out = KERNEL.function(*sample.args, **sample.kwargs)
            results.append([out, *torch.autograd.grad(out.sum(), leaves)])
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_opcheck():
    graph = graph_of("unsorted")
    x, own = (torch.randn(n, 3, requires_grad=True) for n in (graph.num_cols, graph.num_rows))
    names = ["mean", "max"]
    over = (graph.handle, graph.num_rows, graph.num_cols, graph.num_edges)
    torch.library.opcheck(torch.ops.stretto.statistics.default, (*over, x, own, names))
    grad = torch.randn(graph.num_rows, 2, 3)
    arguments = (*over, [x.detach(), own.detach()], [grad], [True, True], names)
    torch.library.opcheck(torch.ops.stretto.statistics_grad.default, arguments)


@pytest.mark.parametrize(
    ("names", "own", "message"),
    [
        (("mode",), None, "'mode' in 'names'"),
        (("max", "max"), None, "wanted each once"),
        (("max",), torch.randn(3, 1), r"'own' has shape \[3, 1\]"),
    ],
)
def test_errors(names, own, message):
    graph = graph_of("unsorted")
    with pytest.raises(StrettoError, match=message):
        statistics(graph, torch.randn(graph.num_cols, 2), own, names=names)
