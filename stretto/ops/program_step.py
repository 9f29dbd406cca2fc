"""A Program (program.py) as one step of autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stretto.errors import fail
from stretto.kernels import in_given_types
from stretto.ops.batched import one_by_one
from stretto.ops.program import Program, Unfit


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, program: Program, again: Callable[[], Tensor], *inputs: Tensor) -> Any:
        out, *saved = program.forward(*inputs)
        ctx.program, ctx.again, ctx.inputs = program, again, inputs
        if program.reads_result:  # beside autograd's own, for whoever gets the result may edit it
            ctx.beside, ctx.version, ctx.versions = saved, out._version, [t._version for t in inputs]
            ctx.save_for_backward(*[inputs[k] for k in program.inputs_read])
            ctx.out = out.detach()
        else:
            ctx.save_for_backward(*[inputs[k] for k in program.inputs_read], *saved)
            ctx.out = None
        return out

    @staticmethod
    @one_by_one
    def backward(ctx: Any, *grads: Any) -> Any:
        saved, program = ctx.saved_tensors, ctx.program
        if torch.is_grad_enabled():  # create_graph=True: gradients must be differentiable themselves
            return (None, None, *_by_long_way(ctx, grads[0], again=True))
        if ctx.out is not None:
            if ctx.out._version != ctx.version:  # edited in place since: made again
                if ctx.versions != [t._version for t in ctx.inputs]:
                    fail(
                        "backward: the layer's result and one of its inputs were edited in place since the forward pass"
                    )
                _, *ctx.beside = program.forward(*ctx.inputs)
            saved = (*saved, *ctx.beside)
        grad = grads[0] if grads[0].is_contiguous() else grads[0].contiguous()
        try:
            if torch.is_autocast_enabled("cpu"):  # where such steps run
                with in_given_types(grad):
                    return (None, None, *program.backward(grad, *saved))
            return (None, None, *program.backward(grad, *saved))
        except Unfit:
            with torch.enable_grad():
                return (None, None, *_by_long_way(ctx, grad, again=False))


def _by_long_way(ctx: Any, grad: Tensor, *, again: bool) -> list[Tensor | None]:
    """The gradients of the layer's long way. again: they are to be differentiated themselves."""
    out = ctx.again()
    wanted = [t for t, need in zip(ctx.inputs, ctx.needs_input_grad[2:], strict=True) if need]
    result = iter(torch.autograd.grad(out, wanted, grad, create_graph=again, allow_unused=True))
    return [next(result) if need else None for need in ctx.needs_input_grad[2:]]


# What Function.apply does in the end. Before, it looks for transforms of torch.func, of which a bound step has none.
step: Any = super(torch.autograd.Function, _Step).apply
