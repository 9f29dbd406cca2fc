"""Dense products by our kernel against torch's in fp64, and who is chosen to run them."""

import pytest
import torch

from stretto.kernels import cpu_dense, native, tall
from stretto.kernels.tall import TALL, shape_of
from stretto.kernels.tall import tall_product as own_product
from stretto.ops import tall_product
from stretto.ops.pick import picker
from stretto.ops.product import product
from stretto.ops.variants import VARIANTS

pytestmark = pytest.mark.skipif(native.library() is None, reason="libstretto is not loaded")
TORCH, TILES = VARIANTS["product"]["cpu"]
ROWS = TALL + 77
WIDTHS = [(1, 1), (17, 5), (32, 48), (47, 33), (128, 41), (40, 256), (300, 16), (16, 602), (33, 2048)]
DTYPES = {torch.float64: 1e-13, torch.float32: 5e-6}


def check(got: torch.Tensor, wanted: torch.Tensor) -> None:
    error = (got.double() - wanted).abs().max() / wanted.abs().max()
    assert error < DTYPES[got.dtype], error


@pytest.fixture(params=native.isas())
def isa(request):
    before = native.isa()
    native.set_isa(request.param)
    yield request.param
    native.set_isa(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "n"), WIDTHS)
def test_tall(k: int, n: int, dtype: torch.dtype, isa: str) -> None:
    torch.manual_seed(0)
    wide = torch.randn(ROWS, k + 3, dtype=dtype)
    for x in (wide[:, :k], wide[:, :k].contiguous()):  # rows that lie apart, too
        for w in (torch.randn(k, n, dtype=dtype), torch.randn(n, k, dtype=dtype).t(), torch.randn(k, 2 * n)[:, ::2]):
            w, bias, start = w.to(dtype), torch.randn(n, dtype=dtype), torch.randn(ROWS, n, dtype=dtype)
            assert shape_of(x, w, bias, None) == "tall"
            wanted = x.double() @ w.double()
            check(own_product(x, w), wanted)
            check(own_product(x, w, bias), wanted + bias.double())
            apart, one = torch.stack([bias, 3 * bias], 1)[:, 0], bias[:1]
            check(own_product(x, w, apart), wanted + bias.double())
            check(own_product(x, w, one), wanted + one.double())
            into = start.clone()
            assert own_product(x, w, add=into, factor=-0.7) is into
            check(into, start.double() - 0.7 * wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n"), WIDTHS)
def test_sum_over_rows(m: int, n: int, dtype: torch.dtype, isa: str) -> None:
    torch.manual_seed(0)
    for rows in (TALL, ROWS, 3 * tall.ROWS_PER_SUM + 1):
        grad, x = torch.randn(rows, m + 2, dtype=dtype)[:, :m], torch.randn(rows, n + 1, dtype=dtype)[:, 1:]
        assert shape_of(grad.t(), x, None, None) == "sum"
        check(own_product(grad.t(), x), grad.double().t() @ x.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0.03, 0.4, 0.95, 1.0])
def test_rows_of_zeros_are_left_out(share: float, dtype: torch.dtype, isa: str) -> None:
    """Where nodes have no neighbours; their rows come out as those of a product with zero."""
    torch.manual_seed(0)
    x, other = torch.randn(ROWS, 33, dtype=dtype), torch.randn(ROWS, 20, dtype=dtype)
    w, bias = torch.randn(33, 47, dtype=dtype), torch.randn(47, dtype=dtype)
    start = torch.randn(ROWS, 47, dtype=dtype)
    x[torch.rand(ROWS) < share] = 0
    wanted = x.double() @ w.double()
    for given, base in ((None, 0), (bias, bias.double())):
        got, right = own_product(x, w, given), wanted + base
        assert (got.double() - right).abs().max() <= DTYPES[dtype] * max(1, right.abs().max())
    into = start.clone()
    own_product(x, w, add=into, factor=2.0)
    check(into, start.double() + 2 * wanted)
    for one, two in ((x, other), (other, x)):
        right = one.double().t() @ two.double()
        assert (own_product(one.t(), two).double() - right).abs().max() <= DTYPES[dtype] * max(1, right.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "n"), [(17, 5), (32, 48), (40, 256)])
def test_two_products_at_once(k: int, n: int, dtype: torch.dtype, isa: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(ROWS, k, dtype=dtype), torch.randn(ROWS, 3 + k, dtype=dtype)[:, 3:]
    w, v, bias = torch.randn(k, n, dtype=dtype), torch.randn(n, k, dtype=dtype).t(), torch.randn(n, dtype=dtype)
    x[::2] = 0  # nodes without neighbours
    wanted = x.double() @ w.double() + y.double() @ v.double()
    check(own_product(x, w, beside=(y, v)), wanted)
    check(own_product(x, w, bias, beside=(y, v)), wanted + bias.double())
    check(own_product(y, v, bias, beside=(x, w)), wanted + bias.double())
    into = torch.ones(ROWS, n, dtype=dtype)
    check(own_product(x, w, add=into, beside=(y, v)), wanted + 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n"), WIDTHS)
def test_sums_beside_the_product(m: int, n: int, dtype: torch.dtype, isa: str) -> None:
    """Also of rows that need no product, since the other matrix is zero there."""
    torch.manual_seed(0)
    grad, x = torch.randn(ROWS, m + 2, dtype=dtype)[:, :m], torch.randn(ROWS, n, dtype=dtype)
    x[1::2] = 0
    found, sums = tall.sum_product(grad.t(), x, sums=True)
    check(found, grad.double().t() @ x.double())
    wanted = grad.double().sum(0)
    assert (sums.double() - wanted).abs().max() < DTYPES[dtype] * grad.double().abs().sum(0).max()


def test_zero_times_what_is_not_finite() -> None:
    x, w, other = torch.zeros(ROWS, 20), torch.randn(20, 30), torch.randn(ROWS, 10)
    w[2, 7], other[11, 3], other[700, 4] = float("inf"), float("nan"), float("-inf")
    for got, wanted in (
        (own_product(x, w), x @ w),
        (own_product(x.t(), other), x.t() @ other),
        (own_product(other.t(), x), other.t() @ x),
    ):
        assert torch.equal(got.isnan(), wanted.isnan())
        assert torch.equal(got.nan_to_num(), wanted.nan_to_num())


def test_threads_change_no_bit() -> None:
    x, w, grad = torch.randn(70_001, 47), torch.randn(47, 33), torch.randn(70_001, 33)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append((own_product(x, w), own_product(grad.t(), x)))
    finally:
        torch.set_num_threads(before)
    for one, summed in found[1:]:
        assert torch.equal(one, found[0][0])
        assert torch.equal(summed, found[0][1])


def test_nan_and_infinity_go_where_they_go_in_torch() -> None:
    x, w = torch.randn(ROWS, 20), torch.randn(20, 30)
    x[5, 3], x[9, 1], w[2, 7] = float("nan"), float("inf"), float("inf")
    for got, wanted in ((own_product(x, w), x @ w), (own_product(x.t(), x), x.t() @ x)):
        assert torch.equal(got.isnan(), wanted.isnan())
        assert torch.equal(got.isinf(), wanted.isinf())


@pytest.mark.parametrize(
    ("x", "w", "bias"),
    [
        (torch.randn(TALL - 1, 8), torch.randn(8, 8), None),
        (torch.randn(TALL, 8).bfloat16(), torch.randn(8, 8).bfloat16(), None),
        (torch.randn(TALL, 8), torch.randn(8, 8).double(), None),
        (torch.randn(TALL, 16)[:, ::2], torch.randn(8, 8), None),
        (torch.randn(TALL, 8), torch.randn(8, 8), torch.randn(16)[::2]),
        (torch.randn(TALL, 3000).t(), torch.randn(TALL, 8), None),
        (torch.randn(TALL, 1100), torch.randn(1100, 8), None),
        (torch.randn(TALL, 400).t(), torch.randn(TALL, 400), None),
    ],
    ids=["short", "bf16", "mixed", "strided", "strided bias", "wide", "many terms", "large sum"],
)
def test_what_our_kernel_does_not_take(x, w, bias) -> None:
    assert shape_of(x, w, bias, None) is None


@pytest.mark.parametrize("wins", [TORCH, TILES])
def test_the_faster_is_chosen_once_and_kept(monkeypatch, wins) -> None:
    called = []

    def noted(function, module):
        def run(*args, **kwargs):
            called.append(module)
            return function(*args, **kwargs)

        return run

    monkeypatch.setattr(tall_product, "measure", _measured(wins))
    for module, name in ((cpu_dense, "product"), (tall, "tall_product")):
        monkeypatch.setattr(module, name, noted(getattr(module, name), module))
    picker.forget()
    x, w = torch.randn(40_000, 32), torch.randn(32, 48)
    for forgotten in (False, True):  # then from disk
        if forgotten:
            picker.forget()
            monkeypatch.setattr(tall_product, "measure", None)
        called.clear()
        for _ in range(3):
            check(product(x, w), x.double() @ w.double())
        assert called == [cpu_dense if wins is TORCH else tall] * 3


def _measured(wins):
    class Time:
        def __init__(self, best):
            self.best = best

    return lambda calls, **_: {name: Time(1.0 if name == wins.name else 2.0) for name in calls}


def test_a_real_measurement_settles_it() -> None:
    picker.forget()
    x, grad = torch.randn(50_000, 64), torch.randn(50_000, 48)
    for a, b in ((x, torch.randn(64, 48)), (grad.t(), x)):
        check(product(a, b), a.double() @ b.double())
    keys = {key[1]: variant for key, variant in picker.choices() if key[0] == "product"}
    assert set(keys) == {"tall", "sum"}
    assert set(keys.values()) <= {TORCH, TILES}


@pytest.mark.parametrize(
    "setting", [("STRETTO_BACKEND", "torch"), ("STRETTO_TUNE", "off"), "deterministic", "rounded", "small"]
)
def test_torch_runs_where_nothing_may_be_chosen(monkeypatch, setting) -> None:
    monkeypatch.setattr(tall, "tall_product", None)
    picker.forget()
    x, w = torch.randn(TALL if setting == "small" else 40_000, 32), torch.randn(32, 48)
    if isinstance(setting, tuple):
        monkeypatch.setenv(*setting)
    try:
        torch.use_deterministic_algorithms(setting == "deterministic")
        torch.set_float32_matmul_precision("high" if setting == "rounded" else "highest")
        assert torch.equal(product(x, w), x @ w)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
