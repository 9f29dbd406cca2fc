"""Edge messages, softmax aggregation, statistics and streamed edge functions beside plain PyTorch and stock PyG."""

import pytest
import torch
from torch import nn
from torch_geometric.nn import aggr
from torch_geometric.nn.resolver import aggregation_resolver

from stretto import Graph, StrettoError
from stretto.kernels import native
from stretto.ops import attention, edge_messages, edge_mlp, neighbour_statistics, softmax_sum
from stretto.ops.edge_messages import KERNEL as MESSAGES
from stretto.ops.edge_softmax_sum import KERNEL as SOFTMAX_SUM
from tests.compare import DTYPES, compare
from tests.graphs import graph_of, random_edges

GRAPH = Graph.of(random_edges(9, 7, 30, 1), (9, 7))


def values(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()


def same_gradients(ours, theirs, leaves):
    cotangent = torch.randn_like(theirs)
    torch.testing.assert_close(ours, theirs)
    found = torch.autograd.grad(ours, leaves, cotangent, retain_graph=True)
    wanted = torch.autograd.grad(theirs, leaves, cotangent, retain_graph=True)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("isa", native.isas() or ["none"])
@pytest.mark.parametrize("op", [MESSAGES, SOFTMAX_SUM], ids=["messages", "softmax_sum"])
def test_every_instruction_set(op, isa, needs_native):
    native.set_isa(isa)
    for dtype in DTYPES:
        for sample in op.samples(graph_of("unsorted"), dtype):
            compare(op.function, op.reference, sample, op.name)


@pytest.mark.parametrize("op", [MESSAGES, SOFTMAX_SUM], ids=["messages", "softmax_sum"])
def test_bits_do_not_depend_on_threads(op):
    for sample in op.samples(graph_of("hub"), torch.float32):
        leaves = [t.requires_grad_() for t in sample.args[1:] if t is not None]
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out = op.function(*sample.args, **sample.kwargs)
            results.append([out, *torch.autograd.grad(out.sum(), leaves)])
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_activations_far_from_zero():
    x = torch.tensor([[-200.0], [-30.0], [-1e-3], [0.0], [1e-3], [19.0], [25.0], [200.0], [torch.nan]])
    loops = torch.arange(9).repeat(2, 1)
    graph = Graph.of(loops, 9)
    for act, truth in (("sigmoid", torch.sigmoid), ("softplus", nn.functional.softplus), ("silu", nn.functional.silu)):
        leaf = x.clone().requires_grad_()
        out = edge_messages(graph, None, leaf, act=act)
        torch.testing.assert_close(out, truth(x), equal_nan=True, rtol=1e-6, atol=1e-7)
        out.sum().backward()
        other = x.clone().requires_grad_()
        truth(other).sum().backward()
        torch.testing.assert_close(leaf.grad, other.grad, equal_nan=True, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("semi_grad", "per_channel"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("name", ["unsorted", "isolated", "hub"])
def test_softmax_sum_is_genconv(name, semi_grad, per_channel):
    graph = graph_of(name)
    source, target = graph.edge_index
    x, edge = values(graph.num_cols, 6), values(graph.num_edges, 6)
    stock = aggr.SoftmaxAggregation(0.7, learn=not semi_grad, semi_grad=semi_grad, channels=6 if per_channel else 1)
    heat = torch.full((6,) if per_channel else (1,), 0.7, dtype=torch.float64, requires_grad=not semi_grad)
    if not semi_grad:
        stock.t = nn.Parameter(heat.detach().clone().view(1, -1) if per_channel else heat.detach().clone())
    message = torch.relu(x[source] + edge) + 1e-7
    theirs = stock(message, target, dim_size=graph.num_rows)
    ours = softmax_sum(graph, x, edge, heat, shift=1e-7, detached=semi_grad)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    cotangent = torch.randn_like(theirs)
    leaves = [x, edge] if semi_grad else [x, edge, heat]
    other = [x, edge] if semi_grad else [x, edge, stock.t]
    found, wanted = torch.autograd.grad(ours, leaves, cotangent), torch.autograd.grad(theirs, other, cotangent)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b.reshape(a.shape).to(a.dtype), rtol=1e-5, atol=1e-6)


def test_softmax_sum_of_large_values():
    x = values(9, 4) * 1e4
    out = softmax_sum(GRAPH, x, act="identity")
    assert out.isfinite().all()


@pytest.mark.parametrize("edge", [False, True])
@pytest.mark.parametrize("name", ["unsorted", "isolated", "hub", "wide"])
def test_statistics_as_stock(name, edge):
    graph = graph_of(name)
    source, target = graph.edge_index
    x = values(graph.num_cols, 5)
    e = values(graph.num_edges, 5) if edge else None
    message = x[source] if e is None else x[source] + e
    names = ("sum", "mean", "min", "max", "var", "std")
    found = neighbour_statistics(graph, x, e, names=names)
    leaves = [x] if e is None else [x, e]
    for key in names:
        stock = aggregation_resolver(key)(message, target, dim_size=graph.num_rows)
        if key == "std":  # whether a value at the threshold counts as 0 is a matter of rounding
            keep = neighbour_statistics(graph, x, e, names=("var",))["var"] > 2e-5
            torch.testing.assert_close(found[key][keep], stock[keep])
        else:
            same_gradients(found[key], stock, leaves)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
@pytest.mark.parametrize("block", [7, 1 << 16])
def test_streamed_edge_function(reduce, block):
    graph = graph_of("unsorted")
    source, target = graph.edge_index
    x, e = values(12, 3), values(graph.num_edges, 2)
    mlp = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)).double()

    class Message(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp

        def forward(self, x_i, x_j, edge):
            return self.inner(torch.cat([x_i, x_j, edge], -1))

    module = Message()
    ours = edge_mlp(graph, module, x, x, e, reduce=reduce, block=block)
    theirs = aggregation_resolver(reduce)(module(x[target], x[source], e), target, dim_size=12)
    same_gradients(ours, theirs, [x, e, *mlp.parameters()])


@pytest.mark.parametrize("name", ["unsorted", "isolated", "empty", "duplicates", "wide", "tall"])
def test_streamed_messages_themselves(name):
    """Several terms at each end; every message in the order of the user's edges beside a sum of them."""
    graph = graph_of(name)
    source, target = graph.edge_index
    rows, cols = [values(graph.num_rows, w) for w in (3, 2)], [values(graph.num_cols, 3)]
    given = [values(graph.num_edges), values(graph.num_edges, 3)]

    def message(a, b, c, d, e):
        return torch.cat([(a * c).tanh() * d.unsqueeze(1), b, e.exp()], dim=1)

    each, total = edge_mlp(graph, message, rows, cols, given, reduce=("each", "sum"), block=7)
    plain = message(rows[0][target], rows[1][target], cols[0][source], *given)
    summed = plain.new_zeros(graph.num_rows, 8).index_add(0, target, plain)
    leaves = [*rows, *cols, *given]
    same_gradients(each, plain, leaves)
    same_gradients(total, summed, leaves)
    again = [torch.autograd.grad(t.square().sum(), leaves[0], create_graph=True)[0] for t in (each, plain)]
    wanted = [a for a in leaves if a is not rows[1]]  # linear in that one: no second derivative
    same_gradients(*again, wanted)


def test_streamed_dropout_is_the_same_in_backward():
    graph = graph_of("unsorted")
    x = torch.ones(12, 4, requires_grad=True)
    drop = nn.Dropout(0.5)
    torch.manual_seed(3)
    out = edge_mlp(graph, lambda x_i, x_j: drop(x_j), x, x, block=8)
    before = torch.get_rng_state()
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(grad.sum(), out.sum())


def test_nnconv_contraction():
    """sum_j (h_ij W) x_j = (sum_j h_ij (x) x_j) W: the weights of an edge never take shape."""
    graph = graph_of("unsorted")
    source, target = graph.edge_index
    x, hidden, weight = values(12, 5), values(graph.num_edges, 3), values(3, 5, 4)
    outer = attention(graph, x.unsqueeze(1), None, None, hidden, form="weight")
    ours = outer.flatten(1) @ weight.flatten(0, 1)
    per_edge = torch.einsum("eh,hio->eio", hidden, weight)
    message = torch.einsum("ei,eio->eo", x[source], per_edge)
    theirs = torch.zeros(12, 4, dtype=torch.float64).index_add(0, target, message)
    same_gradients(ours, theirs, [x, hidden, weight])


def test_opcheck():
    def plain(*shape):
        return torch.randn(*shape, requires_grad=True)

    over = (GRAPH.handle, 7, 9, 30)
    terms = [plain(7, 3), plain(9, 3), plain(30, 3), None, plain(9, 3), None]
    torch.library.opcheck(torch.ops.stretto.edge_messages.default, (*over, *terms, "sigmoid", "identity"))
    detached = [None if t is None else t.detach() for t in terms]
    needs = [True, True, False, False, True, False]
    backward = (*over, detached, [torch.randn(7, 3)], needs, "sigmoid", "identity")
    torch.library.opcheck(torch.ops.stretto.edge_messages_grad.default, backward)
    tensors, options = [plain(9, 3), plain(30, 3), plain(3)], ("relu", 1e-7, False)
    torch.library.opcheck(torch.ops.stretto.softmax_sum.default, (*over, *tensors, *options))
    results = torch.ops.stretto.softmax_sum(*over, *tensors, *options)[1:]
    saved = [t.detach() for t in (*tensors, *results)]
    backward = (*over, saved, [torch.randn(7, 3)], [True, True, True], *options)
    torch.library.opcheck(torch.ops.stretto.softmax_sum_grad.default, backward)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: edge_messages(GRAPH, act="relu"), "one of 'row', 'col', 'edge' is needed"),
        (
            lambda: edge_messages(GRAPH, torch.randn(7, 2), torch.randn(7, 2)),
            r"'col' has shape \[7, 2\], wanted \[9, 2\]",
        ),
        (lambda: edge_messages(GRAPH, torch.randn(7, 2), act="gelu"), "'act' is 'gelu', wanted one of"),
        (lambda: softmax_sum(GRAPH, torch.randn(8, 2)), r"'x' has shape \[8, 2\], wanted \[9, k\]"),
        (lambda: edge_mlp(GRAPH, torch.add, torch.randn(7, 2), torch.randn(8, 2)), "'col' has 8 rows, wanted 9"),
        (lambda: neighbour_statistics(GRAPH, torch.randn(9, 2), names=("mode",)), "'mode' in 'names'"),
    ],
)
def test_errors_name_the_argument(call, message):
    with pytest.raises(StrettoError, match=message):
        call()
