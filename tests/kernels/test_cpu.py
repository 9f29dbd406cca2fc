"""Every native kernel, on every instruction set, against the reference in fp64."""

import pytest
import torch

from stretto.graph import Graph
from stretto.kernels import accumulate_type, cpu, reference
from stretto.ops import Sample
from stretto.ops.variants import VARIANTS
from tests.compare import DTYPES, cast, judge
from tests.graphs import ZOO, graph_of

GRAPHS = [name for name in ZOO if name not in ("one_node", "sorted", "symmetric_unsorted")]
names = [str(d).removeprefix("torch.") for d in DTYPES]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=names)
every_graph = pytest.mark.parametrize("name", GRAPHS)
pytestmark = pytest.mark.usefixtures("isa")


def values(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def check(kernel: str, *args, terms: int = 1, **kwargs):
    """cpu.kernel against reference.kernel, in fp64 and at the precision given. Returns what cpu gave."""
    sample = Sample(args, kwargs)
    wide = cast(sample, torch.float64)
    ours = getattr(cpu, kernel)(*args, **kwargs)
    baseline = getattr(reference, kernel)(*args, **kwargs)
    truth = getattr(reference, kernel)(*wide.args, **wide.kwargs)
    results = (ours, baseline, truth) if isinstance(ours, tuple) else ((ours,), (baseline,), (truth,))
    for mine, theirs, true in zip(*results, strict=True):
        assert (mine is None) == (true is None)
        if mine is not None:
            judge(mine, theirs, true, f"{kernel} {kwargs}", terms=terms)
    return ours


def longest(csr) -> int:
    return max(1, int(csr.rowptr.diff().max())) if csr.num_rows else 1


@every_graph
@every_dtype
def test_sum(name, dtype):
    csr = graph_of(name).edge_csr
    n, m, e = csr.num_rows, csr.num_cols, csr.num_edges
    terms = longest(csr)
    acc = accumulate_type(dtype)
    scales = {"row_scale": values(n, dtype=acc), "col_scale": values(m, dtype=acc)}
    for width in (1, 5, 16, 33, 70, 300):
        x = values(m, width, dtype=dtype)
        check("spmm", csr, x, terms=terms)
        check("spmm", csr, x, values(e, dtype=dtype), terms=terms)
        check("spmm", csr, x, values(e, dtype=acc), y=values(n, width, dtype=dtype), beta=-0.5, terms=terms, **scales)
    x = values(m, 3, 7, dtype=dtype)
    check("spmm", csr, x, values(e, 3, dtype=dtype), terms=terms)
    check("spmm", csr, x, terms=terms, **scales)


@every_graph
@every_dtype
def test_extremum_and_its_gradient(name, dtype):
    graph = graph_of(name)
    csr, csr_t = graph.edge_csr, graph.T.edge_csr
    m, e = csr.num_cols, csr.num_edges
    for reduce in ("max", "min"):
        for shape, heads in (((4,), ()), ((37,), ()), ((3, 5), (3,))):
            x = torch.randint(-3, 4, (m, *shape)).to(dtype)  # many ties
            for weight in (None, torch.randint(-1, 3, (e, *heads)).to(dtype)):
                out, ties = cpu.spmm(csr, x, weight, reduce=reduce, count_ties=True)
                expected, expected_ties = reference.spmm(csr, x, weight, reduce=reduce, count_ties=True)
                assert torch.equal(out, expected)
                assert torch.equal(ties, expected_ties)
                assert torch.equal(cpu.spmm(csr, x, weight, reduce=reduce)[0], out)
                share = torch.randint(1, 9, out.shape).to(accumulate_type(dtype))  # small integers: sums are exact
                needs = {"need_x": True, "need_weight": weight is not None}
                ours = cpu.spmm_extremum_grad(csr_t, x, weight, out, share, **needs)
                theirs = reference.spmm_extremum_grad(csr_t, x, weight, out, share, **needs)
                for mine, their in zip(ours, theirs, strict=True):
                    assert (mine is None) == (their is None)
                    assert mine is None or torch.equal(mine, their)


@every_graph
@every_dtype
def test_sddmm(name, dtype):
    csr = graph_of(name).edge_csr
    for heads, width in ((1, 1), (1, 19), (4, 16), (2, 130)):
        a, b = values(csr.num_rows, heads, width, dtype=dtype), values(csr.num_cols, heads, width, dtype=dtype)
        check("sddmm", csr, a, b, terms=width)
    check("sddmm_add", csr, values(csr.num_rows, 3, dtype=dtype), values(csr.num_cols, 3, dtype=dtype))


@every_graph
@every_dtype
def test_softmax_and_its_gradient(name, dtype):
    csr = graph_of(name).edge_csr
    terms = longest(csr)
    for heads in (1, 3):
        score = values(csr.num_edges, heads, dtype=dtype)
        alpha = check("edge_softmax", csr, score, terms=terms)
        check("edge_softmax_grad", csr, alpha, values(csr.num_edges, heads, dtype=dtype), terms=terms)


@every_graph
def test_product_and_its_gradient(name):
    csr = graph_of(name).segments.edge_csr
    for dtype in (torch.float64, torch.float32):
        x = torch.rand(csr.num_edges, 5, dtype=torch.float64) + 0.5
        x = torch.where(torch.rand_like(x) < 0.1, 0.0, x).to(dtype)
        check("spmm", csr, x, reduce="mul", terms=longest(csr))
        check("mul_grad", csr, x, values(csr.num_rows, 5, dtype=dtype), terms=longest(csr))


@every_dtype
def test_gather(dtype):
    for shape in ((), (1,), (7,), (3, 5), (300,)):
        x = values(50, *shape, dtype=dtype)
        for index_dtype in (torch.int32, torch.int64):
            index = torch.randint(50, (5000,)).to(index_dtype)
            assert torch.equal(cpu.gather_rows(x, index), x[index.long()])
            assert cpu.gather_rows(x, index[:0]).shape == (0, *shape)


@pytest.mark.parametrize("width", [16, 32, 48, 64, 80, 144])
def test_gather_ceiling(width):
    x, index = torch.randn(100, width), torch.randint(100, (5000,), dtype=torch.int32)
    torch.testing.assert_close(cpu.gather_ceiling(x, index, 8).sum(), x[index.long()].sum(), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("reduce", ["sum", "max"])
@every_dtype
def test_tiling_and_prefetch_change_no_bit(dtype, reduce):
    graph = graph_of("hub")
    options = [v.options for v in VARIANTS["spmm"]["cpu"] if v.backend == "native"]
    for width in (1, 40, 128, 200, 256, 602):
        x, weight = values(40, width, dtype=dtype), values(graph.num_edges, dtype=dtype)
        for given in (None, weight):
            results = [cpu.spmm(graph.edge_csr, x, given, reduce=reduce, **chosen)[0] for chosen in options]
            assert all(torch.equal(r, results[0]) for r in results)


HALVES = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_every_16_bit_number_is_read_and_rounded_as_torch_does(dtype):
    """All 65,536 of them: as they are, and scaled so that the result must be rounded, overflows or is subnormal."""
    x = HALVES.view(dtype).view(-1, 64)
    csr = graph_of_identity(x.size(0))
    for scale in (1.0, 1 / 3, 1 + 2**-9, 1 + 2**-12, 0.5 + 2**-14, 1e-4, 3e-8, 700.0, 1e30):
        out = cpu.spmm(csr, x, row_scale=torch.full((x.size(0),), scale))[0]
        expected = ((0 + x.float()) * torch.tensor(scale)).to(dtype)  # a sum starts from +0
        assert torch.equal(out.isnan(), expected.isnan())
        same = out.view(torch.int16) == expected.view(torch.int16)
        assert (same | expected.isnan()).all(), scale


def graph_of_identity(n):
    from stretto import Graph

    return Graph.of(torch.arange(n).repeat(2, 1), n).csr


def test_non_finite_numbers_stay_in_their_columns():
    """Masked tails must not smear what lies beyond the row's end."""
    csr = graph_of("unsorted").csr
    for width in (1, 3, 15, 17, 31):
        wide = torch.full((12, width + 16), float("nan"))
        wide[:, :width] = 1
        out = cpu.spmm(csr, wide[:, :width])[0]
        assert torch.equal(out, csr.rowptr.diff().float().unsqueeze(1).expand(-1, width))


@pytest.mark.parametrize("reduce", ["sum", "max", "min"])
def test_a_scale_that_stays_changes_no_bit_and_one_that_changes_is_noticed(reduce):
    edge_index = torch.randint(2000, (2, 5 * cpu.MANY_EDGES))
    csr = Graph.of(edge_index, num_nodes=2000).csr
    x, scale, other = torch.randn(2000, 20), torch.rand(2000), torch.rand(2000)
    first, second, third = (cpu.spmm(csr, x, reduce=reduce, col_scale=scale)[0] for _ in range(3))
    assert csr.cache["scale"][2] is not None
    assert torch.equal(first, second)
    assert torch.equal(first, third)
    check("spmm", csr, x, reduce=reduce, col_scale=other, terms=longest(csr))
    check("spmm", csr, x, reduce=reduce, col_scale=scale, terms=longest(csr))
    check("spmm", csr, x, reduce=reduce, col_scale=scale, terms=longest(csr))
    scale.mul_(2)
    assert torch.equal(cpu.spmm(csr, x, reduce=reduce, col_scale=scale)[0], 2 * first)
