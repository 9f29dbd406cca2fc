"""attention_layer: projections, scores, attention and bias of one layer as one step of autograd, on a device.

In small pieces the host takes longer to launch such a layer than the device to compute it. Here the second call of a
signature is recorded and later ones are played from the tape (kernels/triton/tape.py). fp32; what does not fit goes
through `projections` and `attention`, which compute the same.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from stretto import kernels
from stretto.graph import Graph
from stretto.ops import library, twice
from stretto.ops.attention import attention
from stretto.ops.autograd_state import is_last, saved_elsewhere
from stretto.ops.batched import one_by_one
from stretto.ops.product import MOST_INNER, by_sixteen, stays_fp32
from stretto.ops.projections import plus, projections

Maybe = Tensor | None


def takes(graph: Graph, x: Tensor, width: int, *parameters: Maybe) -> bool:
    """Whether a layer of heads of this width is made for attention_layer."""
    layers = kernels.backend(x.device).attention_layer
    if layers is None or x.dim() != 2 or not x.size(0) or not graph.num_edges or graph.num_rows != graph.num_cols:
        return False
    if width % 4 or width > layers.WIDEST or x.size(1) > MOST_INNER or x.device != graph.device:
        return False
    if not by_sixteen(x) or not stays_fp32(x) or saved_elsewhere():
        return False
    if library.traced(x) or forward_ad._current_level >= 0:
        return False
    for t in parameters:
        if t is not None and (t.dtype != x.dtype or t.device != x.device or not t.is_contiguous()):
            return False
    return True


def attention_layer(
    graph: Graph,
    form: str,
    heads: int,
    x: Tensor,
    bias: Maybe,
    parameters: tuple[Maybe, ...],
    *,
    slope: float = 0.2,
    scale: float = 1.0,
    dropout: float = 0.0,
) -> Tensor:
    """The result [n, h * f] of a layer that `takes` agrees to; kernels/triton/attention_layer.py names the forms.

    x [n, i], bias [h * f]; parameters as listed there.
    """
    module = kernels.backend(x.device)
    last = parameters[0]
    assert last is not None
    layer = module.attention_layer.Layer(form, heads, last.size(0) // heads, slope, scale, dropout)
    seed = torch.randint(2**63 - 1, (1,), device=x.device) if dropout > 0 else None
    if library.recorded(x, bias, *parameters):
        out: Tensor = _attention_layer(graph, layer, seed, x, bias, *parameters)
        return out
    return _forward(graph, layer, seed, x, bias, *parameters)[0]


def _forward(graph: Graph, layer: Any, seed: Maybe, x: Tensor, bias: Maybe, *parameters: Maybe) -> tuple[Tensor, ...]:
    module = kernels.backend(x.device)
    csr = graph.edge_csr
    function = functools.partial(module.attention_layer.forward, csr, layer)
    tapes, inputs = module.tape.kept_with(csr), (x, seed, bias, *parameters)
    results: tuple[Tensor, ...] = module.tape.run(tapes, ("forward", layer), function, inputs)
    return results


class _AttentionLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: Graph, layer: Any, seed: Any, x: Tensor, bias: Any, *parameters: Any) -> Tensor:
        out, *kept = _forward(graph, layer, seed, x, bias, *parameters)
        ctx.graph, ctx.layer, ctx.seed = graph, layer, seed
        ctx.save_for_backward(x, bias, *parameters)
        # Beside autograd's own: they may be overwritten by backward, and the result by whoever gets it.
        ctx.kept, ctx.out, ctx.version = kept, out.detach(), out._version
        return out

    @staticmethod
    @one_by_one
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        graph, layer = ctx.graph, ctx.layer
        x, bias, *parameters = ctx.saved_tensors
        needs = ctx.needs_input_grad[3:]
        if torch.is_grad_enabled():  # to be differentiated again

            def again(x: Tensor, bias: Any, *parameters: Any) -> list[Tensor]:
                return [plainly(graph, layer, ctx.seed, x, bias, parameters)]

            return None, None, None, *twice.gradients(again, grads, (x, bias, *parameters), needs)
        out, kept = ctx.out, ctx.kept
        if out._version != ctx.version:  # edited in place since: made again
            out, *kept = _forward(graph, layer, ctx.seed, x, bias, *parameters)
        last = is_last()
        if last:
            ctx.out = ctx.kept = None
        module = kernels.backend(x.device)
        csr, csr_t = graph.edge_csr, graph.T.edge_csr
        function = functools.partial(module.attention_layer.backward, csr, csr_t, layer, needs, last)
        inputs = (aligned(grad), x, ctx.seed, bias, out, *parameters, *kept)
        tapes = module.tape.kept_with(csr)
        return None, None, None, *module.tape.run(tapes, ("backward", layer, needs, last), function, inputs)


_attention_layer: Any = _AttentionLayer.apply


def aligned(grad: Tensor) -> Tensor:
    """The gradient as kernels read it: contiguous and aligned."""
    return (
        grad
        if grad.is_contiguous() and grad.data_ptr() % 16 == 0
        else grad.clone(memory_format=torch.contiguous_format)
    )


def plainly(graph: Graph, layer: Any, seed: Maybe, x: Tensor, bias: Maybe, parameters: Any) -> Tensor:
    """The same by ops that can be differentiated twice."""
    shape = (-1, layer.heads, layer.width)
    options = {"form": layer.form, "negative_slope": layer.slope, "dropout": layer.dropout, "seed": seed}
    if layer.form == "gat":
        weight, att_src, att_dst = parameters
        v = projections(x, [(weight, None)])[0].view(shape)
        left, right = (v * att_dst).sum(-1), (v * att_src).sum(-1)
        return _flat(attention(graph, v, left, right, **options, bias=bias))
    maps = [(parameters[k], parameters[k + 1]) for k in range(0, len(parameters) - 1, 2)]
    if layer.form == "gatv2":
        left, right = (t.view(shape) for t in projections(x, maps))
        return _flat(attention(graph, None, left, right, att=parameters[4].view(shape[1:]), **options, bias=bias))
    query, key, value, root = projections(x, maps)
    query, key, value = (t.view(shape) for t in (query, key, value))
    return plus(_flat(attention(graph, value, query, key, scale=layer.scale, **options)), root)


def _flat(out: Any) -> Tensor:
    flat: Tensor = out if out.dim() == 2 else out.flatten(1)
    return flat
