"""Nothing that was made of a tensor outlives a change of it: layers x ways to change a tensor, against stock in fp64.

Every layer that keeps something of an edge weight or of x evaluates, is changed, evaluates again, several times over:
what changes twice between two looks may end up where it was.
"""

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch.nn import Parameter
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import stretto
from stretto.compile import HOIST
from stretto.kernels import looks
from stretto.layers import record_of

N, EDGES = 60, 20_000  # from 2^14 edges on weights are brought into the order of the rows
LAYERS = {
    "GCN": lambda: pyg.GCNConv(6, 3),
    "GCN unnormalised": lambda: pyg.GCNConv(6, 3, normalize=False),
    "GraphConv": lambda: pyg.GraphConv(6, 3),
    "TAG": lambda: pyg.TAGConv(6, 3),
    "Cheb 2": lambda: pyg.ChebConv(6, 3, K=2),
    "Cheb 5": lambda: pyg.ChebConv(6, 3, K=5),
    "ARMA": lambda: pyg.ARMAConv(6, 3, num_stacks=2, num_layers=2),
    "APPNP": lambda: pyg.APPNP(3, 0.2),
    "LG": lambda: pyg.LGConv(),
    "SG": lambda: pyg.SGConv(6, 3, K=2),
    "SSG": lambda: pyg.SSGConv(6, 3, alpha=0.1, K=3),
    "GCN2": lambda: _WithItself(pyg.GCN2Conv(6, 0.3)),
}


class _WithItself(torch.nn.Module):
    """GCN2Conv with x as its own x_0."""

    def __init__(self, conv):
        super().__init__()
        self.conv = conv

    def forward(self, x, *rest):
        return self.conv(x, x, *rest)


def conv_of(layer):
    return layer.conv if isinstance(layer, _WithItself) else layer


@pytest.fixture(autouse=True)
def _fresh(fresh_memo):
    stretto.forget()
    yield
    stretto.forget()


def fused(kind, **options):
    def change(t):
        was = t.requires_grad
        t.requires_grad_()
        optimizer = kind([t], fused=True, **options)
        version = t._version
        t.grad = torch.ones_like(t)
        optimizer.step()
        assert t._version == version, "a fused optimizer that raises the version tests nothing"
        if not was:
            t.requires_grad_(False)

    return change


def as_vector(t):
    """As L-BFGS of SciPy and line searches write parameters."""
    vector_to_parameters(parameters_to_vector([t]).detach() * 1.25, [t])


def through_half(t):
    """As model.half().double() does: another storage each time, the second maybe where the first was."""
    t.data = t.data.half()
    t.data = t.data.double() + 0.125


def twice_replaced(t):
    for factor in (3.0, 0.5):
        t.data = t.data * factor


def swapped(t):
    kind = Parameter if type(t) is Parameter else torch.Tensor.clone
    torch.utils.swap_tensors(t, kind(t.detach() * 0.75))


def assigned(t):
    with torch.no_grad():
        t.mul_(1.1)


CHANGES = {
    "fused Adam": fused(torch.optim.Adam, lr=0.1),
    "fused SGD": fused(torch.optim.SGD, lr=0.1),
    "fused Adagrad": fused(torch.optim.Adagrad, lr=0.1),
    "vector_to_parameters": as_vector,
    "half and back": through_half,
    "replaced twice": twice_replaced,
    "swap_tensors": swapped,
    "in place": assigned,
    "set_": lambda t: t.set_(t * 1.5),
}
KINDS = {
    "Parameter": lambda t: Parameter(t),
    "frozen Parameter": lambda t: Parameter(t, requires_grad=False),
    "leaf": lambda t: t.requires_grad_(),
    "constant": lambda t: t,
}
# torch swaps no tensors that are referred to weakly, as constants are, and sets no storage of what requires a gradient.
CASES = [
    (kind, change)
    for kind in KINDS
    for change in CHANGES
    if not (change == "swap_tensors" and "Parameter" not in kind)
    and not (change == "set_" and kind in ("leaf", "Parameter"))
]


def _case(name):
    torch.manual_seed(0)
    stock = LAYERS[name]().double()
    x = torch.randn(N, 6, dtype=torch.float64)
    edge_index = torch.randint(N, (2, EDGES))
    weight = torch.rand(EDGES, dtype=torch.float64) + 0.5
    return stock, stretto.accelerate(copy.deepcopy(stock)), x, edge_index, weight


def _same(fast, stock, *inputs):
    """Evaluated under no_grad, in inference mode and trained."""
    with torch.no_grad():
        torch.testing.assert_close(fast(*inputs), stock(*inputs), rtol=1e-9, atol=1e-9)
    with torch.inference_mode():
        torch.testing.assert_close(fast(*inputs), stock(*inputs), rtol=1e-9, atol=1e-9)
    wanted = [t for t in inputs if t.requires_grad]
    results = []
    for layer in (fast, stock):
        leaves = [*layer.parameters(), *wanted]
        out = layer(*inputs)
        results.append(torch.autograd.grad(out.square().sum(), leaves, allow_unused=True) if leaves else ())
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("kind", "change"), CASES)
@pytest.mark.parametrize("name", LAYERS)
def test_an_edge_weight_that_changed_is_read_anew(name, kind, change):
    stock, fast, x, edge_index, weight = _case(name)
    weight = KINDS[kind](weight)
    for _ in range(3):
        for _ in range(2):  # what is kept is kept from the second call on
            _same(fast, stock, x, edge_index, weight)
        CHANGES[change](weight)
        torch.testing.assert_close(fast(x, edge_index, weight), stock(x, edge_index, weight), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("kind", "change"), CASES)
@pytest.mark.parametrize("name", LAYERS)
def test_an_x_that_changed_is_read_anew(name, kind, change):
    stock, fast, x, edge_index, _ = _case(name)
    x = KINDS[kind](x)
    for _ in range(3):
        for _ in range(2):
            _same(fast, stock, x, edge_index)
        CHANGES[change](x)
        torch.testing.assert_close(fast(x, edge_index), stock(x, edge_index), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", LAYERS)
def test_a_constant_that_was_trained_meanwhile_is_no_constant(name):
    """Kept while it was frozen; trained by a fused optimizer, with its gradients dropped; frozen again."""
    stock, fast, x, edge_index, weight = _case(name)
    for _ in range(3):
        _same(fast, stock, x, edge_index)
        _same(fast, stock, x, edge_index, weight)
    for t in (x, weight):
        t.requires_grad_()
    optimizer = torch.optim.Adam([x, weight], lr=0.1, fused=True)
    for layer in (fast, stock):
        layer(x, edge_index, weight).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    for t in (x, weight):
        t.requires_grad_(False)
    for _ in range(3):
        _same(fast, stock, x, edge_index)
        _same(fast, stock, x, edge_index, weight)


@pytest.mark.parametrize("view", [lambda t: t[:], lambda t: t.view(-1)])
def test_a_view_of_what_is_trained_is_trained(view):
    """Also a view that is held while a fused optimizer writes what it looks at."""
    for kind in ("Parameter", "frozen Parameter", "leaf"):
        weight = KINDS[kind](torch.rand(9))
        with torch.no_grad():
            assert looks.settled(view(weight)) is None


def test_a_look_tells_storages_apart_at_the_same_place():
    """Ten thousand storages, made and freed: none equals one before it, wherever it lies."""
    t, known, addresses = torch.rand(64), set(), set()
    for _ in range(10_000):
        t.data = torch.rand(64)
        found = looks.look(t)
        assert found is not None
        assert found not in known
        known = {found}
        addresses.add(t.data_ptr())
    assert len(addresses) < 10_000


def test_nothing_refers_to_a_parameter():
    """torch refuses to swap what is referred to weakly, as module conversions may."""
    stock, fast, x, edge_index, weight = _case("GCN")
    x, weight = Parameter(x), Parameter(weight)
    for _ in range(3):
        _same(fast, stock, x, edge_index, weight)
    for t in (x, weight):
        torch.utils.swap_tensors(t, Parameter(t.detach() * 2))
    _same(fast, stock, x, edge_index, weight)


def test_what_stays_the_same_is_kept():
    """The other side: constants are hoisted, and a constant weight is normalised and sorted once."""
    _, fast, x, edge_index, weight = _case("SSG")
    for _ in range(3):
        fast(x, edge_index, weight)
    assert "kept" in record_of(fast).plan
    assert HOIST.nbytes() == x.nbytes
    _, fast, x, edge_index, weight = _case("GCN")
    _, once = _kept_of(fast, x, edge_index, weight)
    for _ in range(3):
        graph, again = _kept_of(fast, x, edge_index, weight)
        assert again is once
    del weight
    assert not [key for key, kept in graph._derived.items() if key[0] == "gcn_norm" and kept[2]]  # gone with the weight
    assert not graph.with_self_loops.csr.cache.get("weight", (None, None, None))[2]


def _kept_of(conv, x, edge_index, weight):
    """The graph, and the normalised weight that is kept on it."""
    conv(x, edge_index, weight)
    graph = stretto.Graph.of(edge_index, N)
    (known,) = [found for key, found in graph._derived.items() if key[0] == "gcn_norm"]
    return graph, known[2][0][1]
