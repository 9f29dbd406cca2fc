"""scatter, softmax and the global pools under patch(): PyG's results, gradients and, after unpatch(), PyG's objects."""

from __future__ import annotations

import sys
import types
from unittest import mock

import pytest
import torch
import torch_geometric.nn as pyg
import torch_geometric.utils
from torch_geometric.nn import global_add_pool, global_max_pool, global_mean_pool
from torch_geometric.utils import scatter, softmax

import stretto
from stretto.plug import functional

STOCK = (scatter, softmax)


@pytest.fixture
def patched():
    stretto.patch()
    try:
        with mock.patch.object(functional, "segment_reduce", wraps=functional.segment_reduce) as calls:
            yield calls
    finally:
        stretto.unpatch()


def both(function, x):
    """Result and gradient of stock and of ours."""
    found = []
    for on in (False, True):
        leaf = x.clone().requires_grad_()
        if on:
            stretto.patch()
        try:
            out = function(leaf)
        finally:
            if on:
                stretto.unpatch()
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
        found.append((out.detach(), torch.autograd.grad((out * weight).sum(), leaf)[0]))
    return found


def rows(*shape, seed=3):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


BATCHES = {
    "sorted": torch.arange(20).repeat_interleave(15),
    "unsorted": torch.randint(20, (300,), generator=torch.Generator().manual_seed(1)),
    "gaps": torch.randint(4, (300,), generator=torch.Generator().manual_seed(1)) * 3,
    "one graph": torch.zeros(300, dtype=torch.long),
}


@pytest.mark.parametrize("pool", [global_add_pool, global_mean_pool, global_max_pool])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("size", [None, 25])
def test_pools_equal_stock(pool, batch, size):
    x = rows(300, 8)
    x[::7] = 0  # ties at zero share their gradient as stock shares it
    (wanted, dwanted), (got, dgot) = both(lambda t: pool(t, BATCHES[batch], size), x)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dgot, dwanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reduce", ["sum", "add", "mean", "max", "amin", "mul", "any"])
@pytest.mark.parametrize("dim", [0, -2, 1])
def test_scatter_equals_stock(reduce, dim):
    x = rows(300, 8) if dim != 1 else rows(8, 300)
    if reduce == "any":
        x = torch.ones_like(x)  # which of several values is kept is nobody's promise
    index = BATCHES["unsorted"]
    call = lambda t: torch_geometric.utils.scatter(t, index, dim=dim, dim_size=22, reduce=reduce)  # noqa: E731
    for wanted, got in zip(*both(call, x), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("num_nodes", [None, 30])
def test_softmax_equals_stock(num_nodes):
    x = rows(300, 8) * 50
    call = lambda t: torch_geometric.utils.softmax(t, BATCHES["gaps"], num_nodes=num_nodes)  # noqa: E731
    for wanted, got in zip(*both(call, x), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)


def test_pools_run_on_ours(patched):
    for pool in (pyg.global_add_pool, pyg.global_mean_pool, pyg.global_max_pool):
        pool(rows(300, 8), BATCHES["sorted"])
    assert patched.call_count == 3
    pyg.global_add_pool(rows(300, 8), None)
    pyg.global_add_pool(rows(3, 8), torch.zeros(3, dtype=torch.long))  # too small to gain
    assert patched.call_count == 3


def test_wrong_calls_raise_as_stock(patched):
    for call in (
        lambda: torch_geometric.utils.scatter(rows(300, 8), BATCHES["sorted"].view(2, -1)),
        lambda: torch_geometric.utils.scatter(rows(300, 8), BATCHES["sorted"], dim=5),
        lambda: torch_geometric.utils.scatter(rows(300, 8), BATCHES["sorted"], reduce="mode"),
    ):
        with pytest.raises(ValueError, match=r"one-dimensional|must lay|invalid"):
            call()


def _bound():
    """Every module that has bound one of the functions, by identity."""
    wanted = {id(f) for f in STOCK} | {id(f) for f in functional.FUNCTIONS.values()}
    return {
        (module.__name__, name): id(value)
        for module in list(sys.modules.values())
        if isinstance(module, types.ModuleType) and module.__name__ != functional.__name__
        for name, value in list(vars(module).items())
        if type(value) is types.FunctionType and id(value) in wanted
    }


def test_unpatch_puts_every_name_back():
    before = _bound()
    pools = [id(f) for f in (pyg.global_add_pool, pyg.global_mean_pool, pyg.global_max_pool)]
    for _ in range(2):
        stretto.patch()
        assert torch_geometric.utils.scatter is not STOCK[0]
        assert torch_geometric.nn.pool.glob.scatter is functional.FUNCTIONS[STOCK[0]]
        stretto.unpatch()
    assert _bound() == before
    assert [id(f) for f in (pyg.global_add_pool, pyg.global_mean_pool, pyg.global_max_pool)] == pools


def test_a_name_taken_while_patched_is_stock_afterwards():
    stretto.patch()
    taken = torch_geometric.utils.scatter
    stretto.unpatch()
    with mock.patch.object(functional, "segment_reduce", side_effect=AssertionError):
        torch.testing.assert_close(taken(rows(300, 8), BATCHES["gaps"]), scatter(rows(300, 8), BATCHES["gaps"]))


def test_script_reads_the_stock_function(patched):
    scripted = torch.jit.script(torch_geometric.utils.scatter)
    torch.testing.assert_close(
        scripted(rows(300, 8), BATCHES["gaps"], 0, 12, "mean"), STOCK[0](rows(300, 8), BATCHES["gaps"], 0, 12, "mean")
    )
