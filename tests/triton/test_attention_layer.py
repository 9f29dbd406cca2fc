"""Whole attention layers as one step: against the same made of plain ops, played from a tape, and edited in place."""

from importlib import import_module

import pytest
import torch

from stretto import Graph

FORMS = ("gat", "gatv2", "dot")
HEADS, WIDTH, INNER = 2, 8, 12


@pytest.fixture
def layers(forced, short_pieces):
    return import_module("stretto.ops.attention_layer")


def graph_of(device, n=23, edges=90):
    Graph.cache_clear()
    generator = torch.Generator().manual_seed(3)
    pairs = torch.randint(0, n, (2, edges), generator=generator)
    pairs[1, : edges // 3] = 5  # a hub, cut into pieces
    return Graph.of(pairs.to(device), n)


def operands(form, device, n=23, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(device).requires_grad_()

    out = HEADS * WIDTH
    att = [draw(1, HEADS, WIDTH)]
    pair = [draw(out, INNER), draw(out)]
    parameters = {
        "gat": [pair[0], *att, draw(1, HEADS, WIDTH)],
        "gatv2": [*pair, draw(out, INNER), None, *att],
        "dot": [*pair, draw(out, INNER), draw(out), draw(out, INNER), None, draw(out, INNER), draw(out)],
    }
    return draw(n, INNER), None if form == "dot" else draw(out), parameters[form]


def results(layers, graph, form, operands, *, plain, times=1, dropout=0.0):
    x, bias, parameters = operands
    torch.manual_seed(1)
    if plain:
        module = layers.kernels.backend(x.device)
        layer = module.attention_layer.Layer(form, HEADS, WIDTH, 0.2, 0.5, dropout)
        seed = torch.randint(2**63 - 1, (1,), device=x.device) if dropout else None
        double = [None if t is None else t.detach().double().requires_grad_() for t in (x, bias, *parameters)]
        out = layers.plainly(graph, layer, seed, double[0], double[1], double[2:])
        leaves = [t for t in double if t is not None]
    else:
        out = layers.attention_layer(graph, form, HEADS, x, bias, tuple(parameters), scale=0.5, dropout=dropout)
        leaves = [t for t in (x, bias, *parameters) if t is not None]
    weight = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype)
    for k in range(times):
        grads = torch.autograd.grad(out, leaves, weight, retain_graph=k + 1 < times)
    return [out.detach(), *grads]


def close(got, wanted, limit=2e-4):
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=limit, atol=limit)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("form", FORMS)
def test_first_recorded_and_played_calls_agree_with_plain_ops(form, dropout, layers, device):
    graph = graph_of(device)
    for call in range(5):  # other numbers and other memory every time
        given = operands(form, device, seed=call)
        wanted = results(layers, graph, form, given, plain=True, dropout=dropout)
        close(results(layers, graph, form, given, plain=False, dropout=dropout), wanted)
    kinds = [type(t).__name__ for t in graph.edge_csr.cache["tapes"].values()]
    assert kinds == ["Tape", "Tape"]


@pytest.mark.parametrize("form", FORMS)
def test_a_graph_that_is_kept_gives_the_same_gradients_again(form, layers, device):
    graph = graph_of(device)
    for call in range(4):
        given = operands(form, device, seed=call)
        close(
            results(layers, graph, form, given, plain=False, times=3),
            results(layers, graph, form, given, plain=True),
        )


@pytest.mark.parametrize("form", FORMS)
def test_results_may_be_edited_in_place(form, layers, device):
    graph = graph_of(device)
    for call in range(4):
        x, bias, parameters = operands(form, device, seed=call)
        leaves = [t for t in (x, bias, *parameters) if t is not None]
        options = {"scale": 0.5}
        out = layers.attention_layer(graph, form, HEADS, x, bias, tuple(parameters), **options)
        wanted = torch.autograd.grad(out.relu().square().sum(), leaves)
        out = layers.attention_layer(graph, form, HEADS, x, bias, tuple(parameters), **options)
        close(torch.autograd.grad(out.relu_().square().sum(), leaves), wanted)


@pytest.mark.parametrize("form", FORMS)
def test_second_derivatives(form, layers, device):
    graph = graph_of(device)
    found = []
    for plain in (True, False):
        x, bias, parameters = operands(form, device)
        if plain:
            layer = layers.kernels.backend(x.device).attention_layer.Layer(form, HEADS, WIDTH, 0.2, 0.5)
            out = layers.plainly(graph, layer, None, x, bias, parameters)
        else:
            out = layers.attention_layer(graph, form, HEADS, x, bias, tuple(parameters), scale=0.5)
        (dx,) = torch.autograd.grad(out.square().sum(), [x], create_graph=True)
        found.append(torch.autograd.grad(dx.square().sum(), [x, parameters[0]]))
    close(*found, limit=1e-2)


def test_only_some_gradients_are_wanted(layers, device):
    graph = graph_of(device)
    for form in FORMS:
        for call in range(4):
            x, bias, parameters = operands(form, device, seed=call)
            wanted = results(layers, graph, form, (x, bias, parameters), plain=True)[-1]
            x.requires_grad_(False)
            for t in parameters[:-1]:
                if t is not None:
                    t.requires_grad_(False)
            out = layers.attention_layer(graph, form, HEADS, x, bias, tuple(parameters), scale=0.5)
            weight = torch.linspace(-1, 1, out.numel(), device=device).view(out.shape)
            close(torch.autograd.grad(out, [parameters[-1]], weight), [wanted])


def test_a_backward_pass_frees_what_was_kept(layers, device):
    x, bias, parameters = operands("dot", device)
    out = layers.attention_layer(graph_of(device), "dot", HEADS, x, bias, tuple(parameters))
    out.sum().backward(retain_graph=True)
    assert out.grad_fn.kept is not None
    out.sum().backward()
    assert out.grad_fn.kept is None
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()
