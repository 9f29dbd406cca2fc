"""attention: score, softmax over a node's incoming edges and weighted sum in one pass; no edge x channel array is made.

Forward keeps two numbers per node and head (the largest score, the inverse of the sum of exponentials); backward
computes the weights again from them, with the scores computed again too, or kept (kept_scores.py). A GATConv trains
21 times as fast as stock on rmat:17, in a twentieth of the memory (benchmarks/results/layers.csv).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stretto.graph import Graph
from stretto.kernels import accumulate_type, backend, on_host, reference_attention
from stretto.kernels.attention import TENSORS, Attention
from stretto.ops import kept_scores, library, twice
from stretto.ops.attention_arguments import check, check_numbers, default_scale, promoted, seed_of
from stretto.ops.autograd_state import is_last
from stretto.ops.batched import one_by_one
from stretto.ops.checks import check_values
from stretto.ops.cost import Cost, row_bytes
from stretto.ops.folded_bias import takes_bias
from stretto.ops.kernel import Kernel, Sample
from stretto.ops.projections import plus
from stretto.ops.replay import mixed

Results = Tensor | tuple[Tensor, ...]
Tensors = tuple[Tensor | None, ...]  # in the order of TENSORS
_plainly = reference_attention.differentiable


def attention(
    graph: Graph,
    v: Tensor | None,
    left: Tensor | None = None,
    right: Tensor | None = None,
    edge: Tensor | None = None,
    *,
    form: str = "gat",
    att: Tensor | None = None,
    attr: Tensor | None = None,
    query: Tensor | None = None,
    negative_slope: float = 0.2,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: Tensor | int | None = None,
    return_weights: bool = False,
    dropped: bool = False,
    bias: Tensor | None = None,
) -> Results:
    """Sum over neighbours of alpha * v with alpha = softmax of a score over a node's incoming edges, per head.

    graph [n, m], v [m, h, f] (or [m, 1, f], one row for all heads) -> [n, h, f]; nodes without edges give 0.
      form    left       right      edge       score of edge (i, j)
      gat     [n, h]     [m, h]     [E, h]     leaky_relu(left_i + right_j + edge)                    GATConv
      gatv2   [n, h, k]  [m, h, k]  [E, h, k]  att [h, k] . leaky_relu(left_i + right_j + edge)       GATv2Conv
      dot     [n, h, k]  [m, h, k]  -          scale * (left_i . right_j + query_i . attr)            TransformerConv
      given   -          -          [E, h]     edge
      weight  -          -          [E, h]     no softmax: edge is alpha itself
    v None (gatv2, dot): v is right. Absent edge terms count as 0. scale: 1 / sqrt(k) unless given.
    attr [E, d], query [n, h, d] (dot): the result is (out, sum of alpha * attr [n, h, d]); a projection of attr is then
    one product per node. right may be [m, 1, k].
    dropout: of alpha, by a mask that is a function of (seed, edge, head): distributed as torch's, but other bits.
    seed: drawn from torch's generator of v's device unless given. bias [h * f]: the result is [n, h * f], plus bias.
    return_weights: alpha [E, h] in the order of edge_index follows the
    result; it carries gradients; `dropped`: whether it is alpha after dropout (GATConv) or before (TransformerConv).
    """
    if v is right and form in ("gatv2", "dot"):
        v = None
    tensors = promoted(graph, form, (v, left, right, att, edge, attr, query))
    if bias is not None:
        check_values("attention", "bias", bias, graph.device)
    scale = default_scale(form, left) if scale is None else scale
    check_numbers(negative_slope=negative_slope, scale=scale, dropout=dropout)
    check(graph, form, tensors)
    key = seed_of(seed, graph.device) if dropout > 0 else None
    plan = Plan(form, float(negative_slope), float(scale), float(dropout), return_weights, dropped, key)
    out, out_attr, alpha = _results(graph, plan, bias, tensors)
    if bias is not None and out.dim() == 3:
        out = plus(out.flatten(1), bias)
    results = (out, *([out_attr] if attr is not None else []), *([alpha] if return_weights else []))
    return out if len(results) == 1 else results


class Plan(NamedTuple):
    """All of a call but its tensors: form, numbers, whether alpha is a result, and is after dropout, and the seed."""

    form: str
    slope: float
    scale: float
    dropout: float
    weights: bool
    dropped: bool
    seed: Tensor | None

    def packed(self, tensors: Tensors, bias: Tensor | None = None, scores: Tensor | None = None) -> Attention:
        """What kernels take."""
        fields: tuple[Any, ...] = (*tensors, self.slope, self.scale, self.dropout)
        a = Attention(self.form, *fields)
        a.dropped, a.scores, a.bias = self.dropped, scores, bias
        if self.seed is not None:
            if on_host(self.seed) or not backend(a.values.device).device_seed:
                a.seed = mixed(int(self.seed))
            else:  # read by the kernels: nothing waits, and a captured graph draws a new one at every replay
                a.seed_at = self.seed
        return a


def _results(graph: Graph, plan: Plan, bias: Tensor | None, tensors: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    """out, with the bias in it where a kernel takes one, out_attr and alpha; what is not needed is empty."""
    learns = bias is not None and bias.requires_grad
    for tensor in tensors:
        if tensor is not None and library.traced(tensor):
            out, out_attr, alpha, *_ = KERNEL.node(graph, *tensors, plan.seed, *plan[:-1])
            return out, out_attr, alpha
        learns = learns or (tensor is not None and tensor.requires_grad)
    learns = learns and torch.is_grad_enabled()
    fused = bias if bias is not None and takes_bias(tensors, bias, learns) else None
    if learns:
        results: tuple[Tensor, Tensor, Tensor] = _attend(graph, plan, fused, *tensors)
        return results
    return run(graph, plan, tensors, fused)[:3]


def cosine_attention(
    graph: Graph, x: Tensor, beta: Tensor | float, x_dst: Tensor | None = None, **options: Any
) -> Results:
    """AGNNConv: alpha = softmax of beta * cos(x_i, x_j), then the weighted sum of x_j.

    graph [n, m], x [m, f], beta a number or [1], x_dst [n, f] (None: x) -> [n, f].
    """
    unit = torch.nn.functional.normalize(x, p=2.0, dim=-1)
    unit_dst = unit if x_dst is None else torch.nn.functional.normalize(x_dst, p=2.0, dim=-1)
    q = (unit_dst * beta).unsqueeze(1)
    result = attention(graph, x.unsqueeze(1), q, unit.unsqueeze(1), form="dot", scale=1.0, **options)
    if isinstance(result, tuple):
        return result[0].squeeze(1), *result[1:]
    return result.squeeze(1)


def run(
    graph: Graph, plan: Plan, tensors: Tensors, bias: Tensor | None = None, scores: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """No autograd: out, out_attr, alpha, stats, and the unrounded out and out_attr; what is not needed is empty."""
    a = plan.packed(tensors, bias, scores)
    out, out_attr, alpha, stats = backend(a.values.device).attention(graph.edge_csr, a, weights=plan.weights)
    storage = a.values.dtype
    wide = out.new_empty(0)
    if storage != out.dtype:
        wide = (out if out_attr is None else torch.cat([out, out_attr], 2)).reshape(-1)
        out, out_attr = out.to(storage), None if out_attr is None else out_attr.to(storage)
    empty = out.new_empty(0)
    alpha = empty.clone() if alpha is None else alpha.to(storage)
    return out, empty if out_attr is None else out_attr, alpha, stats, wide


def run_grad(
    graph: Graph,
    plan: Plan,
    tensors: Tensors,
    results: tuple[Tensor, ...],
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
    needs: tuple[bool, ...],
    bias: Tensor | None = None,
    scores: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """No autograd: the gradient of every tensor that needs one, in its own type; with a bias, also its."""
    a = plan.packed(tensors, bias, scores)
    out, out_attr, alpha, stats, wide = results
    zeros = torch.zeros_like(out) if grads[0] is None else None
    if wide.numel():
        every = wide.view(out.size(0), out.size(1), -1)
        out, out_attr = every[:, :, : out.size(2)], every[:, :, out.size(2) :]
    grad, grad_attr, grad_alpha = grads
    result = backend(out.device).attention_grad(
        graph.edge_csr,
        graph.T.edge_csr,
        a,
        out,
        out_attr if a.attr is not None else None,
        alpha if plan.weights else None,
        stats,
        zeros if grad is None else grad,
        grad_attr if a.attr is not None else None,
        grad_alpha if plan.weights else None,
        needs,
    )
    inputs = tensors if bias is None else (*tensors, bias)
    return tuple(None if g is None or t is None else g.to(t.dtype) for g, t in zip(result, inputs, strict=True))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: Graph, plan: Plan, bias: Any, *tensors: Any) -> Any:
        a = Attention(plan.form, *tensors)
        width = 1 if a.left is None or a.left.dim() == 2 else a.left.size(2)
        with kept_scores.begin(graph, a.form, plan.slope, a.values, a.heads, width) as trial:
            results = run(graph, plan, tensors, bias, trial.scores)
        ctx.graph, ctx.plan, ctx.trial = graph, plan, trial
        ctx.set_materialize_grads(False)
        ctx.out = None
        if bias is not None:  # beside autograd's own: stock PyG lets the caller overwrite the result
            ctx.out, ctx.version = results[0].detach(), results[0]._version
        kept = results if bias is None else (None, *results[1:])
        ctx.save_for_backward(bias, trial.scores, *tensors, *kept)
        trial.scores = None
        return results[:3]

    @staticmethod
    @one_by_one
    def backward(ctx: Any, *grads: Any) -> Any:
        bias, scores, *saved = ctx.saved_tensors
        tensors, results = tuple(saved[: len(TENSORS)]), tuple(saved[len(TENSORS) :])
        (need_bias, *needs), plan = ctx.needs_input_grad[2:], ctx.plan
        if ctx.out is not None:
            edited = ctx.out._version != ctx.version
            first = run(ctx.graph, plan, tensors, bias)[0] if edited else ctx.out
            results = (first, *results[1:])
            if is_last():
                ctx.out = None
        if torch.is_grad_enabled():  # to be differentiated again: through plain PyTorch

            def again(*terms: Any) -> list[Tensor | None]:
                a = plan._replace(seed=None if plan.seed is None else plan.seed.cpu()).packed(terms[:-1])
                out, *rest = (None if r is None else r.to(a.values.dtype) for r in _plainly(ctx.graph.edge_csr, a))
                return [out if out is None or terms[-1] is None else out.flatten(1) + terms[-1], *rest]

            result = twice.gradients(again, grads, (*tensors, bias), (*needs, need_bias))
        else:
            needed = (*needs, need_bias) if bias is not None else tuple(needs)
            with ctx.trial as trial:
                result = run_grad(ctx.graph, plan, tensors, results, grads, needed, bias, scores)
            trial.end()
        dbias = result[len(TENSORS)] if len(result) > len(TENSORS) else None
        return None, None, dbias, *result[: len(TENSORS)]


_attend: Any = _Attention.apply


# ---- the declaration ----


def reference(
    graph: Graph,
    v: Tensor | None,
    left: Tensor | None = None,
    right: Tensor | None = None,
    edge: Tensor | None = None,
    *,
    form: str = "gat",
    att: Tensor | None = None,
    negative_slope: float = 0.2,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int = 0,
) -> Tensor:
    """The same in plain PyTorch."""
    if scale is None:
        scale = 1 / math.sqrt(left.size(2)) if form == "dot" and left is not None else 1.0
    a = Attention(form, v, left, right, att, edge, None, None, negative_slope, scale, dropout, mixed(seed))
    return reference_attention.differentiable(graph.edge_csr, a)[0].to(a.values.dtype)


def samples(graph: Graph, dtype: torch.dtype) -> Iterator[Sample]:
    """Every form, with and without edge terms; values of one head for all; dropout; large scores."""
    n, m, e = graph.num_rows, graph.num_cols, graph.num_edges

    def values(*shape: int) -> Tensor:
        return (0.5 * torch.randn(*shape, dtype=torch.float64)).to(dtype)

    yield Sample((graph, values(m, 2, 5), values(n, 2), values(m, 2)), {})
    yield Sample((graph, values(m, 1, 17), values(n, 3), values(m, 3), values(e, 3)), {"negative_slope": 0.1})
    yield Sample((graph, values(m, 2, 5), values(n, 2), values(m, 2)), {"dropout": 0.5, "seed": 7})
    yield Sample((graph, values(m, 2, 5), values(n, 2, 3), values(m, 2, 3)), {"form": "gatv2", "att": values(2, 3)})
    rows = (values(n, 2, 3), values(m, 2, 3), values(e, 2, 3))
    yield Sample((graph, None, *rows), {"form": "gatv2", "att": values(2, 3), "dropout": 0.3, "seed": 2**40})
    yield Sample((graph, values(m, 2, 5), values(n, 2, 18), values(m, 2, 18)), {"form": "dot"})
    yield Sample((graph, values(m, 1, 3), values(n, 2, 4), values(m, 1, 4)), {"form": "dot", "scale": 0.5})
    yield Sample((graph, values(m, 3, 2), None, None, values(e, 3) * 30), {"form": "given"})
    yield Sample((graph, values(m, 1, 4), None, None, values(e, 6)), {"form": "weight"})


def flops(graph: Graph, v: Tensor | None, left: Any = None, right: Any = None, edge: Any = None, **options: Any) -> int:
    """Per edge and head: the score (2 operations per value read, 5 for leaky_relu and softmax), 2 per value summed."""
    values: Any = right if v is None else v
    wide = left is not None and len(left.shape) == 3
    score: int = left.shape[2] * (4 if options.get("form") == "gatv2" else 2) if wide else 2
    width: int = values.shape[2]
    return graph.num_edges * _heads(values, left, edge) * (score + 5 + 2 * width)


def _heads(values: Any, left: Any, edge: Any) -> int:
    heads: int = next((t.shape[1] for t in (left, edge) if t is not None), values.shape[1])
    return heads


def bytes_moved(
    graph: Graph, v: Tensor | None, left: Any = None, right: Any = None, edge: Any = None, **options: Any
) -> int:
    """Pointers, columns, one row of v and of right per edge, the edge terms, the result once."""
    total = 8 * (graph.num_rows + 1) + 4 * graph.num_edges
    gathered = [t for t in (v, right) if t is not None]
    total += sum(graph.num_edges * row_bytes(t) for t in gathered) + (0 if edge is None else edge.nbytes)
    values: Any = right if v is None else v
    row: int = values.shape[2] * values.dtype.itemsize
    return total + graph.num_rows * _heads(values, left, edge) * row


def _run_node(graph: Graph, *arguments: Any) -> tuple[Tensor, ...]:
    tensors, seed, options = arguments[: len(TENSORS)], arguments[len(TENSORS)], arguments[len(TENSORS) + 1 :]
    return run(graph, Plan._make((*options, seed)), tensors)


def _gradient(
    graph: Graph, saved: Sequence[Any], grads: Sequence[Any], needs: Sequence[bool], *options: Any
) -> tuple[Tensor | None, ...]:
    tensors, seed, results = saved[: len(TENSORS)], saved[len(TENSORS)], saved[len(TENSORS) + 1 :]
    wanted = tuple(needs[: len(TENSORS)])
    return *run_grad(graph, Plan._make((*options, seed)), tuple(tensors), tuple(results), tuple(grads), wanted), None


def _shapes(graph: Any, *arguments: Any) -> tuple[Tensor, ...]:
    v, left, right, _, edge, attr, _, _, _, _, _, _, weights, _ = arguments
    values = right if v is None else v
    heads = (edge if left is None else left).shape[1]
    acc = accumulate_type(values.dtype)
    out = values.new_empty(graph.num_rows, heads, values.shape[2])
    out_attr = values.new_empty(0) if attr is None else values.new_empty(graph.num_rows, heads, attr.shape[1])
    alpha = values.new_empty(graph.num_edges, heads) if weights else values.new_empty(0)
    stats = values.new_empty(graph.num_rows, heads, 2, dtype=acc)
    width = out.shape[2] + (0 if attr is None else attr.shape[1])
    wide = values.new_empty(0 if acc == values.dtype else graph.num_rows * heads * width, dtype=acc)
    return out, out_attr, alpha, stats, wide


def _cost(graph: Any, *arguments: Any, ways: int = 1, **options: Any) -> Cost:
    """The score, the softmax and the sum per edge and head. The gradient does it again, both ways."""
    inputs = next(a for a in arguments if isinstance(a, dict))
    v, left, right, edge = (inputs[key] for key in ("v", "left", "right", "edge"))
    value = right if v is None else v
    operations = flops(graph, v, left, right, edge, form=inputs["form"])
    tables = [spec for spec in (v, right) if spec is not None]
    row, span = sum(row_bytes(spec) for spec in tables), sum(spec.nbytes for spec in tables)
    width = _heads(value, left, edge) * value.shape[2]
    result = graph.num_rows * width
    stream = 8 * (graph.num_rows + 1) + graph.index_bytes * graph.num_edges + result * value.itemsize
    stream += 0 if edge is None else edge.nbytes
    if inputs["bias"] is not None:  # added to the result; backward takes it off again and sums the gradient
        operations += result
    if ways == 2:
        row += width * value.itemsize  # the gradient of the result, one row per entry
        stream += span
    edges = graph.num_edges
    return Cost("attention", ways * operations, ways * stream, ways * edges * row, row, ways * span, None)


KERNEL = Kernel(
    "attention",
    "Tensor? v, Tensor? left, Tensor? right, Tensor? att, Tensor? edge, Tensor? attr, Tensor? query, Tensor? seed, "
    "str form, float slope, float scale, float dropout, bool weights, bool dropped",
    run=_run_node,
    shapes=_shapes,
    gradient=_gradient,
    again=_gradient,  # of a node, that is: of what _Attention does, `again` there
    saves=lambda tensors, results, needs: (*tensors, *results),
    results=5,
    shown=3,
    function=attention,
    reference=reference,
    samples=samples,
    flops=flops,
    bytes=bytes_moved,
    costs={"attention": _cost, "attention_grad": functools.partial(_cost, ways=2)},
)
