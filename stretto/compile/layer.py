"""A layer as one step of autograd: a plan's forward pass and its gradients, and the ReLUs and Linears after it.

On a device forward and backward are a tape each (kernels/triton/tape.py): what a plan launches is found out once, and
from then on the host does no more than launch it. What cannot be taped runs as on the CPU, kernel by kernel.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stretto import kernels
from stretto.compile.execute import WANTED, Call, Evaluation
from stretto.compile.expr import Node
from stretto.ops import twice
from stretto.ops.attention_layer import aligned
from stretto.ops.autograd_state import is_last, saved_elsewhere
from stretto.ops.batched import one_by_one
from stretto.ops.dense import column_sum

Maybe = Tensor | None
Known = Iterable[tuple[Node, Tensor]]


def run(call: Call, tensors: tuple[Tensor, ...]) -> Tensor:
    """The layer's result; differentiable where a gradient is wanted."""
    if torch.is_grad_enabled() and (call.plan.gradients or any(t.requires_grad for t in tensors)):
        out: Tensor = _layer(call, *tensors)
        return out
    return _forward(call, tensors)[0]


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> Tensor:
        start = time.perf_counter()
        out, *kept = _forward(call, tensors)
        ctx.call, ctx.num, ctx.hooked = call, len(tensors), bool(call.after) and saved_elsewhere()
        ctx.save_for_backward(*_held(call, tensors), *kept)
        ctx.seconds = time.perf_counter() - start
        return out

    @staticmethod
    @one_by_one
    def backward(ctx: Any, *grads: Any) -> Any:
        call: Call = ctx.call
        start = time.perf_counter()
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad[1:]
        tensors, kept = saved[: ctx.num], saved[ctx.num :]
        with kernels.in_given_types(grads[0]):
            if not torch.is_grad_enabled():
                last = bool(call.after) and not ctx.hooked and is_last()  # what was kept may be overwritten
                result = _backward(call, grads[0], needs, last, tensors, kept)
            elif call.after:  # create_graph=True: gradients must be differentiable themselves
                result = twice.gradients(lambda *terms: [_plainly(call, terms)], grads, tensors, needs)
            else:
                result = _gradients(call, grads[0], needs, tensors, again=True)
        if call.timed is not None and call.timed_backward:
            call.timed(ctx.seconds + time.perf_counter() - start)
        return (None, *result)


_layer: Any = _Layer.apply


def _held(call: Call, tensors: Sequence[Tensor]) -> Sequence[Maybe]:
    """What backward may read of the arguments. The others are the user's: to edit in place, or to free."""
    if call.after or kernels.backend(tensors[0].device).tape is not None:  # which are handed all of them
        return tensors
    return [t if name in call.plan.read else None for name, t in zip(call.names, tensors, strict=True)]


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
    result: dict[str, Maybe] = {}
    if not again:
        evaluation.known.update(zip(call.plan.kept, kept, strict=False))
        evaluation.known.update(known)
        grad = _through_after(call, grad, wanted, values, kept[len(call.plan.kept) :], result, last)
    values["G"] = grad
    evaluation.sums = WANTED if wanted.get("bias") and not again else None
    if not again:  # before anything else: what they lay side by side serves the other gradients
        evaluation.take_together(call.plan.gradients_together)
    for leaf, node in call.plan.gradients:
        result[leaf] = evaluation.value(node) if again else evaluation.gradient(node)
    if wanted.get("bias"):
        made = evaluation.sums if evaluation.sums is not WANTED else None
        result["bias"] = made if made is not None else grad.sum(0) if again else column_sum(grad)
    return [result.get(name) for name in call.names]


def _through_after(
    call: Call,
    grad: Tensor,
    wanted: dict[str, bool],
    values: dict[str, Tensor],
    inputs: Sequence[Tensor],
    made: dict[str, Maybe],
    last: bool,
) -> Tensor:
    """The gradient of the plan's result, from that of what the ReLUs and Linears after it made; theirs into `made`."""
    grad = aligned(grad) if call.after else grad
    for k in reversed(range(len(call.after))):
        (weight, bias), z = call.after[k], inputs[k]
        backend = kernels.backend(grad.device)
        need_bias = wanted.get(bias, False)
        if wanted[weight]:
            made[weight], made[bias] = backend.transposed_product(grad, z, relu=True, sums=need_bias)
        elif need_bias:
            made[bias] = column_sum(grad)
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


def _forward(call: Call, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    module, nodes = _taping(call, tensors[0]), call.plan.hoisted_forward
    if module is None:
        return _results(call, tensors)
    return _taped(module, ("forward",), call, lambda c, g, t, kept, known: _results(c, t, known), nodes, tensors)


def _backward(
    call: Call, grad: Tensor, needs: tuple[bool, ...], last: bool, tensors: Sequence[Tensor], kept: Sequence[Tensor]
) -> Sequence[Maybe]:
    module, nodes = _taping(call, grad), call.plan.hoisted_backward
    if module is None:
        return _gradients(call, grad, needs, tensors, kept, last=last)

    def function(call: Call, grad: Tensor, *rest: Any) -> Sequence[Maybe]:
        return _gradients(call, grad, needs, *rest, last=last)

    return _taped(module, ("backward", needs, last), call, function, nodes, tensors, aligned(grad), kept)


def _taped(
    module: kernels.Backend,
    what: tuple[Any, ...],
    call: Call,
    function: Callable[..., Any],
    nodes: Sequence[Node],
    tensors: Sequence[Tensor],
    grad: Maybe = None,
    kept: Sequence[Tensor] = (),
) -> Sequence[Any]:
    """function(call, grad, tensors, kept, known), whose launches are recorded once; known: constant nodes' values."""
    constants = _constants(call, tensors, nodes)
    scales = [t for adj in call.sparse.values() for t in (adj.row_scale, adj.col_scale, adj.weight)]
    many, few, all_kept = itertools.accumulate((len(tensors), len(scales), len(kept)))

    def run(grad: Any, *inputs: Any) -> Any:
        known = zip(nodes, inputs[all_kept:], strict=True)
        return function(_scaled(call, inputs[many:few]), grad, inputs[:many], inputs[few:all_kept], known)

    tapes = module.tape.kept_with(next(iter(call.sparse.values())).graph.csr)
    results: Sequence[Any] = module.tape.run(tapes, _key(what, call), run, (grad, *tensors, *scales, *kept, *constants))
    return results


def _taping(call: Call, like: Tensor) -> kernels.Backend | None:
    """The kernels whose launches can be recorded, where they are those of this call."""
    module = kernels.backend(like.device)
    if module.tape is None or not call.sparse or call.timed is not None:
        return None
    return None if kernels.autocasts(like) else module


def _key(what: tuple[Any, ...], call: Call) -> tuple[Any, ...]:
    """All that launches depend on, besides the tensors."""
    graphs = tuple([adj.graph.number for adj in call.sparse.values()])
    state = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    return *what, call.plan, call.names, call.after, graphs, tuple(call.scalars.values()), state


def _scaled(call: Call, scales: Sequence[Any]) -> Call:
    """The call with these row scales, column scales and weights of its adjacencies."""
    sparse = {}
    for k, (name, adj) in enumerate(call.sparse.items()):
        row, col, weight = scales[3 * k : 3 * k + 3]
        sparse[name] = replace(adj, row_scale=row, col_scale=col, weight=weight)
    return replace(call, sparse=sparse)


def _constants(call: Call, tensors: Sequence[Tensor], nodes: Sequence[Node]) -> list[Tensor]:
    """The values of nodes that are kept across steps."""
    if not nodes:
        return []
    evaluation = Evaluation(call, dict(zip(call.names, tensors, strict=True)))
    return [evaluation.value(node) for node in nodes]
