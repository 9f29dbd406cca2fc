"""attention: score, softmax over a node's incoming edges and weighted sum in one pass; no edge x channel array is made.

Forward keeps two numbers per node and head (the largest score, the inverse of the sum of exponentials); backward
computes the weights again from them, with the scores computed again too, or kept (kept_scores.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from stretto.errors import expect, fail
from stretto.graph import Graph
from stretto.kernels import backend, on_host, reference_attention
from stretto.kernels.attention import FORMS, TENSORS, Attention
from stretto.kernels.schema import CPU
from stretto.ops import kept_scores, library, twice
from stretto.ops.autograd_state import is_last
from stretto.ops.batched import one_by_one
from stretto.ops.checks import check_values
from stretto.ops.folded_bias import takes_bias
from stretto.ops.op import Op, Sample
from stretto.ops.projections import plus
from stretto.ops.replay import mixed

Results = Tensor | tuple[Tensor, ...]
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
    """sum over neighbours of alpha * v with alpha = softmax of a score over a node's incoming edges, per head.

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
    tensors: tuple[Tensor | None, ...] = (v, left, right, att, edge, attr, query)
    for name, tensor in zip(TENSORS, tensors, strict=True):
        if tensor is not None:
            check_values("attention", name, tensor, graph.device)
    if bias is not None:
        check_values("attention", "bias", bias, graph.device)
    tensors = _promoted(form, tensors)
    if scale is None:
        scale = (
            1 / math.sqrt(left.size(2))
            if form == "dot" and left is not None and left.dim() == 3 and left.size(2)
            else 1.0
        )
    for name, number in (("negative_slope", negative_slope), ("scale", scale), ("dropout", dropout)):
        if not isinstance(number, (int, float)):
            fail(f"attention: '{name}' is {number!r}, wanted a number")
    _check(graph, form, tensors, dropout)
    key: Tensor | None = None
    if dropout > 0:
        key = _seed(seed, graph.device)
    numbers = (float(negative_slope), float(scale), float(dropout), return_weights, dropped)
    found = [t for t in tensors if t is not None]
    if any(library.traced(t) for t in found):
        out, out_attr, alpha, _, _ = torch.ops.stretto.attention(
            graph.handle, *tensors, key, form, *numbers, graph.num_rows, graph.num_edges
        )
    else:
        learns = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*found, bias))
        fused = bias if bias is not None and takes_bias(tensors, bias, learns) else None
        if learns:
            out, out_attr, alpha = _Attention.apply(graph, form, numbers, key, fused, *tensors)
        else:
            out, out_attr, alpha, _, _ = run(graph, form, numbers, key, tensors, fused)
    if bias is not None and out.dim() == 3:
        out = plus(out.flatten(1), bias)
    results = [out]
    if attr is not None:
        results.append(out_attr)
    if return_weights:
        results.append(alpha)
    return results[0] if len(results) == 1 else tuple(results)


def cosine_attention(
    graph: Graph, x: Tensor, beta: Tensor | float, x_dst: Tensor | None = None, **options: Any
) -> Results:
    """AGNNConv: alpha = softmax of beta * cos(x_i, x_j), then the weighted sum of x_j.

    graph [n, m], x [m, f], beta a number or [1], x_dst [n, f] (None: x) -> [n, f].
    """
    unit = torch.nn.functional.normalize(x, p=2.0, dim=-1)
    unit_dst = unit if x_dst is None else torch.nn.functional.normalize(x_dst, p=2.0, dim=-1)
    q = (unit_dst * beta).unsqueeze(1)
    found = attention(graph, x.unsqueeze(1), q, unit.unsqueeze(1), form="dot", scale=1.0, **options)
    if isinstance(found, tuple):
        return found[0].squeeze(1), *found[1:]
    return found.squeeze(1)


def run(
    graph: Graph,
    form: str,
    numbers: tuple[Any, ...],
    seed: Tensor | None,
    tensors: tuple[Tensor | None, ...],
    bias: Tensor | None = None,
    scores: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """No autograd: out, out_attr, alpha, stats, and the unrounded out and out_attr; what is not needed is empty."""
    a = _pack(form, numbers, seed, tensors, bias)
    a.scores = scores
    out, out_attr, alpha, stats = backend(a.values.device).attention(graph.edge_csr, a, weights=numbers[3])
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
    form: str,
    numbers: tuple[Any, ...],
    seed: Tensor | None,
    tensors: tuple[Tensor | None, ...],
    results: tuple[Tensor, ...],
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
    needs: tuple[bool, ...],
    bias: Tensor | None = None,
    scores: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """No autograd: the gradient of every tensor that needs one, in its own type; with a bias, also its."""
    a = _pack(form, numbers, seed, tensors, bias)
    a.scores = scores
    out, out_attr, alpha, stats, wide = results
    zeros = torch.zeros_like(out) if grads[0] is None else None
    if wide.numel():
        every = wide.view(out.size(0), out.size(1), -1)
        out, out_attr = every[:, :, : out.size(2)], every[:, :, out.size(2) :]
    grad, grad_attr, grad_alpha = grads
    found = backend(out.device).attention_grad(
        graph.edge_csr,
        graph.T.edge_csr,
        a,
        out,
        out_attr if a.attr is not None else None,
        alpha if numbers[3] else None,
        stats,
        zeros if grad is None else grad,
        grad_attr if a.attr is not None else None,
        grad_alpha if numbers[3] else None,
        needs,
    )
    inputs = tensors if bias is None else (*tensors, bias)
    return tuple(None if g is None or t is None else g.to(t.dtype) for g, t in zip(found, inputs, strict=True))


def _pack(
    form: str,
    numbers: tuple[Any, ...],
    seed: Tensor | None,
    tensors: tuple[Tensor | None, ...],
    bias: Tensor | None = None,
) -> Attention:
    slope, scale, dropout, _, dropped = numbers
    named: dict[str, Any] = dict(zip(TENSORS, tensors, strict=True))
    a = Attention(form, **named, slope=slope, scale=scale, dropout=dropout, dropped=dropped, bias=bias)
    if seed is not None:
        if on_host(seed) or not backend(a.values.device).device_seed:
            a.seed = mixed(int(seed))
        else:  # read by the kernels: nothing waits, and a captured graph draws a new one at every replay
            a.seed_at = seed
    return a


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, graph: Graph, form: str, numbers: tuple[Any, ...], seed: Any, bias: Any, *tensors: Any
    ) -> Any:
        a = _pack(form, numbers, None, tensors)
        width = 1 if a.left is None or a.left.dim() == 2 else a.left.size(2)
        with kept_scores.begin(graph, form, a.slope, a.values, a.heads, width) as trial:
            results = run(graph, form, numbers, seed, tensors, bias, trial.scores)
        ctx.graph, ctx.form, ctx.numbers, ctx.seed, ctx.trial = graph, form, numbers, seed, trial
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
        need_bias, *needs = ctx.needs_input_grad[4:]
        if ctx.out is not None:
            edited = ctx.out._version != ctx.version
            first = run(ctx.graph, ctx.form, ctx.numbers, ctx.seed, tensors, bias)[0] if edited else ctx.out
            results = (first, *results[1:])
            if is_last():
                ctx.out = None
        if torch.is_grad_enabled():  # to be differentiated again: through plain PyTorch

            def again(*terms: Any) -> list[Tensor | None]:
                a = _pack(ctx.form, ctx.numbers, None if ctx.seed is None else ctx.seed.cpu(), terms[:-1])
                out, *rest = (None if r is None else r.to(a.values.dtype) for r in _plainly(ctx.graph.edge_csr, a))
                return [out if out is None or terms[-1] is None else out.flatten(1) + terms[-1], *rest]

            found = twice.gradients(again, grads, (*tensors, bias), (*needs, need_bias))
        else:
            needed = (*needs, need_bias) if bias is not None else tuple(needs)
            with ctx.trial as trial:
                found = run_grad(
                    ctx.graph, ctx.form, ctx.numbers, ctx.seed, tensors, results, grads, needed, bias, scores
                )
            trial.end()
        dbias = found[len(TENSORS)] if len(found) > len(TENSORS) else None
        return None, None, None, None, dbias, *found[: len(TENSORS)]


def _seed(seed: Tensor | int | None, device: torch.device) -> Tensor:
    if seed is None:
        return torch.randint(2**63 - 1, (1,), device=device)
    if isinstance(seed, Tensor):
        known = seed.dtype == torch.int64 and seed.numel() == 1 and seed.device in (device, CPU)
        expect(known, f"attention: 'seed' is {seed.dtype} {list(seed.shape)} on {seed.device}, wanted one int64")
        return seed.reshape(1)
    known = isinstance(seed, int) and -(2**63) <= seed < 2**64
    expect(known, f"attention: 'seed' is {seed!r}, wanted an integer of 64 bits, or a tensor of one")
    return torch.tensor([seed if seed < 2**63 else seed - 2**64], device=CPU)  # torch.initial_seed() has no sign


# The arrays of rows, which share one storage type; everything else is scalars, held in the accumulation type.
_ROWS = {
    "gat": ("v",),
    "given": ("v",),
    "weight": ("v",),
    "gatv2": ("v", "left", "right", "edge"),
    "dot": ("v", "left", "right", "attr", "query"),
}


def _promoted(form: str, tensors: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Rows of mixed types meet in the widest, as in torch's own arithmetic."""
    expect(form in FORMS, f"attention: 'form' is {form!r}, wanted one of {', '.join(FORMS)}")
    named = dict(zip(TENSORS, tensors, strict=True))
    types = {t.dtype for name, t in named.items() if t is not None and name in _ROWS[form]}
    if len(types) <= 1:
        return tensors
    wide = torch.float64 if torch.float64 in types else torch.float32
    return tuple(t.to(wide) if t is not None and name in _ROWS[form] else t for name, t in named.items())


def _check(graph: Graph, form: str, tensors: tuple[Tensor | None, ...], dropout: float) -> None:
    named = dict(zip(TENSORS, tensors, strict=True))
    expect(0 <= dropout <= 1, f"attention: 'dropout' is {dropout}, wanted 0 to 1")
    n, m, e = graph.num_rows, graph.num_cols, graph.num_edges
    values = named["right"] if named["v"] is None else named["v"]
    if values is None or values.dim() != 3 or values.size(0) != m:
        got = "absent" if values is None else f"of shape {list(values.shape)}"
        fail(f"attention: 'v' is {got}, wanted [{m}, heads, width], one row per column of the graph")
    lead = named["edge"] if form in ("given", "weight") else named["left"]
    name = "edge" if form in ("given", "weight") else "left"
    if lead is None or lead.dim() != (3 if form in ("gatv2", "dot") else 2):
        fail(f"attention: form {form!r} wants '{name}' of {3 if form in ('gatv2', 'dot') else 2} dimensions")
    h = lead.size(1)
    k = lead.size(2) if lead.dim() == 3 else 0
    if values.size(1) not in (1, h):
        fail(f"attention: 'v' has {values.size(1)} heads, wanted {h} as '{name}', or 1")
    attr = named["attr"]
    d = attr.size(1) if attr is not None and attr.dim() == 2 else 0
    every_shape: dict[str, dict[str, tuple[tuple[int, ...], ...]]] = {
        "gat": {"left": ((n, h),), "right": ((m, h),), "edge": ((e, h),)},
        "given": {"edge": ((e, h),)},
        "weight": {"edge": ((e, h),)},
        "gatv2": {"left": ((n, h, k),), "right": ((m, h, k),), "edge": ((e, h, k),), "att": ((h, k),)},
        "dot": {"left": ((n, h, k),), "right": ((m, h, k), (m, 1, k)), "attr": ((e, d),), "query": ((n, h, d),)},
    }
    shapes = every_shape[form]
    required = {"gat": ("right",), "gatv2": ("right", "att"), "dot": ("right",)}.get(form, ())
    for key, tensor in named.items():
        if tensor is None:
            expect(key not in required, f"attention: form {form!r} wants '{key}'")
        elif key != "v":
            if key not in shapes:
                fail(f"attention: form {form!r} takes no '{key}'")
            if tuple(tensor.shape) not in shapes[key]:
                fail(f"attention: '{key}' has shape {list(tensor.shape)}, wanted {list(shapes[key][0])}")
    expect(
        (named["query"] is None) or attr is not None,
        "attention: 'query' comes without 'attr', whose product it would be",
    )


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
    """attention in plain PyTorch."""
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
    a = Attention(options.get("form", "gat"), v, left, right, None, edge)
    score = left.size(2) * (4 if a.form == "gatv2" else 2) if left is not None and left.dim() == 3 else 2
    return graph.num_edges * a.heads * (score + 5 + 2 * a.values.size(2))


def bytes_moved(
    graph: Graph, v: Tensor | None, left: Any = None, right: Any = None, edge: Any = None, **options: Any
) -> int:
    """Pointers, columns, one row of v and of right per edge, the edge terms, the result once."""
    total = 8 * (graph.num_rows + 1) + 4 * graph.num_edges
    gathered = [t for t in (v, right) if t is not None]
    total += sum(graph.num_edges * (t.numel() // max(t.size(0), 1)) * t.element_size() for t in gathered)
    total += 0 if edge is None else edge.numel() * edge.element_size()
    a = Attention(options.get("form", "gat"), v, left, right, None, edge)
    return total + graph.num_rows * a.heads * a.values.size(2) * a.values.element_size()


OP = Op("attention", attention, reference, samples, flops, bytes_moved)  # type: ignore[arg-type]
