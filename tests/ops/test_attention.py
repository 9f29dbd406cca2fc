"""attention beside plain PyTorch: every form and option, cut rows, extreme scores, dropout, determinism, tracing."""

import pytest
import torch
from torch_geometric.utils import softmax

from stretto import Graph, StrettoError, ops
from stretto.kernels import native, reference_attention
from stretto.kernels.attention import TENSORS, Attention
from stretto.ops.attention import attention, cosine_attention
from stretto.ops.replay import mixed
from tests.graphs import graph_of, random_edges

FORMS = ("gat", "gatv2", "dot", "given", "weight")


def inputs(graph, form, *, heads=3, width=19, k=21, d=5, edge=True, shared=False, dtype=torch.float64):
    n, m, e = graph.num_rows, graph.num_cols, graph.num_edges

    def values(*shape):
        return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()

    found = {"v": values(m, 1 if shared else heads, width)}
    if form == "gat":
        found.update(left=values(n, heads), right=values(m, heads))
        found.update({"edge": values(e, heads)} if edge else {})
    elif form == "gatv2":
        found.update(left=values(n, heads, k), right=values(m, heads, k), att=values(heads, k))
        found.update({"edge": values(e, heads, k)} if edge else {})
    elif form == "dot":
        found.update(left=values(n, heads, k), right=values(m, 1 if shared else heads, k))
        found.update({"attr": values(e, d), "query": values(n, heads, d)} if edge else {})
    else:
        found["edge"] = values(e, heads)
    return found


def call(graph, form, given, **options):
    positional = {name: given.get(name) for name in ("v", "left", "right", "edge")}
    named = {name: given[name] for name in ("att", "attr", "query") if name in given}
    results = attention(graph, *positional.values(), form=form, **named, **options)
    return results if isinstance(results, tuple) else (results,)


def expected(graph, form, given, *, dropout=0.0, seed=0, dropped=False, scale=0.3):
    a = Attention(
        form, **{n: given.get(n) for n in TENSORS}, scale=scale, dropout=dropout, seed=mixed(seed), dropped=dropped
    )
    out, out_attr, alpha = reference_attention.differentiable(graph.edge_csr, a)
    return tuple(r for r in (out, out_attr, alpha) if r is not None)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("edge", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["hub", "wide", "isolated"])
def test_all_results_and_gradients(name, form, edge, dropout):
    graph = graph_of(name)
    if name == "hub":
        assert graph.csr.num_slots > 0
        assert graph.T.csr.num_slots > 0
    for shared in (False, True) if form != "gatv2" else (False,):
        given = inputs(graph, form, edge=edge, shared=shared)
        options = {"dropout": dropout, "seed": 12345678901234, "dropped": shared, "scale": 0.3}
        ours = call(graph, form, given, return_weights=True, **options)
        truth = expected(graph, form, given, **options)
        cotangents = [torch.randn_like(r) for r in truth]
        leaves = list(given.values())
        found = torch.autograd.grad(ours, leaves, cotangents)
        wanted = torch.autograd.grad(truth, leaves, cotangents)
        for a, b in zip((*ours, *found), (*truth, *wanted), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("needed", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["hub", "wide", "isolated", "empty"])
def test_a_bias_on_the_way(name, form, needed):
    graph = graph_of(name)
    torch.manual_seed(3)
    given = inputs(graph, form)
    bias = torch.randn(3 * 19, dtype=torch.float64, requires_grad=needed)
    leaves = [*given.values(), *([bias] if needed else [])]
    want = expected(graph, form, given)[:-1]
    want = (want[0].flatten(1) + bias, *want[1:])
    got = call(graph, form, given, scale=0.3, bias=bias)
    flows = [torch.randn_like(w) for w in want]
    found = torch.autograd.grad(got, leaves, flows)
    wanted = torch.autograd.grad(want, leaves, flows)
    for a, b in zip((*got, *found), (*want, *wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_the_result_with_a_bias_may_be_overwritten():
    graph = graph_of("hub")
    given = inputs(graph, "gat")
    bias = torch.randn(3 * 19, dtype=torch.float64, requires_grad=True)
    leaves = [*given.values(), bias]
    (got,) = call(graph, "gat", given, bias=bias)
    got.relu_()
    want = (expected(graph, "gat", given)[0].flatten(1) + bias).relu()
    torch.testing.assert_close(got, want)
    for _ in range(2):
        found = torch.autograd.grad(got.square().sum(), leaves, retain_graph=True)
        wanted = torch.autograd.grad(want.square().sum(), leaves, retain_graph=True)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b)


def test_a_bias_differentiated_twice_and_under_hooks():
    graph = graph_of("wide")
    given = inputs(graph, "gat", heads=2, width=3, edge=False)
    leaves = (given["v"], given["left"], given["right"], torch.randn(6, dtype=torch.float64, requires_grad=True))

    def out(v, left, right, bias):
        return attention(graph, v, left, right, bias=bias)

    assert torch.autograd.gradcheck(out, leaves)
    assert torch.autograd.gradgradcheck(out, leaves)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        hooked = out(*leaves)
    found, wanted = (torch.autograd.grad(r.sum(), leaves) for r in (hooked, out(*leaves)))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("isa", native.isas() or ["none"])
@pytest.mark.parametrize("form", FORMS)
def test_every_instruction_set(form, isa, needs_native):
    native.set_isa(isa)
    graph = graph_of("hub")
    for dtype, tolerance in (
        (torch.float64, 1e-9),
        (torch.float32, 2e-3),
        (torch.bfloat16, 0.1),
        (torch.float16, 0.02),
    ):
        given = inputs(graph, form, heads=2, width=35, k=33, dtype=dtype)
        truth = expected(graph, form, {k: t.detach().double() for k, t in given.items()})
        ours = call(graph, form, given, return_weights=True, scale=0.3)
        for a, b in zip(ours, truth, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("form", FORMS)
def test_bits_do_not_depend_on_threads(form):
    graph = graph_of("hub")
    given = inputs(graph, form, dtype=torch.float32)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        out = call(graph, form, given, dropout=0.2, seed=5, return_weights=True)
        results.append([*out, *torch.autograd.grad([r.sum() for r in out], list(given.values()))])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["1e4", "-1e4", "some -inf", "all -inf", "nan", "+inf", "first block -inf"])
def test_extreme_scores_as_stock(kind, dtype):
    edge_index = torch.stack([torch.arange(100) % 10, torch.arange(100) // 50])
    graph = Graph.of(edge_index, (10, 3))
    score = torch.randn(100, 2, dtype=dtype)
    if kind in ("1e4", "-1e4"):
        score = score * 10 + float(kind)
    elif kind == "all -inf":
        score[:50] = -torch.inf
    elif kind == "first block -inf":
        score[:40] = -torch.inf
    else:
        score[[3, 60], [0, 1]] = {"some -inf": -torch.inf, "nan": torch.nan, "+inf": torch.inf}[kind]
    ours, theirs = score.clone().requires_grad_(), score.clone().requires_grad_()
    v = torch.randn(10, 2, 5, dtype=dtype)
    out, alpha = attention(graph, v, None, None, ours, form="given", return_weights=True)
    stock = softmax(theirs, edge_index[1], num_nodes=3)
    wanted = torch.zeros(3, 2, 5, dtype=dtype).index_add(0, edge_index[1], stock.unsqueeze(2) * v[edge_index[0]])
    tolerance = {"rtol": 2e-5, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-10}
    torch.testing.assert_close(alpha, stock, equal_nan=True, **tolerance)
    torch.testing.assert_close(out, wanted, equal_nan=True, **tolerance)
    out.sum().backward()
    wanted.sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, equal_nan=True, rtol=1e-4, atol=1e-5)


def test_exponential_is_accurate(needs_native):
    """Two edges with scores 0 and s: the odds are exp(s), to a few units in the last place."""
    s = torch.cat([-torch.rand(4000) * 87, -torch.rand(4000)])
    n = s.numel()
    edge_index = torch.stack([torch.zeros(2 * n, dtype=torch.long), torch.arange(n).repeat_interleave(2)])
    score = torch.stack([torch.zeros(n), s], 1).reshape(-1, 1)
    graph = Graph.of(edge_index, (1, n))
    _, alpha = attention(graph, torch.ones(1, 1, 1), None, None, score, form="given", return_weights=True)
    low, high = alpha.view(n, 2).double().unbind(1)[::-1]
    truth = s.double().exp()
    assert ((low / high - truth).abs() / truth).max() < 4 * torch.finfo(torch.float32).eps


def test_dropout_is_a_function_of_its_seed():
    graph = graph_of("hub")
    score, v = torch.randn(graph.num_edges, 4), torch.ones(graph.num_cols, 4, 1)

    def weights(**options):
        return attention(
            graph, v, None, None, score, form="given", return_weights=True, dropped=True, dropout=0.3, **options
        )[1]

    assert torch.equal(weights(seed=3), weights(seed=3))
    assert torch.equal(weights(seed=2**64 - 1), weights(seed=torch.tensor(-1)))  # the same bits
    kept = (weights(seed=3) != 0).double()
    assert abs(kept.mean() - 0.7) < 4 * (0.21 / kept.numel()) ** 0.5
    assert abs(torch.corrcoef((weights(seed=4) != 0).double().t() - kept.t())[0, 1]) < 0.05
    agree = ((weights(seed=4) != 0).double() == kept).double().mean()
    assert abs(agree - (0.7**2 + 0.3**2)) < 0.01
    columns = torch.corrcoef(kept.t())
    assert (columns - torch.eye(4, dtype=torch.float64)).abs().max() < 0.05
    neighbours = torch.corrcoef(torch.stack([kept[1:, 0], kept[:-1, 0]]))
    assert abs(neighbours[0, 1]) < 0.05
    torch.manual_seed(1)
    first = weights()
    second = weights()
    torch.manual_seed(1)
    assert torch.equal(first, weights())
    assert not torch.equal(first, second)
    dead = attention(graph, v, None, None, score, form="given", dropout=1.0)
    assert not dead.any()


def test_cosine():
    graph = graph_of("unsorted")
    x = torch.randn(12, 7, dtype=torch.float64, requires_grad=True)
    beta = torch.tensor([1.3], dtype=torch.float64, requires_grad=True)
    source, target = graph.edge_index
    unit = torch.nn.functional.normalize(x, dim=-1)
    alpha = softmax(beta * (unit[source] * unit[target]).sum(-1), target, num_nodes=12)
    wanted = torch.zeros(12, 7, dtype=torch.float64).index_add(0, target, alpha.unsqueeze(1) * x[source])
    ours = cosine_attention(graph, x, beta)
    torch.testing.assert_close(ours, wanted)
    cotangent = torch.randn_like(ours)
    for a, b in zip(
        torch.autograd.grad(ours, (x, beta), cotangent), torch.autograd.grad(wanted, (x, beta), cotangent), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_rows_with_strides():
    """Slices of one wide product are read in place."""
    graph = graph_of("unsorted")
    wide = torch.randn(12, 3 * 8, dtype=torch.float64)
    q, k, v = (part.reshape(12, 2, 4) for part in wide.split(8, 1))
    strided = attention(graph, *(wide[:, i : i + 8].view(12, 2, 4) for i in (16, 0, 8)), form="dot")
    torch.testing.assert_close(strided, attention(graph, v, q, k, form="dot"), rtol=0, atol=0)


@pytest.mark.parametrize("backwards", [False, True], ids=["row", "column"])
@pytest.mark.parametrize("form", FORMS)
def test_a_hundred_thousand_edges_in_one_row(form, backwards):
    """In fp32: results and gradients, the long row among destinations and among sources."""
    many = torch.randint(500, (100_000,))
    pairs = torch.stack([many, torch.zeros_like(many)])
    graph = Graph.of(pairs.flip(0) if backwards else pairs, (3, 500) if backwards else (500, 3))
    given = inputs(graph, form, heads=2, width=4, k=3, dtype=torch.float32)
    wide = {name: t.detach().double().requires_grad_() for name, t in given.items()}
    ours, truth = call(graph, form, given, scale=0.3), expected(graph, form, wide)
    cotangents = [torch.randn_like(r) for r in ours]
    found = torch.autograd.grad(ours, list(given.values()), cotangents)
    wanted = torch.autograd.grad(truth[: len(ours)], list(wide.values()), [c.double() for c in cotangents])
    for a, b in zip((*ours, *found), (*truth[: len(ours)], *wanted), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5 * max(1.0, float(b.detach().abs().max())))


@pytest.mark.parametrize("form", FORMS)
def test_opcheck(form):
    graph = Graph.of(random_edges(9, 7, 30, 1), (9, 7))
    given = inputs(graph, form, heads=2, width=4, k=3, d=2, dtype=torch.float32)
    seed = torch.tensor([3])
    tensors = tuple(given.get(name) for name in TENSORS)
    over, options = (graph.handle, 7, 9, 30), (form, 0.2, 0.5, 0.25, True, False)
    arguments = (*over, *tensors, seed, *options)
    torch.library.opcheck(torch.ops.stretto.attention.default, arguments)
    results = torch.ops.stretto.attention(*arguments)
    detached = tuple(None if t is None else t.detach() for t in tensors)
    grads = (torch.randn_like(results[0]), torch.randn_like(results[1]), torch.randn_like(results[2]))
    plain = [r.detach() for r in results]
    needs = [*(t is not None for t in tensors), False]
    backward = (*over, [*detached, seed, *plain], list(grads), needs, *options)
    torch.library.opcheck(torch.ops.stretto.attention_grad.default, backward)


def test_compiles():
    graph = graph_of("unsorted")
    given = inputs(graph, "gat", dtype=torch.float32)

    def step(v, left, right, edge):
        return attention(graph, v, left, right, edge).relu()

    eager = step(**given)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)(**given)
    torch.testing.assert_close(compiled, eager)
    leaves = list(given.values())
    for a, b in zip(torch.autograd.grad(compiled.sum(), leaves), torch.autograd.grad(eager.sum(), leaves), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"form": "gaat"}, "'form' is 'gaat', wanted one of"),
        ({"left": torch.randn(5, 2)}, r"'left' has shape \[5, 2\], wanted \[12, 2\]"),
        ({"right": None}, "form 'gat' wants 'right'"),
        ({"v": torch.randn(12, 4)}, "'v' is of shape"),
        ({"v": torch.randn(12, 3, 4)}, "'v' has 3 heads, wanted 2"),
        ({"dropout": 1.5}, "'dropout' is 1.5, wanted 0 to 1"),
        ({"dropout": 0.5, "seed": 3.5}, "'seed' is 3.5, wanted an integer of 64 bits"),
        ({"dropout": 0.5, "seed": 2**64}, "'seed' is 18446744073709551616, wanted an integer of 64 bits"),
        ({"att": torch.randn(2, 4)}, "form 'gat' takes no 'att'"),
    ],
)
def test_errors_name_the_argument(change, message):
    given = {"v": torch.randn(12, 2, 4), "left": torch.randn(12, 2), "right": torch.randn(12, 2), **change}
    with pytest.raises(StrettoError, match=message):
        ops.attention(graph_of("unsorted"), given.pop("v"), given.pop("left"), given.pop("right"), **given)
