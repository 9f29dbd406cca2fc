"""Dense products in Triton: shapes, strides, what is added, and who multiplies."""

from importlib import import_module

import pytest
import torch


@pytest.mark.parametrize(("m", "k", "n"), [(130, 128, 64), (1, 4, 4), (70, 36, 8), (5, 100, 68)])
def test_products(m, k, n, device, triton_kernels):
    x, w, b = (torch.randn(*s, device=device) for s in ((m, k), (n, k), (n,)))
    wanted = x.double() @ w.double().t()
    limit = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(triton_kernels.product(x, w.t()).double(), wanted, **limit)
    torch.testing.assert_close(triton_kernels.product(x, w.t().contiguous(), b).double(), wanted + b, **limit)
    wide = torch.randn(m, k + 8, device=device)
    wide[:, :k] = x
    total = torch.randn(m, n, device=device)
    expected = wanted + total
    assert triton_kernels.product(wide[:, :k], w.t(), add=total, out=total) is total
    torch.testing.assert_close(total.double(), expected, **limit)


def test_infinities_stay_what_they_are(device, triton_kernels):
    x, w = torch.randn(6, 8, device=device), torch.randn(4, 8, device=device)
    w[0] = 1.0  # has no second half
    x[1, 2], x[3, 4], x[5, 6] = float("inf"), float("-inf"), float("nan")
    got, wanted = triton_kernels.product(x, w.t()), x @ w.t()
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_torch_multiplies_what_is_not_on_a_device():
    product = import_module("stretto.ops.product").product
    x, w, b = torch.randn(40_000, 8), torch.randn(8, 4), torch.randn(4)
    assert torch.equal(product(x, w), x @ w)
    assert torch.equal(product(x, w, b), torch.addmm(b, x, w))
    total = torch.ones(40_000, 4)
    assert product(x, w, add=total) is total
