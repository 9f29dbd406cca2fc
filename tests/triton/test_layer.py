"""Whole layers of the compiler as tapes: against fp64 by hand, played with other tensors, and what is not taped."""

from importlib import import_module

import pytest
import torch
from torch.nn import functional as F

from stretto import Graph, kernels
from stretto.compile import Adjacency, Request, linear, plans
from stretto.compile.execute import Call
from stretto.compile.expr import leaves
from stretto.compile.layer import run
from stretto.layers import gcn, gin, sage

NODES, INNER, OUT, LAST = 11, 8, 12, 4
CALLS = 4  # the first, the recorded one, and two that are played
NAMES = ("gcn", "sage", "gin", "gin and more")

product = import_module("stretto.ops.product")


@pytest.fixture(autouse=True)
def _small_products_are_ours(monkeypatch):
    monkeypatch.setattr(product, "LEAST_ROWS", 1)
    monkeypatch.setattr(product, "LEAST_SUMS", (1, 1))
    monkeypatch.setenv("STRETTO_TUNE", "off")


@pytest.fixture
def graph(device, short_pieces):
    """With a hub that is cut into pieces."""
    Graph.cache_clear()
    generator = torch.Generator().manual_seed(3)
    pairs = torch.randint(0, NODES, (2, 40), generator=generator)
    pairs[1, :15] = 5
    return Graph.of(pairs.to(device), NODES)


def operands(name, device, seed=0, dtype=torch.float32):
    """Leaves of the layer by name, with other numbers and in other memory for every seed."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()

    found = {"X": draw(NODES, INNER), "W": draw(OUT, INNER), "bias": draw(OUT)}
    if name == "sage":
        found["V"] = draw(OUT, INNER)
    if name == "gin and more":
        found |= {"W1": draw(OUT, OUT), "b1": draw(OUT), "W2": draw(LAST, OUT)}
    return found


def adjacency(name, graph, dtype=torch.float32):
    scale = graph.mean_scale(torch.float64 if dtype == torch.float64 else torch.float32)
    return Adjacency(graph, None if name.startswith("gin") else scale, scale if name == "gcn" else None)


def layer(name, adj, given):
    """As nn/ hands it to the compiler."""
    expression = {"gcn": gcn.EXPRESSION, "sage": sage.WITH_OWN_ROOT}.get(name, gin.OWN_ROOT)
    tensors = {k: given[k] for k in ("X", "W", "V") if k in given}
    after = ((given["W1"], given["b1"]), (given["W2"], None)) if "W1" in given else ()
    return linear(expression, tensors, {"A": adj}, bias=given["bias"], scalars={"c": 1.5}, after=after)


def by_hand(name, adj, given):
    """The same with a dense matrix."""
    x = given["X"]
    csr = adj.graph.edge_csr
    dense = torch.zeros(NODES, NODES, dtype=x.dtype, device=x.device)
    dense.index_put_((csr.rows(), csr.columns()), torch.ones(csr.num_edges, dtype=x.dtype, device=x.device), True)
    if adj.weight is not None:
        dense = torch.zeros_like(dense)
        weight = adj.weight.to(x.dtype)[csr.edge_id.long()] if csr.edge_id is not None else adj.weight.to(x.dtype)
        dense.index_put_((csr.rows(), csr.columns()), weight, True)
    if adj.row_scale is not None:
        dense = dense * adj.row_scale.to(x.dtype)[:, None]
    if adj.col_scale is not None:
        dense = dense * adj.col_scale.to(x.dtype)
    out = dense @ x @ given["W"].t() + given["bias"]
    if name == "sage":
        out = out + x @ given["V"].t()
    if name.startswith("gin"):
        out = out + 1.5 * x @ given["W"].t()
    if "W1" in given:
        out = F.linear(F.linear(out.relu(), given["W1"], given["b1"]).relu(), given["W2"])
    return out


def wide(given):
    return {k: t.detach().double().requires_grad_(t.requires_grad) for k, t in given.items()}


def upstream(out):
    return torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype)


def check(name, adj, given, limit=1e-4):
    """Result and gradients against fp64."""
    double = wide(given)
    wanted = by_hand(name, adj, double)
    got = layer(name, adj, given)
    assert got.dtype == given["X"].dtype
    assert (got.double() - wanted).norm() <= limit * wanted.norm()
    wished = [k for k, t in given.items() if t.requires_grad]
    theirs = torch.autograd.grad(wanted, [double[k] for k in wished], upstream(wanted))
    ours = torch.autograd.grad(got, [given[k] for k in wished], upstream(got))
    for k, one, other in zip(wished, ours, theirs, strict=True):
        assert one.dtype == given[k].dtype
        assert (one.double() - other).norm() <= limit * other.norm(), k


def tapes(graph):
    """What is kept of every whole layer: a tape, or how often it was tried in vain."""
    kept = graph.csr.cache.get("tapes", {})
    return [type(t).__name__ if not isinstance(t, int) else t for k, t in kept.items() if k[0][0] in WHOLE]


WHOLE = ("forward", "backward")


@pytest.mark.parametrize("name", NAMES)
def test_first_recorded_and_played_calls_agree_with_fp64(name, graph, device, forced):
    for call in range(CALLS):
        check(name, adjacency(name, graph), operands(name, device, call))
    assert tapes(graph) == ["Tape", "Tape"]


PLANS = {
    "gcn": gcn.EXPRESSION,
    "sage": sage.WITH_OWN_ROOT,
    "gin": gin.OWN_ROOT,
}


@pytest.mark.parametrize("name", ["gcn", "sage", pytest.param("gin", marks=pytest.mark.slow)])  # many plans
def test_every_plan_is_taped(name, graph, device, forced):
    expression = PLANS[name]
    names = tuple(leaves(expression))
    adj = adjacency(name, graph)
    found = plans(Request(expression, names))
    for plan in found:
        for call in range(3):
            given = operands(name, device, call)
            double = wide(given)
            tensors = (*(given[k] for k in names), given["bias"])
            got = run(Call(plan, (*names, "bias"), {"A": adj}, {"c": 1.5}), tensors)
            wanted = by_hand(name, adj, double)
            assert (got.double() - wanted).norm() <= 1e-4 * wanted.norm(), plan.name
            ours = torch.autograd.grad(got, tensors, upstream(got))
            theirs = torch.autograd.grad(wanted, [double[k] for k in (*names, "bias")], upstream(wanted))
            for one, other in zip(ours, theirs, strict=True):
                assert (one.double() - other).norm() <= 1e-4 * other.norm(), plan.name
    assert tapes(graph) == ["Tape"] * 2 * len(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_are_taped_with_torch_s_products(dtype, graph, device, forced):
    limit = {torch.bfloat16: 3e-2, torch.float16: 3e-3, torch.float64: 1e-9}[dtype]
    for call in range(CALLS):
        check("sage", adjacency("sage", graph, dtype), operands("sage", device, call, dtype), limit)
    assert tapes(graph) == ["Tape", "Tape"]


def test_weights_of_edges_may_change_from_call_to_call(graph, device, forced):
    for call in range(CALLS):
        weight = torch.rand(graph.num_edges, generator=torch.Generator().manual_seed(call)).to(device)
        check("gcn", Adjacency(graph, weight=weight), operands("gcn", device, call))
    assert tapes(graph) == ["Tape", "Tape"]


def test_a_constant_input_s_product_is_kept_and_read(graph, device, forced):
    """A X is made once; the tape reads it."""
    x = operands("gin", device)["X"].detach()
    for call in range(6):
        given = operands("gin and more", device, call) | {"X": x}
        check("gin and more", adjacency("gin", graph), given)
    assert "Tape" in tapes(graph)


@pytest.mark.parametrize("frozen", [("X",), ("W",), ("bias",), ("W1", "b1"), ("X", "W", "bias"), ("b1",), ("W2",)])
def test_only_some_gradients_are_wanted(frozen, graph, device, forced):
    for call in range(CALLS):
        given = operands("gin and more", device, call)
        for k in frozen:
            given[k].requires_grad_(False)
        check("gin and more", adjacency("gin", graph), given)


def test_other_shapes_and_scalars_are_other_tapes(graph, device, forced):
    adj = adjacency("gin", graph)
    for call in range(CALLS):
        given = operands("gin", device, call)
        check("gin", adj, given)
        small = {"X": given["X"].detach()[:, :4].contiguous().requires_grad_()}
        small |= {"W": given["W"].detach()[:, :4].contiguous().requires_grad_(), "bias": given["bias"]}
        check("gin", adj, small)
        tensors = {"X": given["X"], "W": given["W"]}
        one, other = (linear(gin.OWN_ROOT, tensors, {"A": adj}, scalars={"c": c}) for c in (1.0, 3.0))
        torch.testing.assert_close(other - one, 2 * given["X"] @ given["W"].t(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_second_derivatives(name, graph, device, forced):
    adj = adjacency(name, graph)
    for call in range(2):
        given = operands(name, device, call)
        double = wide(given)
        found = []
        for make, tensors in ((by_hand, double), (layer, given)):
            out = (make(name, adj, tensors) / 100).sin().sum()
            (dx,) = torch.autograd.grad(out, [tensors["X"]], create_graph=True)
            found.append(torch.autograd.grad(dx.sin().sum(), [tensors["X"], tensors["W"]]))
        for one, other in zip(*found, strict=True):
            assert (one - other.double()).norm() <= 1e-3 * one.norm()


def test_gradients_that_are_no_plain_matrix(graph, device, forced):
    """Of a sum: one number for all; of a transpose: lying across."""
    adj = adjacency("gin", graph)
    for call in range(CALLS):
        given = operands("gin and more", device, call)
        double = wide(given)
        for through in (lambda out: out.sum(), lambda out: (out.t() * torch.arange(NODES, device=device)).sum()):
            one = torch.autograd.grad(through(layer("gin and more", adj, given)), list(given.values()))
            other = torch.autograd.grad(through(by_hand("gin and more", adj, double)), list(double.values()))
            for a, b in zip(one, other, strict=True):
                assert (a - b).norm() <= 1e-4 * b.norm()


def test_a_graph_that_is_kept_gives_its_gradients_again(graph, device, forced):
    for call in range(CALLS):
        given = operands("gin and more", device, call)
        out = layer("gin and more", adjacency("gin", graph), given)
        first = torch.autograd.grad(out, list(given.values()), upstream(out), retain_graph=True)
        again = torch.autograd.grad(out, list(given.values()), upstream(out))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_results_may_be_edited_in_place(graph, device, forced):
    for call in range(CALLS):
        given = operands("sage", device, call)
        double = wide(given)
        adj = adjacency("sage", graph)
        one = layer("sage", adj, given).relu_()
        other = by_hand("sage", adj, double).relu()
        for a, b in zip(
            torch.autograd.grad(one.sum(), list(given.values())),
            torch.autograd.grad(other.sum(), list(double.values())),
            strict=True,
        ):
            assert (a - b).norm() <= 1e-4 * b.norm()


def test_what_is_saved_may_be_somebody_else_s(graph, device, forced):
    """Hooks get what is saved, and hand it back: it is not overwritten."""
    for call in range(CALLS):
        given = operands("gin and more", device, call)
        seen = []

        def keep(t, seen=seen):
            seen.append((t, t.clone()))
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            check("gin and more", adjacency("gin", graph), given)
        assert seen
        assert all(torch.equal(t, copy) for t, copy in seen)


def test_changed_weights_are_read_again(graph, device, forced):
    given = operands("sage", device)
    for _ in range(CALLS):
        check("sage", adjacency("sage", graph), given)
        with torch.no_grad():
            for t in given.values():
                t.mul_(0.9)


def test_without_gradients(graph, device, forced):
    adj = adjacency("gin", graph)
    for call in range(CALLS):
        given = operands("gin and more", device, call)
        with torch.no_grad():
            got = layer("gin and more", adj, given)
        wanted = by_hand("gin and more", adj, wide(given))
        assert not got.requires_grad
        assert (got.double() - wanted).norm() <= 1e-4 * wanted.norm()
    assert tapes(graph) == ["Tape"]


def test_what_is_still_being_chosen_is_not_kept(graph, device, forced, monkeypatch):
    tape = import_module("stretto.kernels.triton.tape")
    spmm = import_module("stretto.compile.adjacency").run_spmm
    undecided = [True]

    def choosing(*args):
        if undecided[0]:
            tape.unsettled()
        return spmm(*args)

    monkeypatch.setattr(import_module("stretto.compile.adjacency"), "run_spmm", choosing)
    for call in range(8):
        check("sage", adjacency("sage", graph), operands("sage", device, call))
    assert tapes(graph) == [1, 1]
    undecided[0] = False
    for call in range(2):
        check("sage", adjacency("sage", graph), operands("sage", device, call))
    assert tapes(graph) == ["Tape", "Tape"]


def test_torch_s_own_kernels_and_autocast_are_not_taped(graph, device, forced, monkeypatch):
    for _ in range(CALLS):
        with torch.autocast(device, dtype=torch.bfloat16):
            given = operands("sage", device)
            got = layer("sage", adjacency("sage", graph), given)
    assert got.dtype == torch.bfloat16
    before = len(tapes(graph))
    monkeypatch.setenv("STRETTO_BACKEND", "torch")
    for call in range(CALLS):
        check("gcn", adjacency("gcn", graph), operands("gcn", device, call))
    assert len(tapes(graph)) == before


def test_on_the_cpu_s_kernels_nothing_is_taped(graph, device):
    if device == "cuda":
        pytest.skip("a GPU's kernels are the tapes'")
    given = operands("sage", device)
    check("sage", adjacency("sage", graph), given)
    assert kernels.backend(torch.device(device)).tape is None
    assert tapes(graph) == []


def test_what_torch_makes_on_a_tape_lies_as_it_does_off_it(device, triton_kernels):
    """A sum of transposes lies across, as its product wants it."""
    tape = import_module("stretto.kernels.triton.tape")
    taped = import_module("stretto.ops.taped")
    x = torch.randn(6, 4, device=device)

    def layouts(a):
        found = (taped.add(a.t(), a.t(), in_place=False), taped.scaled(a.t(), 2.0))
        strides.append([t.stride() for t in found])
        return found

    strides: list = []
    with kernels.forced(triton_kernels):
        layouts(x)
        tape.record(layouts, (x,))
    assert strides[0] == strides[1]
