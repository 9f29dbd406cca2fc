"""Attention in Triton, every form and option, against the reference and its autograd gradients."""

from functools import partial
from importlib import import_module

import pytest
import torch

from stretto.kernels import reference_attention
from stretto.kernels.attention import Attention
from stretto.kernels.csr import Csr
from stretto.ops.replay import mixed

TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 5e-2}
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16

# name -> (form, which per-node ends, options)
CASES = {
    "given": {"form": "given"},
    "weight": {"form": "weight"},
    "gat": {"form": "gat"},
    "gat edge": {"form": "gat", "edge": True},
    "gatv2": {"form": "gatv2"},
    "gatv2 edge": {"form": "gatv2", "edge": True},
    "gatv2 own values": {"form": "gatv2", "values": True},
    "dot": {"form": "dot", "values": True},
    "dot shared": {"form": "dot"},
    "dot attr": {"form": "dot", "values": True, "attr": True},
}


def build(name: str, csr: Csr, dtype: torch.dtype, heads: int, f: int, k: int, device: str, **more: float) -> Attention:
    """The Attention of a case, with random tensors."""
    case = CASES[name]
    form = str(case["form"])
    n, m, e = csr.num_rows, csr.num_cols, csr.num_edges

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=F64).to(dtype).to(device)

    if form in ("given", "weight"):
        return Attention(form, new(m, heads, f), edge=new(e, heads), **more)
    if form == "gat":
        return Attention(
            form,
            new(m, heads, f),
            new(n, heads),
            new(m, heads),
            edge=new(e, heads) if case.get("edge") else None,
            **more,
        )
    if form == "gatv2":
        return Attention(
            form, new(m, heads, f) if case.get("values") else None, new(n, heads, k), new(m, heads, k),
            att=new(heads, k), edge=new(e, heads, k) if case.get("edge") else None, **more,
        )  # fmt: skip
    attr, query = (new(e, 3), new(n, heads, 3)) if case.get("attr") else (None, None)
    v = new(m, heads, f) if case.get("values") else None
    return Attention(form, v, new(n, heads, k), new(m, heads, k), attr=attr, query=query, scale=0.3, **more)


def close(got: torch.Tensor | None, wanted: torch.Tensor | None, dtype: torch.dtype, what: str) -> None:
    assert (got is None) == (wanted is None), what
    if got is not None and wanted is not None:
        assert got.shape == wanted.shape, what
        tol = TOLERANCE[dtype]
        torch.testing.assert_close(
            got.double(), wanted.double(), rtol=tol, atol=tol, equal_nan=True, msg=lambda m: f"{what}: {m}"
        )


def compare(triton_kernels, transpose, csr: Csr, a: Attention, dtype: torch.dtype, *, weights: bool = True) -> None:
    got = triton_kernels.attention(csr, a, weights=weights)
    wanted = reference_attention.attention(csr, a, weights=weights)
    for part, g, w in zip(("out", "out_attr", "alpha"), got[:3], wanted[:3], strict=True):
        close(g, w, dtype, part)
    grads = [None if t is None else torch.randn(t.shape, dtype=F64).to(t.dtype).to(t.device) for t in wanted[:3]]
    needs = tuple(t is not None for t in a.tensors)
    csr_t = transpose(csr)
    ours = triton_kernels.attention_grad(csr, csr_t, a, *got, *grads, needs)
    theirs = reference_attention.attention_grad(csr, csr_t, a, *wanted, *grads, needs)
    for name, g, w in zip(("v", "left", "right", "att", "edge", "attr", "query"), ours, theirs, strict=True):
        close(g, w, dtype, f"d {name}")


@pytest.fixture
def check(triton_kernels, transposed):
    """check(csr, attention, dtype): results and all gradients."""
    return partial(compare, triton_kernels, transposed)


@pytest.mark.parametrize("name", CASES)
def test_forms(name, make, device, check):
    for graph in ("empty", "hub"):
        csr = make(graph)
        check(csr, build(name, csr, F64, 2, 3, 3, device), F64)


@pytest.mark.parametrize("name", ["weight", "gat edge", "gatv2", "dot attr"])
def test_long_indices(name, make, device, check):
    csr = make("hub", torch.int64)
    check(csr, build(name, csr, F64, 2, 3, 3, device), F64)


@pytest.mark.slow
@pytest.mark.parametrize("graph", ["one node", "isolated", "bipartite", "sorted"])
@pytest.mark.parametrize("name", CASES)
def test_forms_on_other_graphs(name, graph, make, device, check):
    csr = make(graph)
    check(csr, build(name, csr, F64, 2, 3, 3, device), F64)


@pytest.mark.parametrize("name", ["gat edge", "gatv2 edge", pytest.param("dot attr", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dropped", [False, True])
def test_dropout_has_the_same_mask_as_the_reference(name, dropped, make, device, check):
    csr = make("hub")
    a = build(name, csr, F64, 2, 3, 3, device, dropout=0.4, seed=(7 << 40) + 3000000000, dropped=dropped)
    check(csr, a, F64)


@pytest.mark.parametrize("name", ["gat", "gatv2", "dot"])
@pytest.mark.parametrize(
    "width", [pytest.param(1, marks=pytest.mark.slow), 20, pytest.param(64, marks=pytest.mark.slow)]
)
def test_widths_in_fp32(name, width, make, device, check):
    csr = make("hub", torch.int64)
    check(csr, build(name, csr, F32, 1, width, width, device), F32, weights=False)


@pytest.mark.parametrize("name", ["gat", "gatv2 own values", "dot"])
def test_rows_wider_than_a_tile(name, make, device, check, monkeypatch):
    monkeypatch.setattr(import_module("stretto.kernels.triton.attention"), "WIDEST", 4)
    csr = make("sorted")
    check(csr, build(name, csr, F64, 1, 6, 5, device), F64, weights=False)


@pytest.mark.parametrize("name", ["gat", "gatv2", "gatv2 edge", "dot"])
def test_two_halves_of_a_head(name, make, device, check):
    csr = make("hub")
    check(csr, build(name, csr, F32, 2, 128, 128, device), F32, weights=False)
    if name == "gat":
        check(csr, build(name, csr, F32, 3, 60, 60, device), F32, weights=False)


@pytest.mark.parametrize("name", ["gat", "gatv2", "dot"])
@pytest.mark.parametrize(("heads", "width"), [(2, 5), (2, 128)])
def test_a_bias_is_added_on_the_way(name, heads, width, make, device, triton_kernels, transposed):
    csr, dtype = make("hub"), F32
    a = build(name, csr, dtype, heads, width, width, device)
    wanted = reference_attention.attention(csr, a, weights=False)
    grad = torch.randn(wanted[0].shape, dtype=F64).to(dtype).to(device)
    needs = tuple(t is not None for t in a.tensors)
    csr_t = transposed(csr)
    theirs = reference_attention.attention_grad(csr, csr_t, a, *wanted, grad, None, None, needs)
    a.bias = torch.randn(heads * width, dtype=F64).to(dtype).to(device)
    got = triton_kernels.attention(csr, a, weights=False)
    assert got[0].shape == (csr.num_rows, heads * width)
    close(got[0], wanted[0].reshape(csr.num_rows, -1) + a.bias, dtype, "out")
    *ours, dbias = triton_kernels.attention_grad(csr, csr_t, a, *got, grad.flatten(1), None, None, (*needs, True))
    for k, (g, w) in enumerate(zip(ours, theirs, strict=True)):
        close(g, w, dtype, f"gradient {k}")
    close(dbias, grad.flatten(1).sum(0), dtype, "d bias")


def test_a_seed_on_the_device_gives_the_mask_of_its_key(make, device, triton_kernels, transposed):
    key = mixed
    csr = make("hub")
    for seed in (0, 7, 2**62 + 12345):
        a = build("gat", csr, F64, 2, 3, 3, device, dropout=0.4, seed=key(seed))
        wanted = triton_kernels.attention(csr, a, weights=True)
        a.seed, a.seed_at = 0, torch.tensor([seed], device=device)
        got = triton_kernels.attention(csr, a, weights=True)
        assert torch.equal(got[0], wanted[0])
        assert torch.equal(got[2], wanted[2])


def test_heads_that_share_a_row(make, device, check):
    csr = make("hub")
    a = build("dot", csr, F64, 3, 5, 4, device)
    assert a.v is not None
    assert a.right is not None
    a.v, a.right = a.v[:, :1].contiguous(), a.right[:, :1].contiguous()
    check(csr, a, F64)
    a = build("gat", csr, F64, 3, 5, 4, device)
    assert a.v is not None
    a.v = a.v[:, :1].contiguous()
    check(csr, a, F64)


def test_low_precision(make, device, check):
    csr = make("hub")
    for name in ("gat", "gatv2", "dot"):
        check(csr, build(name, csr, BF16, 2, 16, 16, device), BF16, weights=False)


def test_large_and_infinite_scores(make, device, triton_kernels):
    csr = make("hub")
    a = build("given", csr, F64, 3, 4, 4, device)
    assert a.edge is not None
    a.edge[:, 0] *= 1e4
    a.edge[: csr.num_edges // 2, 1] = float("-inf")
    a.edge[:, 2] = float("-inf")
    got = triton_kernels.attention(csr, a, weights=True)
    wanted = reference_attention.attention(csr, a, weights=True)
    close(got[0], wanted[0], F64, "out")
    close(got[2], wanted[2], F64, "alpha")
