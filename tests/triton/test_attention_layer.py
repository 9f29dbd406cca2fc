"""Whole attention layers as one step: against the same made of plain ops, played from a tape, and edited in place."""

import copy
from contextlib import nullcontext
from importlib import import_module

import pytest
import torch
import torch_geometric.nn as pyg

from stretto import Graph, accelerate, kernels
from stretto.layers import record_of

FORMS = ("gat", "gatv2", "dot")
HEADS, WIDTH, INNER, NODES = 2, 4, 8, 11
CALLS = 3  # the first, the recorded one, and one that is played

layers = import_module("stretto.ops.attention_layer")


@pytest.fixture
def graph(device, short_pieces):
    """With a hub that is cut into pieces."""
    Graph.cache_clear()
    generator = torch.Generator().manual_seed(3)
    pairs = torch.randint(0, NODES, (2, 40), generator=generator)
    pairs[1, :15] = 5
    return Graph.of(pairs.to(device), NODES)


def operands(form, device, seed=0):
    """x, bias and parameters, with other numbers and in other memory for every seed."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(device).requires_grad_()

    out = HEADS * WIDTH
    att, pair = draw(1, HEADS, WIDTH), [draw(out, INNER), draw(out)]
    parameters = {
        "gat": [pair[0], att, draw(1, HEADS, WIDTH)],
        "gatv2": [*pair, draw(out, INNER), None, att],
        "dot": [*pair, draw(out, INNER), draw(out), draw(out, INNER), None, draw(out, INNER), draw(out)],
    }
    return draw(NODES, INNER), None if form == "dot" else draw(out), parameters[form]


def plain(graph, form, module, x, bias, parameters, dropout=0.0):
    """The layer from ops that are tested elsewhere, and the leaves it was made of, in double precision."""
    double = [None if t is None else t.detach().double().requires_grad_() for t in (x, bias, *parameters)]
    layer = module.attention_layer.Layer(form, HEADS, WIDTH, 0.2, 0.5, dropout)
    torch.manual_seed(1)
    seed = torch.randint(2**63 - 1, (1,), device=x.device) if dropout else None
    return layers.plainly(graph, layer, seed, double[0], double[1], double[2:]), [t for t in double if t is not None]


def whole(graph, form, module, x, bias, parameters, dropout=0.0):
    """The same as one step."""
    torch.manual_seed(1)
    with kernels.forced(module):
        out = layers.attention_layer(graph, form, HEADS, x, bias, tuple(parameters), scale=0.5, dropout=dropout)
    return out, [t for t in (x, bias, *parameters) if t is not None]


def gradients(module, out, leaves, **options):
    weight = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype)
    with kernels.forced(module):
        return torch.autograd.grad(out, leaves, weight, **options)


def wanted(out, leaves):
    weight = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype)
    return torch.autograd.grad(out, leaves, weight)


def close(got, expected, limit=1e-4):
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=limit, atol=limit)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("form", FORMS)
def test_first_recorded_and_played_calls_agree_with_plain_ops(form, dropout, graph, device, triton_kernels):
    for call in range(CALLS):
        given = operands(form, device, call)
        reference, reference_leaves = plain(graph, form, triton_kernels, *given, dropout)
        out, leaves = whole(graph, form, triton_kernels, *given, dropout)
        close([out], [reference])
        close(gradients(triton_kernels, out, leaves), wanted(reference, reference_leaves))
    assert [type(t).__name__ for t in graph.edge_csr.cache["tapes"].values()] == ["Tape", "Tape"]


@pytest.mark.parametrize("inner", [8, pytest.param(300, marks=pytest.mark.slow)])  # a minute under the interpreter
@pytest.mark.parametrize("heads", [2, 3])
def test_an_input_that_needs_no_gradient(inner, heads, graph, device, triton_kernels):
    """gat: its scores' share of the weight's gradient comes from sums over x (two tiles of columns here)."""
    generator = torch.Generator().manual_seed(4)
    shapes = ((heads * 40, inner), (1, heads, 40), (1, heads, 40), (heads * 40,), (NODES, inner))
    *leaves, x = (torch.randn(*shape, generator=generator).mul(0.3).to(device) for shape in shapes)
    for t in leaves:
        t.requires_grad_()
    double = [t.detach().double().requires_grad_() for t in leaves]
    *parameters, bias = double
    layer = triton_kernels.attention_layer.Layer("gat", heads, 40)
    expected = wanted(layers.plainly(graph, layer, None, x.double(), bias, parameters), double)
    *parameters, bias = leaves
    for _ in range(CALLS):
        with kernels.forced(triton_kernels):
            out = layers.attention_layer(graph, "gat", heads, x, bias, tuple(parameters))
        for one, other in zip(gradients(triton_kernels, out, leaves), expected, strict=True):
            assert (one.double() - other).norm() <= 1e-4 * other.norm()


@pytest.mark.parametrize("form", FORMS)
def test_a_step_that_is_kept_gives_its_gradients_again(form, graph, device, triton_kernels):
    for call in range(CALLS):
        given = operands(form, device, call)
        expected = wanted(*plain(graph, form, triton_kernels, *given))
        out, leaves = whole(graph, form, triton_kernels, *given)
        first = gradients(triton_kernels, out, leaves, retain_graph=True)
        again = gradients(triton_kernels, out, leaves)  # the last may overwrite what forward kept
        close(first, expected)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_results_may_be_edited_in_place(form, graph, device, triton_kernels):
    given = operands(form, device)
    reference, reference_leaves = plain(graph, form, triton_kernels, *given)
    out, leaves = whole(graph, form, triton_kernels, *given)
    close(gradients(triton_kernels, out.relu_(), leaves), wanted(reference.relu(), reference_leaves))


@pytest.mark.parametrize("form", FORMS)
def test_second_derivatives(form, graph, device, triton_kernels):
    given = operands(form, device)
    found = []
    for make in (plain, whole):
        out, leaves = make(graph, form, triton_kernels, *given)
        with kernels.forced(triton_kernels) if make is whole else nullcontext():
            (dx,) = torch.autograd.grad(out.sin().sum(), leaves[:1], create_graph=True)
            found.append(torch.autograd.grad(dx.sin().sum(), leaves))
    close(*found, limit=1e-3)


def test_only_some_gradients_are_wanted(graph, device, triton_kernels):
    for form in FORMS:
        x, bias, parameters = operands(form, device)
        expected = wanted(*plain(graph, form, triton_kernels, x, bias, parameters))[-1]
        for t in (x, *parameters[:-1]):
            if t is not None:
                t.requires_grad_(False)
        out, leaves = whole(graph, form, triton_kernels, x, bias, parameters)
        close(gradients(triton_kernels, out, leaves[-1:]), [expected])


def test_backward_frees_what_was_kept(graph, device, triton_kernels):
    out, leaves = whole(graph, "gat", triton_kernels, *operands("gat", device))
    gradients(triton_kernels, out, leaves, retain_graph=True)
    assert out.grad_fn.kept is not None
    gradients(triton_kernels, out, leaves)
    assert out.grad_fn.kept is None
    with pytest.raises(RuntimeError, match="second time"):
        gradients(triton_kernels, out, leaves)


def test_what_is_not_made_for_it_is_not_taken(graph, device, triton_kernels):
    x, bias, parameters = operands("gat", device)
    x = x.detach()
    with kernels.forced(triton_kernels):
        assert layers.takes(graph, x, WIDTH, bias, *parameters)
        assert not layers.takes(graph, x.double(), WIDTH, bias, *parameters)
        assert not layers.takes(graph, x, 6, bias, *parameters)  # no loads of 16 bytes
        assert not layers.takes(graph, x[:, :6], WIDTH)
        assert not layers.takes(graph, x.t().contiguous().t(), WIDTH)
        assert not layers.takes(graph, x, WIDTH, bias.double())
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            assert not layers.takes(graph, x, WIDTH, bias, *parameters)
    assert device == "cuda" or not layers.takes(graph, x, WIDTH, bias, *parameters)


@pytest.mark.parametrize("conv", ["GATConv", "GATv2Conv"])
@pytest.mark.parametrize("bias", [0.01, 1e4])
def test_a_large_bias_costs_no_digits(conv, bias, graph, device, triton_kernels, monkeypatch):
    """As one step while the bias is small; beyond the values it is added afterwards."""
    monkeypatch.setenv("STRETTO_TUNE", "off")  # an interpreter's rates are not worth the minutes they take
    monkeypatch.setattr(
        import_module("stretto.layers.adjacency"), "PASSING_EDGEWISE", 0
    )  # a card leaves small batches to stock
    torch.manual_seed(0)
    stock = getattr(pyg, conv)(INNER, WIDTH, heads=HEADS).to(device)
    torch.nn.init.constant_(stock.bias, bias)
    fast, exact = accelerate(copy.deepcopy(stock)), copy.deepcopy(stock).double()
    x = torch.randn(NODES, INNER, device=device)
    cotangent = torch.randn(NODES, HEADS * WIDTH, device=device)

    def gradients(layer, dtype):
        leaf = x.detach().to(dtype).requires_grad_()
        out = layer(leaf, graph.edge_index)
        return torch.autograd.grad(out, [leaf, *layer.parameters()], cotangent.to(dtype))

    with kernels.forced(triton_kernels):
        found = gradients(fast, torch.float32)
    assert record_of(fast).path == "fast", record_of(fast).reason
    assert ("one step" in record_of(fast).plan) == (bias < 1)
    for mine, true in zip(found, gradients(exact, torch.float64), strict=True):
        torch.testing.assert_close(mine.double(), true, rtol=1e-4, atol=2e-5)
