"""A forward with its chains folded (layers/fold_models.py): it runs as it is written, with a stand-in for self.

Of that the layer is called with its own arguments and makes the result of the whole chain. What the forward is given
instead, until the last module of the chain is called, is a tensor of no values, which only the next module of the chain
may take. Whatever else is done with it, or whoever holds it in the end, shows that the trace was wrong about this
forward, whatever misled it: the result is thrown away, and the call is made again with nothing folded.
"""

from __future__ import annotations

import types
import weakref
from typing import Any, NoReturn

import torch
import torch_geometric.nn as pyg
from torch import Tensor

from stretto.kernels import autocasts
from stretto.kernels.looks import look
from stretto.layers import folds, models, relations
from stretto.layers.base import hooked, is_stock
from stretto.layers.forward_trace import Chain, InTurn, Modules, Trace

DIFFERENT = "the model's forward did something else than its trace"


class Broken(Exception):
    """A forward did something else than its trace: what it has computed is thrown away."""


class Promise(torch.Tensor):
    """Stands for a value that is never made: that of a layer, or of a norm, whose next module is folded in."""

    fold: Any

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        _break((args, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        _break((args, kwargs))


def _break(given: Any) -> NoReturn:
    """Broken, also where the forward catches it: every fold whose promise was read knows."""
    for found in _promises(given):
        found.__dict__["fold"].broken = True
    raise Broken(DIFFERENT)


def _promises(value: Any) -> list[Any]:
    if type(value) is Promise:
        return [value]
    inner = value.values() if type(value) is dict else value if isinstance(value, (tuple, list)) else ()
    return [found for one in inner for found in _promises(one)]


class Fold:
    """A layer with what follows it: the result of all of them where that can be, else its own."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.done = False  # whether anything was folded
        self.broken = False  # whether a promise was read
        self.out: Tensor | None = None  # the chain's result, until its last module gives it
        self.left: list[Any] = []  # the modules that are folded in and have not been called yet
        self.promises: list[weakref.ref[Promise]] = []
        self.state: list[Any] = []  # of those modules, as it was folded in

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out, self.left = _evaluated(self.chain, args, kwargs)
        self.done = out is not None
        if out is None:
            return self.chain.layer(*args, **kwargs)
        self.out, self.state = out, _state(self.left)
        return self._promise()

    def passed(self, module: Any, args: Any, kwargs: Any) -> Any:
        """What a module of the chain gives."""
        if not any(one is module for one in self.left):
            return module(*args, **kwargs)
        given = not kwargs and len(args) == 1 and args[0] is self.promises[-1]()
        as_before = not torch.is_grad_enabled() and _state(self.left) == self.state[-len(self.left) :]
        if not given or self.left[0] is not module or not as_before:
            self.broken = True
            raise Broken(DIFFERENT)
        self.left.pop(0)
        if self.left:
            return self._promise()
        out, self.out = self.out, None  # let go: the forward may have no more use for it
        return out

    def kept(self) -> bool:
        """Whether the forward went as its trace, and nobody holds a promise any more."""
        return not self.broken and not self.left and all(promise() is None for promise in self.promises)

    def _promise(self) -> Promise:
        assert self.out is not None
        shape, like = (self.out.size(0), 0), self.out
        made = torch.Tensor._make_wrapper_subclass(Promise, shape, dtype=like.dtype, device=like.device)
        made.__dict__["fold"] = self
        self.promises.append(weakref.ref(made))
        return made


def _state(modules: list[Any]) -> list[Any]:
    """Of each module what its result depends on: what every tensor looks like, and its mode."""
    return [
        [(id(t), look(t)) for t in (*m.parameters(), *m.buffers())]
        + [getattr(inner, name, None) for inner in m.modules() for name in ("training", "eps")]
        for m in modules
    ]


class _Passed:
    """A module that a layer before it may have done the work of."""

    def __init__(self, module: Any, fold: Fold) -> None:
        self.module, self.fold = module, fold

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fold.passed(self.module, args, kwargs)


class _StandIn:
    """What a forward is given for self: it finds there all that the model has, some of it as it is to be called."""

    __slots__ = ("told",)

    def __init__(self, *told: Any) -> None:
        object.__setattr__(self, "told", told)

    def __getattribute__(self, name: str) -> Any:
        model, given, methods = object.__getattribute__(self, "told")
        if name in given:
            return given[name]
        return types.MethodType(methods[name], self) if name in methods else getattr(model, name)


def run(model: Any, function: Any, trace: Trace, folding: list[Fold], args: Any, kwargs: Any) -> Any:
    """function(model, *args, **kwargs) with its chains folded, or Broken."""
    roles: dict[int, Any] = {id(fold.chain.layer): fold for fold in folding}
    roles.update((id(module), _Passed(module, fold)) for fold in folding for module in fold.chain.after)
    names = {name for where, name, _ in trace.constants if where == "_modules"}
    given = {name: _with(roles, model._modules[name]) for name in names}
    out = function(_StandIn(model, given, trace.methods), *args, **kwargs)
    if not all(fold.kept() for fold in folding) or not trace.stands(model):  # what it decides by may change on the way
        raise Broken(DIFFERENT)
    return out


def _with(roles: dict[int, Any], module: Any) -> Any:
    """A module as the forward finds it; lists and sequences as the trace has seen them."""
    if type(module) not in (torch.nn.ModuleList, torch.nn.Sequential) or hooked(module):
        return roles.get(id(module), module)
    kind = Modules if type(module) is torch.nn.ModuleList else InTurn
    return kind(_with(roles, inner) for inner in module._modules.values())


def _evaluated(chain: Chain, args: Any, kwargs: Any) -> tuple[Tensor | None, list[Any]]:
    """The result of a layer with what follows it folded in, and the modules that were; (None, []): it cannot be."""
    of = relations.summands(chain.layer, args, kwargs)
    if of is None:
        return _attended(chain, args, kwargs)
    width = of.weight.size(0)
    norm, linear = chain.norm, chain.linear
    if not folds.pays(of.adj.graph.num_rows, width) or (norm is not None and not folds.fits(norm, width, of.x)):
        return None, []
    if linear is not None and (linear.weight.size(1) != width or linear.weight.dtype != of.x.dtype):
        linear = None
    if norm is None and linear is None:
        return None, []
    return models.evaluated(chain.layer, of, norm, linear), Chain(chain.layer, norm, linear).after


def _attended(chain: Chain, args: Any, kwargs: Any) -> tuple[Tensor | None, list[Any]]:
    """The same of a GATConv."""
    conv, norm = chain.layer, chain.norm
    if norm is None or not is_stock(conv, pyg.GATConv) or len(args) != 2 or kwargs or type(args[0]) is not Tensor:
        return None, []
    x, edge_index = args
    width = conv.out_channels * (conv.heads if conv.concat else 1)
    if autocasts(x) or not folds.pays(x.size(0), width) or not folds.fits(norm, width, x):
        return None, []
    out = models.attended_of(conv, norm, x, edge_index)
    return out, [] if out is None else [norm]
