"""Every op of the OPS table, every option, every type, every graph of the zoo: results and all gradients."""

import pytest
import torch

from stretto import Graph
from stretto.ops import OPS, Sample, segment_reduce, spmm
from stretto.ops.segment import reference_segment
from stretto.ops.spmm import reference_spmm
from tests.compare import DTYPES, compare
from tests.graphs import ZOO, graph_of, random_edges

WIDTHS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 41, 47, 64, 100, 129, 256, 602, 1433, 2048)
names = [str(d).removeprefix("torch.") for d in DTYPES]


@pytest.mark.parametrize("dtype", DTYPES, ids=names)
@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("op", OPS)
def test_op(op, name, dtype):
    torch.set_num_threads(2 if name == "hub" and dtype == torch.float32 else 1)
    for sample in OPS[op].samples(graph_of(name), dtype):
        compare(OPS[op].function, OPS[op].reference, sample, op)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_widths(width, reduce):
    graph = Graph.of(random_edges(30, 20, 120), (30, 20))
    for dtype in DTYPES if width in (1, 47, 100, 602) else (torch.float32,):
        x, weight = (
            torch.randn(30, width, dtype=torch.float64).to(dtype),
            torch.rand(120, dtype=torch.float64).to(dtype),
        )
        compare(spmm, reference_spmm, Sample((graph, x), {"reduce": reduce}), "spmm")
        compare(spmm, reference_spmm, Sample((graph, x, weight), {"reduce": reduce}), "weighted spmm")


@pytest.mark.parametrize("heads", [1, 2, 5, 8])
@pytest.mark.parametrize("width", [1, 3, 8, 19, 64])
def test_heads(heads, width):
    graph = Graph.of(random_edges(30, 20, 120), (30, 20))
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(30, heads, width, dtype=torch.float64).to(dtype)
        weight = torch.randn(120, heads, dtype=torch.float64).to(dtype)
        for reduce in ("sum", "max"):
            compare(spmm, reference_spmm, Sample((graph, x, weight), {"reduce": reduce}), "spmm")


@pytest.mark.parametrize("width", [1, 41, 602])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min", "mul", "softmax", "var"])
def test_segment_widths(width, reduce):
    index = random_edges(9, 9, 70)[0]
    src = torch.rand(70, width, dtype=torch.float64).float() + 0.5
    compare(segment_reduce, reference_segment, Sample((src, index, 9), {"reduce": reduce}), "segment_reduce")


def _strided(kind: str) -> torch.Tensor:
    full = torch.randn(30, 24)
    return {
        "transposed": torch.randn(24, 30).t(),
        "columns": full[:, 3:14],
        "every other column": full[:, ::2],
        "every other row": torch.randn(60, 11)[::2],
        "one row expanded": full[:1].expand(30, -1),
        "one column expanded": full[:, :1].expand(-1, 24),
        "offset": torch.randn(31 * 24)[5 : 5 + 30 * 24].view(30, 24),
        "heads swapped": torch.randn(4, 30, 6).transpose(0, 1),
        "heads sliced": torch.randn(30, 4, 9)[:, :, 2:8],
        "some heads": torch.randn(30, 8, 6)[:, 2:6],
        "column": full[:, 4],
    }[kind]


STRIDED = [
    "transposed",
    "columns",
    "every other column",
    "every other row",
    "one row expanded",
    "one column expanded",
    "offset",
    "heads swapped",
    "heads sliced",
    "some heads",
    "column",
]


@pytest.mark.parametrize("kind", STRIDED)
@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_non_contiguous_input(kind, reduce):
    graph = Graph.of(random_edges(30, 30, 150), 30)
    x = _strided(kind)
    weight = torch.randn(300)[::2]
    for given in ((graph, x), (graph, x, weight)):
        same = tuple(a.contiguous() if isinstance(a, torch.Tensor) else a for a in given)
        assert torch.equal(spmm(*given, reduce=reduce), spmm(*same, reduce=reduce))
    leaf = x.detach().requires_grad_()
    cotangent = torch.randn(*reversed(x.shape)).permute(*reversed(range(x.dim())))  # a gradient that is not contiguous
    out = spmm(graph, leaf, reduce=reduce)
    expected = torch.autograd.grad(reference_spmm(graph, leaf, reduce=reduce), leaf, cotangent)[0]
    torch.testing.assert_close(torch.autograd.grad(out, leaf, cotangent)[0], expected)


def test_large_enough_to_tune_and_to_take_huge_pages():
    """Above the tuner's threshold every variant is tried in turn; each gives the same answer."""
    graph = Graph.of(random_edges(3000, 2500, 40_000), (3000, 2500))
    for width in (64, 256, 602):
        x = torch.randn(3000, width)
        truth = reference_spmm(graph, x.double())
        baseline = reference_spmm(graph, x)
        allowed = 2 * float((baseline.double() - truth).abs().max()) + 1e-5
        for _ in range(24):
            assert float((spmm(graph, x).double() - truth).abs().max()) <= allowed
