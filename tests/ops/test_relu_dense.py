"""relu_dense against the two steps it stands for, and numbers without a full mantissa taken for zero."""

import pytest
import torch
from torch.nn import functional as F

from stretto import ops
from stretto.graph import Graph
from stretto.kernels import native
from stretto.kernels.denormals import LEAST, DenormalsAreZero
from stretto.ops.product import product
from stretto.ops.relu_dense import BLOCK, _in_blocks, relu_dense

needs_native = pytest.mark.skipif(native.library() is None, reason="libstretto is not loaded")
ROWS = 2 * BLOCK // (8 * 24) + 77  # more than one block of 24 fp64 columns, and a rest


def _inputs(bias: bool, dtype: torch.dtype = torch.float64) -> list[torch.Tensor | None]:
    torch.manual_seed(0)
    z = torch.randn(ROWS, 24, dtype=dtype)
    z[::7] = 0
    weight = torch.randn(10, 24, dtype=dtype)
    return [t.requires_grad_() for t in (z, weight)] + [torch.randn(10, dtype=dtype).requires_grad_() if bias else None]


@needs_native
@pytest.mark.parametrize("bias", [True, False])
def test_result_and_gradients_equal_the_two_steps(bias: bool) -> None:
    z, weight, b = _inputs(bias)
    assert _in_blocks(z, weight, b)
    out, wanted = relu_dense(z, weight, b), F.linear(F.relu(z), weight, b)
    leaves = [t for t in (z, weight, b) if t is not None]
    grad = torch.randn_like(wanted)
    torch.testing.assert_close(out, wanted)
    for got, expected in zip(
        torch.autograd.grad(out, leaves, grad), torch.autograd.grad(wanted, leaves, grad), strict=True
    ):
        torch.testing.assert_close(got, expected)
    with torch.no_grad():
        torch.testing.assert_close(relu_dense(z, weight, b), wanted)


@needs_native
@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_what_needs_no_gradient_gets_none(frozen: int) -> None:
    leaves = _inputs(True)
    leaves[frozen].requires_grad_(False)
    relu_dense(*leaves).sum().backward()
    assert [t.grad is None for t in leaves] == [k == frozen for k in range(3)]


@needs_native
def test_second_derivatives_equal_those_of_the_two_steps() -> None:
    found = []
    for function in (relu_dense, lambda z, w, b: F.linear(F.relu(z), w, b)):
        leaves = _inputs(True)
        first = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)


def test_small_matrices_and_other_types_take_the_two_steps() -> None:
    z, weight = torch.randn(5, 24), torch.randn(10, 24)
    torch.testing.assert_close(relu_dense(z, weight), F.linear(F.relu(z), weight))
    half = torch.randn(LEAST, 16, dtype=torch.bfloat16)
    assert not _in_blocks(half, torch.randn(8, 16, dtype=torch.bfloat16), None)


@needs_native
def test_nan_is_not_masked() -> None:
    z, weight, b = _inputs(True)
    with torch.no_grad():
        z[3, 3] = float("nan")
    out = relu_dense(z, weight, b)
    assert out[3].isnan().all()
    assert not out[4].isnan().any()


@needs_native
def test_the_mode_holds_on_every_thread_and_is_put_back() -> None:
    tiny = torch.full((1 << 20,), 1e-40)
    assert (tiny * 0.5 > 0).all()
    with DenormalsAreZero():
        assert (tiny * 0.5 == 0).all()  # compared outside: the comparison itself would take them for zero
        halves = tiny * 0.5
    assert halves.view(torch.int32).count_nonzero() == 0
    assert (tiny * 0.5).view(torch.int32).count_nonzero() == tiny.numel()


@needs_native
def test_the_mode_is_put_back_after_an_error() -> None:
    with pytest.raises(RuntimeError):
        product(torch.ones(LEAST, 4), torch.ones(5, 3))
    assert (torch.full((1 << 20,), 1e-40) * 0.5).view(torch.int32).count_nonzero() == 1 << 20


@needs_native
def test_sums_take_them_for_zero_but_maxima_do_not() -> None:
    graph = Graph.of(torch.tensor([[0, 1], [2, 2]]), num_nodes=3)
    x = torch.tensor([[1e-40], [2e-40], [1.0]])
    assert ops.spmm(graph, x).view(torch.int32).count_nonzero() == 0
    assert ops.spmm(graph, x, reduce="max")[2].view(torch.int32).item() == x[1].view(torch.int32).item()
    half = torch.tensor([[6e-8], [1.2e-7], [1.0]], dtype=torch.float16)  # ordinary numbers once they are fp32
    assert ops.spmm(graph, half)[2].item() == pytest.approx(1.8e-7, rel=0.1)
