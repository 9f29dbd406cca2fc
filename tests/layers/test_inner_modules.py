"""What stands inside a layer may be replaced or watched by its user: Linears, networks, the aggregation. For every
layer and every module inside, the accelerated one computes what stock does, and calls hooks as often."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor

import stretto
from stretto.layers import record_of
from tests.layers.options import SPECS
from tests.layers.test_convs import data_for, run

PYG_LINEAR = pyg.Linear
EVERY = pytest.mark.parametrize("conv", SPECS, ids=lambda c: c.__name__)


class Linear(torch.nn.Linear):
    """A user's class of a well-known name that computes something else, as libraries of low-rank adapters have it."""

    def __init__(self, i: int, o: int) -> None:
        super().__init__(i, o, bias=False)
        self.down, self.up = torch.nn.Parameter(torch.randn(2, i)), torch.nn.Parameter(torch.randn(o, 2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.down.t() @ self.up.t()


def biased(linear: Any) -> Any:
    return torch.nn.Linear(linear.weight.size(1), linear.weight.size(0))


def without_bias(linear: Any) -> Any:
    return torch.nn.Linear(linear.weight.size(1), linear.weight.size(0), bias=False)


def derived(linear: Any) -> Any:
    return Linear(linear.weight.size(1), linear.weight.size(0))


def other_forward(linear: Any) -> Any:
    own = linear.forward
    linear.forward = lambda *args: 2 * own(*args)
    return linear


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a bias": biased,
    "no bias": without_bias,
    "a subclass": derived,
    "a forward on the instance": other_forward,
}


def layers(conv: Any) -> Any:
    """Every option of a layer as stock, with its usual input."""
    spec = SPECS[conv]
    for options in spec.options:
        torch.manual_seed(1)
        yield spec.make(**dict(options)).double(), data_for(spec, options, "unsorted", spec.takes[0])


def same(stock: Any, data: Any, what: str) -> None:
    """An accelerated layer gives stock's results and gradients, or stock's error."""
    wanted = run(stock, data)
    buffers = {name: value.clone() for name, value in stock.named_buffers()}
    fast = stretto.accelerate(stock)
    for name, value in fast.named_buffers():  # statistics that the call before has moved do not change a result
        value.copy_(buffers[name])
    got = run(fast, data)
    if isinstance(wanted, Exception):
        assert type(got) is type(wanted), f"{what}: stock raises {wanted!r}, ours gives {got!r}"
        return
    if isinstance(got, Exception):
        raise got
    for mine, theirs in zip(got, wanted, strict=True):
        scale = float(theirs.abs().max()) if theirs.numel() else 0.0
        torch.testing.assert_close(
            mine, theirs, rtol=1e-8, atol=1e-8 * max(scale, 1e-3), equal_nan=True, msg=lambda m: f"{what}: {m}"
        )


@pytest.mark.parametrize("change", CHANGES)
@EVERY
def test_linears_inside_may_be_others(conv, change):
    for base, data in layers(conv):
        for name, module in base.named_modules():
            if type(module) not in (torch.nn.Linear, PYG_LINEAR):
                continue
            owner, _, key = name.rpartition(".")
            if key.isdigit() and int(key) > 2:  # one of a long list, all used alike
                continue
            stock = copy.deepcopy(base)
            torch.manual_seed(3)
            stock.get_submodule(owner)._modules[key] = CHANGES[change](stock.get_submodule(name)).double()
            same(stock, data, f"{name} with {change}")


@EVERY
def test_every_other_module_inside_may_have_another_forward(conv):
    """Activations, norms, networks and the aggregation."""
    for base, data in layers(conv):
        for name, module in base.named_modules():
            if not name or type(module) in (torch.nn.Linear, PYG_LINEAR) or "forward" not in dir(type(module)):
                continue
            stock = copy.deepcopy(base)
            inner: Any = stock.get_submodule(name)
            own = inner.forward

            def doubled(*args: Any, own: Any = own, **kwargs: Any) -> Any:
                out = own(*args, **kwargs)
                return {k: 2 * v for k, v in out.items()} if isinstance(out, dict) else 2 * out

            inner.forward = doubled
            same(stock, data, f"{name}, a {type(inner).__name__}")


HOOKS = (
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
)


@EVERY
def test_hooks_inside_are_called_as_often_as_by_stock(conv):
    for base, data in list(layers(conv))[:3]:
        for name, _ in base.named_modules():
            if not name:
                continue
            counts: list[dict[str, int]] = []
            for accelerate in (False, True):
                model, seen = copy.deepcopy(base), dict.fromkeys(HOOKS, 0)
                for hook in HOOKS:

                    def count(*args: Any, hook: str = hook, seen: dict[str, int] = seen) -> None:
                        seen[hook] += 1

                    getattr(model.get_submodule(name), hook)(count)
                if accelerate:
                    stretto.accelerate(model)
                run(model, data)
                counts.append(seen)
            assert counts[1] == counts[0], f"of {name}"


@pytest.mark.parametrize("hook", HOOKS)
def test_one_kind_of_hook_is_enough(hook):
    """That the others are absent hides none of them."""
    for make in (
        lambda: pyg.GCNConv(6, 3),
        lambda: pyg.GATConv(6, 3),
        lambda: pyg.SAGEConv(6, 3),
        lambda: pyg.CGConv(6),
    ):
        fast, seen = stretto.accelerate(make()), []
        linear = next(m for m in fast.modules() if type(m) in (torch.nn.Linear, PYG_LINEAR))
        getattr(linear, hook)(lambda *args, seen=seen: seen.append(1))
        fast(torch.randn(20, 6), torch.randint(20, (2, 60))).sum().backward()
        assert seen == [1]


def test_a_projection_with_a_hook_runs_once():
    fast, seen = stretto.accelerate(pyg.SAGEConv(6, 3, project=True)), []
    fast.lin.register_forward_hook(lambda *args: seen.append(1))
    fast.lin_l.register_forward_hook(lambda *args: None)
    fast(torch.randn(20, 6), torch.randint(20, (2, 60)))
    assert seen == [1]


class Doubled(pyg.SumAggregation):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * super().forward(*args, **kwargs)


@pytest.mark.parametrize("module", [Doubled(), pyg.MaxAggregation(), pyg.aggr.SoftmaxAggregation()])
@EVERY
def test_the_aggregation_may_be_replaced(conv, module):
    for stock, data in list(layers(conv))[:3]:
        if getattr(stock, "aggr", None) in ("add", "sum", "mean", "max", "min") and hasattr(stock, "aggr_module"):
            stock.aggr_module = copy.deepcopy(module)
            same(stock, data, f"aggregation by a {type(module).__name__}")


def test_a_replaced_aggregation_is_told():
    conv = pyg.SAGEConv(6, 3)
    conv.aggr_module = pyg.MaxAggregation()
    stretto.accelerate(conv)(torch.randn(20, 6), torch.randint(20, (2, 60)))
    assert record_of(conv).reason == "aggr is mean, but aggr_module was replaced by a MaxAggregation"


class Own(pyg.MessagePassing):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)


def test_a_layer_outside_the_tables_runs_as_a_product_by_its_new_aggregation():
    stock = Own()
    stock.aggr_module = pyg.MaxAggregation()
    fast, x, edges = stretto.accelerate(copy.deepcopy(stock)), torch.randn(20, 6), torch.randint(20, (2, 60))
    torch.testing.assert_close(fast(x, edges), stock(x, edges))
    (row,) = stretto.report(fast).rows
    assert (row.path, row.reason) == ("fast", "")
