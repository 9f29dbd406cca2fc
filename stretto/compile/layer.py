"""A layer as one step of autograd: a plan's forward pass and its gradients, and the ReLUs and Linears after it.

On a device forward and backward are a tape each (kernels/tape.py): what a plan launches is found out once, and
from then on the host does no more than launch it. What cannot be taped runs as on the CPU, kernel by kernel.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stretto import kernels
from stretto.compile.execute import WANTED, Call, Evaluation
from stretto.compile.expr import Node
from stretto.kernels import tape
from stretto.ops import twice
from stretto.ops.attention_layer import aligned
from stretto.ops.autograd_state import in_given_types, is_last, saved_elsewhere
from stretto.ops.batched import one_by_one
from stretto.ops.dense import column_sum

Maybe = Tensor | None
Known = Iterable[tuple[Node, Tensor]]


@dataclass
class Noted:
    """One run: what was called, with which tensors, and what it gave."""

    call: Call
    tensors: tuple[Tensor, ...]
    out: Tensor


class Noting(threading.local):
    """Where this thread's runs are noted, if somebody wants to know them."""

    calls: list[Noted] | None = None


noting = Noting()


def run(call: Call, tensors: tuple[Tensor, ...]) -> Tensor:
    """The layer's result; differentiable where a gradient is wanted."""
    out: Tensor = _Layer.apply(call, *tensors) if learns(call, tensors) else plain(call, tensors)[0]
    if noting.calls is not None:
        noting.calls.append(Noted(call, tensors, out))
    return out


def learns(call: Call, tensors: Sequence[Tensor]) -> bool:
    """Whether autograd must see a call."""
    return torch.is_grad_enabled() and (bool(call.plan.gradients) or any(t.requires_grad for t in tensors))


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> Tensor:
        start = 0.0 if call.timed is None else time.perf_counter()
        out, *kept = plain(call, tensors)
        ctx.call, ctx.num, ctx.hooked = call, len(tensors), bool(call.after) and saved_elsewhere()
        ctx.save_for_backward(*_held(call, tensors), *kept)
        ctx.seconds = 0.0 if call.timed is None else time.perf_counter() - start
        return out

    @staticmethod
    @one_by_one
    def backward(ctx: Any, *grads: Any) -> Any:
        call: Call = ctx.call
        start = 0.0 if call.timed is None else time.perf_counter()
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad[1:]
        tensors, kept = saved[: ctx.num], saved[ctx.num :]
        if not torch.is_grad_enabled() and not torch.is_autocast_enabled(grads[0].device.type):
            last = bool(call.after) and not ctx.hooked and is_last()  # what was kept may be overwritten
            found = _backward(call, grads[0], needs, last, tensors, kept)
            if call.timed is not None and call.timed_backward:
                call.timed(ctx.seconds + time.perf_counter() - start)
            return (None, *found)
        with in_given_types(grads[0].device.type):
            if not torch.is_grad_enabled():
                last = bool(call.after) and not ctx.hooked and is_last()
                found = _gradients(call, grads[0], needs, tensors, kept, last=last)
            elif call.after:  # create_graph=True: gradients must be differentiable themselves
                found = twice.gradients(lambda *terms: [_plainly(call, terms)], grads, tensors, needs)
            else:
                found = _gradients(call, grads[0], needs, tensors, again=True)
        if call.timed is not None and call.timed_backward:
            call.timed(ctx.seconds + time.perf_counter() - start)
        return (None, *found)


def _held(call: Call, tensors: Sequence[Tensor]) -> Sequence[Maybe]:
    """What backward may read of the arguments. The others are the user's: to edit in place, or to free."""
    if call.after or tensors[0].is_cuda:  # which are handed all of them
        return tensors
    return [t if name in call.plan.read else None for name, t in zip(call.names, tensors, strict=True)]


# What Function.apply does in the end. Before, it looks for transforms of torch.func, which whoever binds a step has seen.
differentiable: Any = super(torch.autograd.Function, _Layer).apply


# ---- kernel by kernel ----


def _results(call: Call, tensors: Sequence[Tensor], known: Known = ()) -> tuple[Tensor, ...]:
    """The result, and what the gradients read again: nodes of the plan, and what goes into each ReLU after it."""
    evaluation = Evaluation(call, dict(zip(call.names, tensors, strict=True)))
    evaluation.known.update(known)
    out, kept = evaluation.forward()
    for weight, bias in call.after:
        kept.append(out)
        leaves = evaluation.leaves
        out = kernels.backend(out.device).product(out, leaves[weight].t(), leaves.get(bias), relu=True)
    return out, *kept


def _gradients(
    call: Call,
    grad: Tensor,
    needs: Sequence[bool],
    tensors: Sequence[Tensor],
    kept: Sequence[Tensor] = (),
    known: Known = (),
    *,
    again: bool = False,
    last: bool = False,
) -> list[Maybe]:
    """The gradient of every tensor that has one. again: they can be differentiated themselves; last: what goes into the
    ReLUs is overwritten with its gradient."""
    values = dict(zip(call.names, tensors, strict=True))
    wanted = dict(zip(call.names, needs, strict=True))
    evaluation = Evaluation(call, values, again=again)
    found: dict[str, Maybe] = {}
    if not again:
        evaluation.known.update(zip(call.plan.kept, kept, strict=False))
        evaluation.known.update(known)
        grad = _through_after(call, grad, wanted, values, kept[len(call.plan.kept) :], found, last)
    values["G"] = grad
    evaluation.sums = WANTED if wanted.get("bias") and not again else None
    if not again:  # before anything else: what they lay side by side serves the other gradients
        evaluation.take_together(call.plan.gradients_together)
    for leaf, node in call.plan.gradients:
        found[leaf] = evaluation.value(node)
    if wanted.get("bias"):
        made = evaluation.sums if evaluation.sums is not WANTED else None
        found["bias"] = made if made is not None else grad.sum(0) if again else column_sum(grad)
    return [found.get(name) for name in call.names]


def _through_after(
    call: Call,
    grad: Tensor,
    wanted: dict[str, bool],
    values: dict[str, Tensor],
    inputs: Sequence[Tensor],
    found: dict[str, Maybe],
    last: bool,
) -> Tensor:
    """The gradient of the plan's result, from that of what the ReLUs and Linears after it made; theirs into `found`."""
    grad = aligned(grad) if call.after else grad
    for k in reversed(range(len(call.after))):
        (weight, bias), z = call.after[k], inputs[k]
        backend = kernels.backend(grad.device)
        need_bias = wanted.get(bias, False)
        if wanted[weight]:
            found[weight], found[bias] = backend.transposed_product(grad, z, relu=True, sums=need_bias)
        elif need_bias:
            found[bias] = column_sum(grad)
        if k or call.plan.gradients or wanted.get("bias"):
            grad = backend.product(grad, values[weight], gate=z, out=z if last else None)
    return grad


def _plainly(call: Call, tensors: Sequence[Tensor]) -> Tensor:
    """The layer by operations that can be differentiated twice."""
    values = dict(zip(call.names, tensors, strict=True))
    out = Evaluation(call, values, again=True).value(call.plan.forward)
    out = out + values["bias"] if "bias" in values else out
    for weight, bias in call.after:
        out = F.linear(out.relu(), values[weight], values.get(bias))
    return out


# ---- as tapes ----


class Taped:
    """What a call's forward and backward passes need to be recorded and played, found out once for each call."""

    def __init__(self, call: Call, module: ModuleType) -> None:
        self.call, self.tapes = call, tape.kept_with(next(iter(call.sparse.values())).graph.csr)
        scales = [t for adj in call.sparse.values() for t in (adj.row_scale, adj.col_scale, adj.weight)]
        # A processor may read scales in another order, kept for these very tensors: there they are part of the key.
        self.held = [call.plan, *(scales if module is kernels.cpu else [])]
        self.scales = [] if module is kernels.cpu else scales
        state = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
        graphs = tuple([adj.graph.number for adj in call.sparse.values()])
        ids = tuple([id(t) for t in self.held])
        self.key = (id(call.plan), call.names, call.after, graphs, ids, tuple(call.scalars.values()), state)
        self.forward_key = ("forward", *self.key)
        self.passes: dict[Hashable, tuple[Hashable, Callable[..., Sequence[Maybe]]]] = {}

    def forward(self, *given: Any) -> Sequence[Tensor]:
        """tensors, scales and constants -> the result, and what backward reads again."""
        many = len(self.call.names)
        few = many + len(self.scales)
        nodes = self.call.plan.hoisted_forward
        return _results(self._scaled(given[many:few]), given[:many], zip(nodes, given[few:], strict=True))

    def backward(self, needs: tuple[bool, ...], last: bool) -> tuple[Hashable, Callable[..., Sequence[Maybe]]]:
        """The key of a backward pass, and the pass: gradient, tensors, scales, what was kept, constants -> gradients."""
        many = 1 + len(self.call.names)
        few = many + len(self.scales)

        def function(grad: Tensor, *given: Any) -> Sequence[Maybe]:
            given = (None, *given)
            nodes = self.call.plan.hoisted_backward
            end = len(given) - len(nodes)
            known = zip(nodes, given[end:], strict=True)
            call = self._scaled(given[many:few])
            return _gradients(call, grad, needs, given[1:many], given[few:end], known, last=last)

        made = self.passes[needs, last] = (("backward", *self.key, needs, last), function)
        return made

    def _scaled(self, scales: Sequence[Any]) -> Call:
        """The call with these row scales, column scales and weights of its adjacencies."""
        if not scales:
            return self.call
        sparse = {}
        for k, (name, adj) in enumerate(self.call.sparse.items()):
            row, col, weight = scales[3 * k : 3 * k + 3]
            sparse[name] = replace(adj, row_scale=row, col_scale=col, weight=weight)
        return replace(self.call, sparse=sparse)


def plain(call: Call, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The result, without autograd, and what the gradients read again."""
    taped = call.taped
    if taped is None:
        taped = call.taped = _taping(call, tensors[0])
    if taped is None:
        return _results(call, tensors)
    nodes = call.plan.hoisted_forward
    constants = _constants(call, tensors, nodes) if nodes else ()
    inputs = (*tensors, *taped.scales, *constants)
    return tape.run(taped.tapes, taped.forward_key, taped.forward, inputs, taped.held)


def _backward(
    call: Call, grad: Tensor, needs: tuple[bool, ...], last: bool, tensors: Sequence[Tensor], kept: Sequence[Tensor]
) -> Sequence[Maybe]:
    taped = call.taped
    if taped is None:
        return _gradients(call, grad, needs, tensors, kept, last=last)
    nodes = call.plan.hoisted_backward
    constants = _constants(call, tensors, nodes) if nodes else ()
    key, function = taped.passes.get((needs, last)) or taped.backward(needs, last)
    inputs = (
        grad if grad.is_contiguous() and not grad.data_ptr() % 16 else aligned(grad),
        *tensors,
        *taped.scales,
        *kept,
        *constants,
    )
    return tape.run(taped.tapes, key, function, inputs, taped.held)


def _taping(call: Call, like: Tensor) -> Taped | None:
    """How this call is recorded, where its kernels' calls can be."""
    module = kernels.backend(like.device)
    if not hasattr(module, "tape") or not call.sparse or call.timed is not None:
        return None
    if module is kernels.cpu and any(adj.weight is not None for adj in call.sparse.values()):
        return None  # it is kept in the order of rows, for as long as it is not edited
    return None if torch.is_autocast_enabled(like.device.type) else Taped(call, module)


def _constants(call: Call, tensors: Sequence[Tensor], nodes: Sequence[Node]) -> list[Tensor]:
    """The values of nodes that are kept across steps."""
    evaluation = Evaluation(call, dict(zip(call.names, tensors, strict=True)))
    return [evaluation.value(node) for node in nodes]
