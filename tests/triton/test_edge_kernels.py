"""Edge messages, softmax sums, segment products and column sums in Triton against the reference in fp64."""

import pytest
import torch

from stretto.kernels import reference, reference_edge

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
LIMIT = {F64: 1e-9, F32: 3e-6, BF16: 2e-2, F16: 3e-3}


def values(device: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64).to(dtype).to(device)


def close(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.shape == wanted.shape
    assert not torch.isnan(got).any()
    error = (got.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-3)
    assert error <= LIMIT[dtype], float(error)


def wide(tensors):
    return tuple(None if t is None else t.double() for t in tensors)


# terms: r, c, e for row, col and edge, of the first and of the second factor
CASES = [
    ("ce", "", ("relu", "one")),
    ("c", "e", ("identity", "identity")),
    ("rce", "c", ("sigmoid", "identity")),
    ("rce", "rce", ("sigmoid", "softplus")),
    ("rc", "", ("silu", "one")),
]


def terms(csr, case, width, dtype, device):
    sizes = {"r": csr.num_rows, "c": csr.num_cols, "e": csr.num_edges}
    return tuple(
        values(device, dtype, sizes[name], width) if name in factor else None for factor in case[:2] for name in "rce"
    )


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(c[2]))
def test_edge_messages(csr, case, device, triton_kernels, transposed):
    tensors, acts = terms(csr, case, 5, F32, device), case[2]
    close(triton_kernels.edge_messages(csr, tensors, acts), reference_edge.edge_messages(csr, wide(tensors), acts), F32)
    grad, needs = values(device, F32, csr.num_rows, 5), tuple(t is not None for t in tensors)
    other = transposed(csr)
    got = triton_kernels.edge_messages_grad(csr, other, tensors, acts, grad, needs)
    wanted = reference_edge.edge_messages_grad(csr, other, wide(tensors), acts, grad.double(), needs)
    for g, w in zip(got, wanted, strict=True):
        assert (g is None) == (w is None)
        if g is not None:
            close(g, w, F32)


@pytest.mark.parametrize("case", [CASES[0], CASES[1]], ids=["relu", "identity"])
def test_what_is_not_finite_passes_as_in_torch(case, make, device, triton_kernels, transposed):
    """ReLU passes a gradient at NaN and stops a NaN where it is 0; no activation has slope 1, also at infinity."""
    csr, acts = make("isolated"), case[2]
    tensors = terms(csr, case, 5, F32, device)
    tensors[1][0, :2] = torch.tensor([torch.nan, torch.inf], device=device)
    grad = values(device, F32, csr.num_rows, 5)
    grad[6] = torch.nan
    needs = tuple(t is not None for t in tensors)
    other = transposed(csr)
    got = triton_kernels.edge_messages_grad(csr, other, tensors, acts, grad, needs)
    wanted = reference_edge.edge_messages_grad(csr, other, tensors, acts, grad, needs)
    for g, w, need in zip(got, wanted, needs, strict=True):
        if need:
            torch.testing.assert_close(g, w, equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [F64, F16, BF16])
@pytest.mark.parametrize("width", [1, 130])
def test_edge_messages_widths_and_types(width, dtype, make, device, triton_kernels, transposed):
    csr = make("hub", torch.int64)
    tensors, acts = terms(csr, CASES[3], width, dtype, device), CASES[3][2]
    close(
        triton_kernels.edge_messages(csr, tensors, acts), reference_edge.edge_messages(csr, wide(tensors), acts), dtype
    )
    grad, needs = values(device, dtype, csr.num_rows, width), (True, False, True, False, True, False)
    other = transposed(csr)
    got = triton_kernels.edge_messages_grad(csr, other, tensors, acts, grad, needs)
    wanted = reference_edge.edge_messages_grad(csr, other, wide(tensors), acts, grad.double(), needs)
    for g, w, need in zip(got, wanted, needs, strict=True):
        assert (g is not None) == need
        if g is not None:
            close(g, w, dtype)


def test_activations_far_out_and_of_nan(make, device, triton_kernels):
    csr = make("isolated")
    x = torch.tensor([-1e4, -40.0, -17.0, 0.0, 17.0, 90.0, 1e4, float("nan")], dtype=F32, device=device)
    x = x.view(1, 8).expand(csr.num_cols, 8).contiguous()
    for act in ("relu", "sigmoid", "softplus", "silu", "identity"):
        tensors = (None, x, None, None, None, None)
        got = triton_kernels.edge_messages(csr, tensors, (act, "one"))
        wanted = reference_edge.edge_messages(csr, wide(tensors), (act, "one"))
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("act", ["relu", "identity"])
def test_softmax_sum(csr, act, detached, device, triton_kernels, transposed):
    for dtype in (F32, F64):
        x, edge = values(device, dtype, csr.num_cols, 5), values(device, dtype, csr.num_edges, 5)
        heat = values(device, dtype, 5) * 3
        check_softmax_sum(csr, transposed(csr), (x, edge, heat), (act, 0.1, detached), dtype, triton_kernels)


@pytest.mark.parametrize("width", [1, 130])
def test_softmax_sum_without_edges_and_in_bf16(width, make, device, triton_kernels, transposed):
    csr = make("hub")
    for dtype in (F32, BF16):
        x, heat = values(device, dtype, csr.num_cols, width), values(device, F32, width)
        check_softmax_sum(csr, transposed(csr), (x, None, heat), ("identity", 0.0, False), dtype, triton_kernels)


def check_softmax_sum(csr, csr_t, tensors, options, dtype, kernels):
    act, shift, _ = options
    got = kernels.softmax_sum(csr, *tensors, act, shift)
    wanted = reference_edge.softmax_sum(csr, *wide(tensors), act, shift)[0]
    close(got[0], wanted, F64 if dtype == F64 else F32)
    grad = values(str(wanted.device), dtype, *wanted.shape)
    needs = (True, tensors[1] is not None, True)
    found = kernels.softmax_sum_grad(csr, csr_t, *tensors, *options, got, grad, needs)
    right = reference_edge.softmax_sum_grad(csr, csr_t, *wide(tensors), *options, (wanted,) * 3, grad.double(), needs)
    for g, w in zip(found, right, strict=True):
        assert (g is None) == (w is None)
        if g is not None:
            close(g, w, dtype)


@pytest.mark.parametrize("dtype", [F32, F64, BF16, F16])
@pytest.mark.parametrize("bounds", [[0, 3, 3, 70, 200], [0, 200], [0, 0]])
def test_segment_matmul(bounds, dtype, device, triton_kernels):
    for i, o in ((5, 4), (40, 70)):
        x = values(device, dtype, bounds[-1], i)
        weight = values(device, dtype, len(bounds) - 1, i, o)
        close(
            triton_kernels.segment_matmul(x, bounds, weight),
            reference.segment_matmul(x.double(), bounds, weight.double()),
            dtype,
        )
        turned = weight.transpose(1, 2).contiguous().transpose(1, 2)
        close(
            triton_kernels.segment_matmul(x, bounds, turned),
            reference.segment_matmul(x.double(), bounds, weight.double()),
            dtype,
        )


@pytest.mark.parametrize("dtype", [F32, F64, BF16])
def test_column_sum(dtype, device, triton_kernels):
    for n, k in ((0, 3), (1, 1), (300, 5), (1000, 130), (129, 64)):
        x = values(device, dtype, n, k)
        close(triton_kernels.column_sum(x), x.double().sum(0), dtype)
        if n:
            close(triton_kernels.column_sum(x.t().contiguous().t()), x.double().sum(0), dtype)
