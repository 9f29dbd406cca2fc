"""Every Triton kernel against its reference on small adversarial graphs."""

import pytest
import torch

from stretto.kernels import reference
from stretto.kernels.csr import Csr

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16


def values(device: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64).to(dtype).to(device)


def close(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    tol = TOLERANCE[dtype]
    torch.testing.assert_close(got.double(), wanted.double(), rtol=tol, atol=tol, equal_nan=True)


@pytest.mark.parametrize("reduce", ["sum", "max", "min", "mul"])
@pytest.mark.parametrize("weighted", [False, True])
def test_spmm_reductions(csr, reduce, weighted, device, triton_kernels):
    x = values(device, F32, csr.num_cols, 3)
    weight = values(device, F32, csr.num_edges) if weighted else None
    ties = reduce in ("max", "min")
    got, got_ties = triton_kernels.spmm(csr, x, weight, reduce=reduce, count_ties=ties)
    wanted, wanted_ties = reference.spmm(csr, x, weight, reduce=reduce, count_ties=ties)
    close(got, wanted, F32)
    if ties:
        assert torch.equal(got_ties, wanted_ties)


@pytest.mark.parametrize("width", [1, 3, 64, 100])
@pytest.mark.parametrize("dtype", [F32, F64, F16, BF16])
def test_spmm_widths_and_types(width, dtype, make, device, triton_kernels):
    csr = make("hub")
    x = values(device, dtype, csr.num_cols, width)
    close(triton_kernels.spmm(csr, x)[0], reference.spmm(csr, x)[0], dtype)


@pytest.mark.parametrize("dtype", [F32, F64, BF16])
@pytest.mark.parametrize("heads", [1, 2])
def test_spmm_heads_scales_and_y(csr, dtype, heads, device, triton_kernels):
    x = values(device, dtype, csr.num_cols, heads, 5)
    acc = F64 if dtype == F64 else F32
    options = {
        "row_scale": values(device, acc, csr.num_rows),
        "col_scale": values(device, acc, csr.num_cols),
        "y": values(device, dtype, csr.num_rows, heads, 5),
        "beta": 0.1,
    }
    for weight in (values(device, acc, csr.num_edges), values(device, acc, csr.num_edges, heads)):
        got, _ = triton_kernels.spmm(csr, x, weight, **options)
        close(got, reference.spmm(csr, x, weight, **options)[0], dtype)


def test_spmm_long_indices_and_row_strides(make, device, triton_kernels):
    csr = make("hub", torch.int64)
    x = values(device, F32, csr.num_cols, 12)[:, 4:]
    y = values(device, F32, csr.num_rows, 9)[:, 1:]
    weight = values(device, F32, csr.num_edges)
    close(triton_kernels.spmm(csr, x, weight, y=y)[0], reference.spmm(csr, x, weight, y=y)[0], F32)


def test_spmm_without_columns(make, device, triton_kernels):
    csr = make("sorted")
    segments = Csr(csr.rowptr, None, None, csr.num_rows, csr.num_edges, csr.num_edges)
    x = values(device, F32, csr.num_edges, 6)
    for reduce in ("sum", "max"):
        got = triton_kernels.spmm(segments, x, reduce=reduce)[0]
        close(got, reference.spmm(segments, x, reduce=reduce)[0], F32)


def test_spmm_keeps_infinities_and_nan(make, device, triton_kernels):
    csr = make("hub")
    x = values(device, F32, csr.num_cols, 4)
    x[2, 0], x[3, 1], x[:, 2], x[4, 3] = float("nan"), float("inf"), float("-inf"), float("-inf")
    for reduce in ("sum", "max", "min"):
        got = triton_kernels.spmm(csr, x, reduce=reduce)[0]
        close(got, reference.spmm(csr, x, reduce=reduce)[0], F32)


@pytest.mark.parametrize("options", [{"block_k": 64}, {"block_k": 256, "warps": 2}, {"block_k": 32, "block_e": 2}])
def test_spmm_variants_agree(options, make, device, triton_kernels):
    csr = make("hub")
    x = values(device, F32, csr.num_cols, 100)
    close(triton_kernels.spmm(csr, x, **options)[0], reference.spmm(csr, x)[0], F32)


@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("weights", [None, "edge", "head"])
def test_extremum_grad(csr, reduce, weights, device, triton_kernels, transposed):
    x = values(device, F32, csr.num_cols, 2, 3).mul(4).round()  # small integers: ties
    weight = {
        None: None,
        "edge": values(device, F32, csr.num_edges).mul(2).round(),
        "head": values(device, F32, csr.num_edges, 2).mul(2).round(),
    }[weights]
    out, _ = reference.spmm(csr, x, weight, reduce=reduce)
    share = values(device, F32, *out.shape)
    need = {"need_x": True, "need_weight": weight is not None}
    got = triton_kernels.spmm_extremum_grad(transposed(csr), x, weight, out, share, **need)
    wanted = reference.spmm_extremum_grad(transposed(csr), x, weight, out, share, **need)
    close(got[0], wanted[0], F32)
    assert (got[1] is None) == (wanted[1] is None)
    if got[1] is not None:
        close(got[1], wanted[1], F32)


def test_extremum_grad_of_nan(make, device, triton_kernels, transposed):
    """A maximum of NaN reaches the gradient of all its entries, as in torch, and of no others."""
    csr = make("hub")
    x = values(device, F32, csr.num_cols, 5)
    x[2, 1] = torch.nan
    for weight in (None, values(device, F32, csr.num_edges)):
        out, _ = reference.spmm(csr, x, weight, reduce="max")
        share = values(device, F32, *out.shape)
        need = {"need_x": True, "need_weight": weight is not None}
        got = triton_kernels.spmm_extremum_grad(transposed(csr), x, weight, out, share, **need)
        wanted = reference.spmm_extremum_grad(transposed(csr), x, weight, out, share, **need)
        assert got[0].isnan().any()
        for mine, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, equal_nan=True)


def test_extremum_grad_in_low_precision(make, device, triton_kernels, transposed):
    csr = make("hub")
    for dtype in (BF16, F16, F64):
        x = values(device, dtype, csr.num_cols, 5)
        out, _ = reference.spmm(csr, x, reduce="max")
        share = values(device, F64 if dtype == F64 else F32, *out.shape)
        need = {"need_x": True, "need_weight": False}
        got, _ = triton_kernels.spmm_extremum_grad(transposed(csr), x, None, out, share, **need)
        close(got, reference.spmm_extremum_grad(transposed(csr), x, None, out, share, **need)[0], F32)


@pytest.mark.parametrize("shape", [(1, 3), (2, 20)])
def test_sddmm(csr, shape, device, triton_kernels):
    a, b = values(device, F32, csr.num_rows, *shape), values(device, F32, csr.num_cols, *shape)
    close(triton_kernels.sddmm(csr, a, b), reference.sddmm(csr, a, b), F32)


@pytest.mark.parametrize("dtype", [F64, F16, BF16])
@pytest.mark.parametrize("width", [1, 64, 200])
def test_sddmm_widths_and_types(width, dtype, make, device, triton_kernels):
    csr = make("hub", torch.int64)
    a, b = values(device, dtype, csr.num_rows, 1, width), values(device, dtype, csr.num_cols, 1, width)
    close(triton_kernels.sddmm(csr, a, b), reference.sddmm(csr, a, b), F64 if dtype == F64 else F32)


@pytest.mark.parametrize("heads", [1, 3, 40])
def test_sddmm_add(csr, heads, device, triton_kernels):
    a, b = values(device, F32, csr.num_rows, heads), values(device, F32, csr.num_cols, heads)
    close(triton_kernels.sddmm_add(csr, a, b), reference.sddmm_add(csr, a, b), F32)


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("heads", [1, 3])
def test_edge_softmax(csr, heads, dtype, device, triton_kernels):
    score = values(device, dtype, csr.num_edges, heads) * 50
    got = triton_kernels.edge_softmax(csr, score)
    close(got, reference.edge_softmax(csr, score), dtype)
    grad = values(device, dtype, csr.num_edges, heads)
    close(triton_kernels.edge_softmax_grad(csr, got, grad), reference.edge_softmax_grad(csr, got, grad), dtype)


def test_edge_softmax_of_infinities(make, device, triton_kernels):
    for name in ("hub", "isolated"):
        csr = make(name)
        score = values(device, F32, csr.num_edges, 4)
        score[: csr.num_edges // 2, 0] = float("-inf")
        score[:, 1] = float("-inf")
        score[1, 2] = float("nan")
        score[0, 3] = float("inf")
        close(triton_kernels.edge_softmax(csr, score), reference.edge_softmax(csr, score), F32)


@pytest.mark.parametrize("dtype", [F32, F64])
def test_mul_grad(csr, dtype, device, triton_kernels):
    x = values(device, dtype, csr.num_edges, 5)
    x[torch.rand(x.shape, device=device) < 0.1] = 0
    grad = values(device, dtype, csr.num_rows, 5)
    close(triton_kernels.mul_grad(csr, x, grad), reference.mul_grad(csr, x, grad), dtype)


@pytest.mark.parametrize("shape", [(), (3,), (64,), (100,), (2, 3)])
@pytest.mark.parametrize("dtype", [F32, F64, BF16])
def test_gather_rows(shape, dtype, device, triton_kernels):
    x = values(device, dtype, 7, *shape)
    for index in (torch.randint(0, 7, (19,)), torch.randint(0, 7, (5,), dtype=torch.int32), torch.empty(0).long()):
        got = triton_kernels.gather_rows(x, index.to(device))
        assert torch.equal(got, reference.gather_rows(x, index.to(device)))


@pytest.mark.parametrize("dtype", [F32, F64, BF16])
@pytest.mark.parametrize("skipped", [1, 2, 3])
def test_gather_rows_that_begin_between_words(skipped, dtype, device, triton_kernels):
    x = values(device, dtype, skipped + 7 * 8)[skipped:].view(7, 8)
    index = torch.randint(0, 7, (19,), device=device)
    assert torch.equal(triton_kernels.gather_rows(x, index), x[index])


def test_no_columns_and_no_rows(make, device, triton_kernels):
    csr = make("isolated")
    assert triton_kernels.spmm(csr, values(device, F32, csr.num_cols, 0))[0].shape == (8, 0)
    nothing = Csr(torch.zeros(1, dtype=torch.int64, device=device), csr.col[:0], None, 0, 8, 0)
    assert triton_kernels.spmm(nothing, values(device, F32, 8, 4))[0].shape == (0, 4)
