"""A^k X of an X that stays the same is computed once, also by layers that keep it themselves: APPNP, LG, SSG, Cheb."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg

import stretto
from stretto.compile import HOIST
from stretto.layers import record_of

LAYERS = {
    "APPNP": lambda: pyg.APPNP(4, 0.2),
    "LG": lambda: pyg.LGConv(),
    "SSG": lambda: pyg.SSGConv(6, 3, alpha=0.1, K=3),
    "SSG widening": lambda: pyg.SSGConv(6, 9, alpha=0.1, K=3),
    "Cheb": lambda: pyg.ChebConv(6, 3, K=5),
    "Cheb widening": lambda: pyg.ChebConv(6, 9, K=5),
}
KEPT_COLUMNS = {"Cheb": 30, "Cheb widening": 30}


@pytest.fixture(autouse=True)
def _fresh(fresh_memo):
    HOIST.clear()
    yield
    HOIST.clear()


def _case(name, n=20):
    torch.manual_seed(0)
    stock = LAYERS[name]().double()
    x = torch.randn(n, 6, dtype=torch.float64)
    edge_index = torch.randint(n, (2, 4 * n))
    return stock, stretto.accelerate(copy.deepcopy(stock)), x, edge_index


def _step(conv, x, edge_index, *rest):
    """Result, and gradients of the weights."""
    conv.zero_grad()
    out = conv(x, edge_index, *rest)
    if out.requires_grad:
        out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in conv.parameters())]


def _same(got, wanted):
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", LAYERS)
def test_no_sum_is_left_from_the_third_step_on(name, sums):
    stock, fast, x, edge_index = _case(name)
    wanted = _step(stock, x, edge_index)
    for step in range(4):
        sums.clear()
        _same(_step(fast, x, edge_index), wanted)
        assert bool(sums) == (step < 2)
        assert record_of(fast).path == "fast"
    assert "kept" in record_of(fast).plan
    assert HOIST.nbytes() == 20 * KEPT_COLUMNS.get(name, 6) * 8


@pytest.mark.parametrize("name", LAYERS)
def test_what_changes_is_computed_anew(name, sums):
    stock, fast, x, edge_index = _case(name)
    for _ in range(3):
        fast(x, edge_index).detach().zero_()  # the user may edit what is handed out
    _same(_step(fast, x, edge_index), _step(stock, x, edge_index))
    x.mul_(2)
    _same(_step(fast, x, edge_index), _step(stock, x, edge_index))
    other = torch.randint(20, (2, 50))
    for index in (other, edge_index, other):
        _same(_step(fast, x, index), _step(stock, x, index))
    weight = torch.rand(50, dtype=torch.float64)
    for _ in range(3):
        _same(_step(fast, x, other, weight), _step(stock, x, other, weight))
        weight.mul_(1.5)


@pytest.mark.parametrize("name", LAYERS)
def test_new_weights_at_the_same_place_are_not_mistaken(name):
    stock, fast, x, edge_index = _case(name)
    for k in range(6):
        weight = torch.full((edge_index.size(1),), 0.5 + k, dtype=torch.float64)
        weight[: 3 * k] = 0.25
        _same(_step(fast, x, edge_index, weight), _step(stock, x, edge_index, weight))
        del weight


@pytest.mark.parametrize("name", LAYERS)
def test_dropout_a_gradient_and_the_budget_prevent_it(name, sums, monkeypatch):
    _, fast, x, edge_index = _case(name)
    for _ in range(4):
        sums.clear()
        fast(torch.nn.functional.dropout(x), edge_index)
        fast(x.clone().requires_grad_(), edge_index)
        assert len(sums) >= 2
    monkeypatch.setenv("STRETTO_HOIST_MB", "0")
    for _ in range(4):
        sums.clear()
        fast(x, edge_index)
        assert sums
    assert HOIST.nbytes() == 0


@pytest.mark.parametrize("name", LAYERS)
def test_what_an_evaluation_kept_serves_training(name):
    stock, fast, x, edge_index = _case(name)
    with torch.inference_mode():
        for _ in range(3):
            fast(x, edge_index)
    _same(_step(fast, x, edge_index), _step(stock, x, edge_index))
