"""Kernel: an operator declared once, in its own file; autograd, torch.library, tests, costs and benchmarks follow.

`differentiable` alone makes a step of autograd of two functions, for steps that torch.compile need not see as one.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from stretto.graph.traced import TracedGraph
from stretto.ops import library, twice
from stretto.ops.batched import one_by_one
from stretto.ops.cost import Formula

Maybe = Tensor | None
# gradient(graph, saved, grads, needs, *options): one gradient, or None, for every tensor argument.
Gradient = Callable[..., Sequence[Maybe]]
# saves(tensors, results, needs): what gradients read again.
Saves = Callable[[Sequence[Any], Any, Sequence[bool]], Sequence[Maybe]]


@dataclass(frozen=True)
class Sample:
    """One way to call an op: positional tensors (those that may carry gradients are floating) and options."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __str__(self) -> str:
        shapes = ["x".join(map(str, a.shape)) for a in self.args if isinstance(a, torch.Tensor)]
        options = [f"{k}={v}" for k, v in self.kwargs.items() if not isinstance(v, torch.Tensor)]
        return ",".join(shapes + options)


def step_of_autograd(
    name: str,
    run: Callable[..., Any],
    gradient: Gradient,
    *,
    again: Gradient | None = None,
    saves: Saves | int | None = None,
    tensors: int | None = None,
    shown: int | None = 1,
) -> Callable[..., Any]:
    """A step of autograd, to be called as run(first, *tensors, *options); first is a graph, or whatever is no tensor.

    gradient makes the gradients; if it cannot be differentiated, again makes them where that is wanted. tensors: their
    number; None: all that follows `first` are. saves: what gradients read, or how many of the tensors; None: all.
    shown: how many of run's results are handed out; None: all.
    """

    def forward(ctx: Any, first: Any, *arguments: Any) -> Any:
        results = run(first, *arguments)
        inputs = arguments if tensors is None else arguments[:tensors]
        ctx.first, ctx.count, ctx.options = first, len(inputs), arguments[len(inputs) :]
        saved = saves(inputs, results, ctx.needs_input_grad[1:]) if callable(saves) else inputs[:saves]
        ctx.save_for_backward(*saved)
        if type(results) is not tuple:
            return results
        if shown == 1:
            return results[0]
        ctx.set_materialize_grads(False)
        return results[:shown]

    def backward(ctx: Any, *grads: Any) -> Any:
        needs = ctx.needs_input_grad[1 : 1 + ctx.count]
        made = gradient if again is None or not torch.is_grad_enabled() else again
        return None, *made(ctx.first, ctx.saved_tensors, grads, needs, *ctx.options), *([None] * len(ctx.options))

    body = {"forward": staticmethod(forward), "backward": staticmethod(one_by_one(backward))}
    function: Any = types.new_class(name, (torch.autograd.Function,), exec_body=lambda scope: scope.update(body))
    apply: Callable[..., Any] = function.apply
    return apply


def differentiable(name: str, run: Callable[..., Any], gradient: Gradient, **options: Any) -> Callable[..., Any]:
    """A function whose calls are steps of autograd (step_of_autograd) where it must see them, else run alone."""
    apply = step_of_autograd(name, run, gradient, **options)
    count, shown = options.get("tensors"), options.get("shown", 1)

    def call(first: Any, *arguments: Any) -> Any:
        if forward_ad._current_level >= 0:
            return apply(first, *arguments)
        if torch.is_grad_enabled():
            for tensor in arguments[:count]:
                if tensor is not None and tensor.requires_grad:
                    return apply(first, *arguments)
        results = run(first, *arguments)
        return results[0] if shown == 1 and type(results) is tuple else results

    return call


def through(plain: Callable[..., Any]) -> Gradient:
    """Gradients that can be differentiated, by a kernel's plain PyTorch: plain(graph, *tensors, *options).

    What is saved begins with the tensors.
    """

    def again(graph: Any, saved: Any, grads: Any, needs: Any, *options: Any) -> Sequence[Maybe]:
        def make(*tensors: Any) -> Sequence[Maybe]:
            results = plain(graph, *tensors, *options)
            return results if isinstance(results, (tuple, list)) else [results]

        return twice.gradients(make, grads, saved[: len(needs)], needs)

    return again


@dataclass(eq=False)
class Kernel:
    """One operator: the node in torch.library, its step of autograd, and the public op where it is one.

    name        of the node; of the public op too, where that has no name of its own
    arguments   after the graph, as torch.library writes them: tensors first, then options
    run         run(graph, *arguments) -> results; no autograd
    shapes      the same on tensors that have a shape alone
    gradient    gradient(graph, saved, grads, needs, *options); saved begins with the tensors, or others of their shapes
    again       the same by differentiable operations, where gradient is a kernel of its own; None: it is made of ops
    saves       saves(tensors, results, needs): what gradients read; None: the tensors
    results     how many there are; of these, `shown` are handed out and may carry gradients
    infer       run(...) for callers that want no gradient, where less is to be done for them
    on_graph    whether a graph comes first; else None is handed to run and gradient in its place

    function(*args, **kwargs) is the public op; reference, of the same signature, in plain differentiable PyTorch;
    samples(graph, dtype): calls that together reach every option; flops and bytes take the arguments of the function:
    arithmetic operations, and compulsory bytes when every gathered row is read once per edge. costs: of the backends'
    functions, by their names, as they are called.
    """

    name: str
    arguments: str = ""
    run: Callable[..., Any] | None = None
    shapes: Callable[..., Any] | None = None
    gradient: Gradient | None = None
    again: Gradient | None = None
    saves: Saves | None = None
    results: int = 1
    shown: int = 1
    infer: Callable[..., Any] | None = None
    on_graph: bool = True
    function: Any = None
    reference: Any = None
    samples: Any = None
    flops: Any = None
    bytes: Any = None
    costs: Mapping[str, Formula] = field(default_factory=dict)

    def __post_init__(self) -> None:
        words = [word.split(" ")[0] for word in self.arguments.split(", ")]
        self.tensors = sum(word.startswith("Tensor") for word in words)
        if self.run is None:
            return
        assert self.gradient is not None
        self.step = step_of_autograd(
            self.name,
            self.run,
            self.gradient,
            again=self.again,
            saves=self.saves,
            tensors=self.tensors,
            shown=self.shown,
        )
        self.plainly = self.infer or self.run
        self._register()

    def __call__(self, graph: Any, *arguments: Any) -> Tensor:
        """The first result: through torch.library where that must see the call, through autograd where it must, else
        the kernel alone."""
        if torch.compiler.is_compiling():
            return self.node(graph, *arguments)[0]
        records, learns = forward_ad._current_level >= 0, torch.is_grad_enabled()
        for tensor in arguments[: self.tensors]:
            if tensor is None:
                continue
            kind = type(tensor)
            if kind is not Tensor and kind is not torch.nn.Parameter:
                return self.node(graph, *arguments)[0]
            records = records or (learns and tensor.requires_grad)
        if torch._C._len_torch_dispatch_stack() and torch._C._get_dispatch_mode(library._FAKE) is not None:
            return self.node(graph, *arguments)[0]
        out = self.step(graph, *arguments) if records else self.plainly(graph, *arguments)
        first: Tensor = out[0] if type(out) is tuple else out
        return first

    def node(self, graph: Any, *arguments: Any) -> tuple[Tensor, ...]:
        """All results, through torch.library."""
        node = getattr(torch.ops.stretto, self.name)
        given = [list(a) if type(a) is tuple else a for a in arguments]
        if self.on_graph:
            given = [graph.handle, graph.num_rows, graph.num_cols, graph.num_edges, *given]
        results = node(*given)
        return (results,) if self.results == 1 else results

    # ---- torch.library ----

    def _register(self) -> None:
        over = "Tensor handle, SymInt num_rows, SymInt num_cols, SymInt num_edges, " if self.on_graph else ""
        made = "Tensor" if self.results == 1 else f"({', '.join(['Tensor'] * self.results)})"
        library.add(f"{self.name}({over}{self.arguments}) -> {made}", self._run_node, self._fake_node)
        options = "".join(", " + word for word in self.arguments.split(", ")[self.tensors :])
        if self.again is not None:
            saved = "Tensor?[] saved, Tensor?[] grads, bool[] needs"
            library.add(f"{self.name}_grad({over}{saved}{options}) -> Tensor[]", self._run_grad, _fake_grad)
        name = f"stretto::{self.name}"
        torch.library.register_autograd(name, self._backward, setup_context=self._save, lib=library.LIBRARY)

    def _apart(self, arguments: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
        """The graph of a node's arguments, by its handle and sizes, and the others."""
        if not self.on_graph:
            return None, tuple(arguments)
        like = next((a for a in arguments[4:] if isinstance(a, Tensor)), arguments[0])
        handle, num_rows, num_cols, num_edges = arguments[:4]
        return TracedGraph(handle, num_rows, num_cols, num_edges, like.device), tuple(arguments[4:])

    def _run_node(self, *arguments: Any) -> Any:
        traced, given = self._apart(arguments)
        assert self.run is not None
        results = self.run(None if traced is None else library.graph_of(traced.handle), *_with_tuples(given))
        if self.results == 1:
            return results
        like = next(r for r in results if r is not None)
        return tuple(like.new_empty(0) if r is None else r for r in results)

    def _fake_node(self, *arguments: Any) -> Any:
        graph, given = self._apart(arguments)
        assert self.shapes is not None
        return self.shapes(graph, *given)

    def _run_grad(self, *arguments: Any) -> list[Tensor]:
        given = arguments[4:] if self.on_graph else arguments
        saved, grads, needs, *options = given
        graph = library.graph_of(arguments[0]) if self.on_graph else None
        assert self.gradient is not None
        made = self.gradient(graph, saved, grads, tuple(needs), *_with_tuples(options))
        like = next(t for t in (*grads, *saved) if t is not None)
        return [like.new_empty(0) if g is None else g for g in made]

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        graph, given = self._apart(inputs)
        ctx.sizes = inputs[1:4]
        tensors, ctx.options = given[: self.tensors], given[self.tensors :]
        ctx.needs = ctx.needs_input_grad[4 if self.on_graph else 0 :][: self.tensors]
        if self.results > 1:
            ctx.mark_non_differentiable(*output[self.shown :])
            ctx.set_materialize_grads(self.shown == 1)
        saved = tensors if self.saves is None else self.saves(tensors, output, ctx.needs)
        ctx.save_for_backward(*([graph.handle] if self.on_graph else []), *saved)

    def _backward(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        saved, grads, options = list(ctx.saved_tensors), grads[: self.shown], ctx.options
        over: Any = [saved.pop(0), *ctx.sizes] if self.on_graph else []
        if self.again is not None:
            grad_node = getattr(torch.ops.stretto, f"{self.name}_grad")
            made = grad_node(*over, saved, list(grads), list(ctx.needs), *options)
            result = [g if need else None for g, need in zip(made, ctx.needs, strict=True)]
        else:  # made of ops, which make nodes of their own where they are traced
            graph: Any = None
            like = next(g for g in grads if g is not None)
            if self.on_graph:
                handle, num_rows, num_cols, num_edges = over
                traced = TracedGraph(handle, num_rows, num_cols, num_edges, like.device)
                graph = traced if library.traced(like) else library.graph_of(handle)
            assert self.gradient is not None
            result = list(self.gradient(graph, saved, grads, ctx.needs, *_with_tuples(options)))
        return (*([None] * len(over)), *result, *([None] * len(options)))


def _with_tuples(options: Sequence[Any]) -> list[Any]:
    """torch.library hands lists over; what is hashed or kept is to be a tuple."""
    return [tuple(option) if isinstance(option, list) else option for option in options]


def _fake_grad(*arguments: Any) -> list[Tensor]:
    """One gradient for every tensor, empty where none is wanted."""
    at = next(k for k, a in enumerate(arguments) if isinstance(a, (list, tuple)))
    saved, grads, needs = arguments[at : at + 3]
    like = next(t for t in (*grads, *saved) if t is not None)
    return [
        like.new_empty(0) if not need or t is None else t.new_empty(t.shape)
        for t, need in zip(saved, needs, strict=False)
    ]
