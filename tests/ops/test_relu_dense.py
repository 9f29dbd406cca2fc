"""relu_dense against the two steps it stands for, and numbers without a full mantissa taken for zero."""

import pytest
import torch
from torch.nn import functional as F

from stretto import ops
from stretto.graph import Graph
from stretto.kernels import native
from stretto.kernels.cpu_dense import BLOCK
from stretto.kernels.denormals import LEAST, DenormalsAreZero
from stretto.ops.product import product
from stretto.ops.relu_dense import joined, relu_dense

needs_native = pytest.mark.skipif(native.library() is None, reason="libstretto is not loaded")
ROWS = 2 * BLOCK // (8 * 24) + 77  # more than one block of 24 fp64 columns, and a rest
WIDTHS = [(24, 10), (1, 1), (17, 128), (128, 33), (48, 48), (256, 10), (24, 140), (300, 9), (7, 260)]  # 256: our most


def _inputs(i: int, o: int, biases: bool = True) -> list[torch.Tensor | None]:
    torch.manual_seed(0)
    z = torch.randn(max(ROWS, 3 * LEAST // i), i, dtype=torch.float64)
    z[::7] = 0
    made = [z, torch.randn(o, i, dtype=z.dtype), torch.randn(o, dtype=z.dtype), torch.randn(i, dtype=z.dtype)]
    return [t.requires_grad_() if k < 2 or biases else None for k, t in enumerate(made)]


def _steps(z, weight, bias, z_bias):
    return F.linear(F.relu(z if z_bias is None else z + z_bias), weight, bias)


@needs_native
@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize(("i", "o"), WIDTHS)
def test_result_and_gradients_equal_the_steps(i: int, o: int, biases: bool) -> None:
    inputs = _inputs(i, o, biases)
    assert joined(*inputs)
    out, wanted = relu_dense(*inputs), _steps(*inputs)
    leaves = [t for t in inputs if t is not None]
    grad = torch.randn_like(wanted)
    torch.testing.assert_close(out, wanted)
    for got, expected in zip(
        torch.autograd.grad(out, leaves, grad), torch.autograd.grad(wanted, leaves, grad), strict=True
    ):
        torch.testing.assert_close(got, expected)
    with torch.no_grad():
        torch.testing.assert_close(relu_dense(*inputs), wanted)


@needs_native
def test_biases_may_lie_apart_or_be_one_number() -> None:
    z, weight, bias, z_bias = (t.detach() for t in _inputs(24, 10))
    for cut in (lambda t: torch.stack([t, 3 * t], 1)[:, 0], lambda t: t[:1]):
        inputs = [t.requires_grad_() for t in (z, weight, cut(bias), cut(z_bias))]
        out, wanted = relu_dense(*inputs), _steps(*inputs)
        torch.testing.assert_close(out, wanted)
        mine, theirs = (torch.autograd.grad(r.cos().sum(), inputs) for r in (out, wanted))
        torch.testing.assert_close(mine, theirs)


@needs_native
@pytest.mark.parametrize("frozen", [0, 1, 2, 3])
@pytest.mark.parametrize("i", [24, 200])
def test_what_needs_no_gradient_gets_none(i: int, frozen: int) -> None:
    leaves = _inputs(i, 10)
    leaves[frozen].requires_grad_(False)
    relu_dense(*leaves).sum().backward()  # its gradient is one number seen everywhere
    assert [t.grad is None for t in leaves] == [k == frozen for k in range(4)]
    again = [t.detach().requires_grad_(t.requires_grad) for t in leaves]
    _steps(*again).sum().backward()
    for got, expected in zip(leaves, again, strict=True):
        torch.testing.assert_close(got.grad, expected.grad)


@needs_native
def test_second_derivatives_equal_those_of_the_steps() -> None:
    found = []
    for function in (relu_dense, _steps):
        leaves = _inputs(24, 10)
        first = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)


@needs_native
@pytest.mark.parametrize(("i", "o"), [(47, 33), (256, 140)])
def test_threads_and_instruction_sets_change_nothing_but_rounding(i: int, o: int) -> None:
    def run() -> list[torch.Tensor]:
        leaves = [t.detach().float().requires_grad_() for t in _inputs(i, o)]
        out = relu_dense(*leaves)
        out.square().sum().backward()
        return [out.detach(), *(t.grad for t in leaves)]

    before, isa, first = torch.get_num_threads(), native.isa(), run()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))
        for name in native.isas():
            native.set_isa(name)
            for a, b in zip(first, run(), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(a.abs().max()))
    finally:
        torch.set_num_threads(before)
        native.set_isa(isa)


def test_small_matrices_and_other_types_take_the_two_steps() -> None:
    z, weight = torch.randn(5, 24), torch.randn(10, 24)
    torch.testing.assert_close(relu_dense(z, weight), F.linear(F.relu(z), weight))
    half = torch.randn(LEAST, 16, dtype=torch.bfloat16)
    assert not joined(half, torch.randn(8, 16, dtype=torch.bfloat16))


@needs_native
def test_nan_is_not_masked() -> None:
    inputs = _inputs(24, 10)
    with torch.no_grad():
        inputs[0][3, 3] = float("nan")
    out = relu_dense(*inputs)
    assert out[3].isnan().all()
    assert not out[4].isnan().any()
    out[4:].sum().backward()
    assert not inputs[0].grad[4:].isnan().any()


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
