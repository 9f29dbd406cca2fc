"""spmm: combine the rows of a node's neighbours. Backward is the same op on graph.T.

A GCN of it trains 44 times as fast as stock on rmat:17, 8 times as fast as torch's own sparse product
(benchmarks/results/models.csv).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto import kernels, settings
from stretto.errors import fail
from stretto.graph import Graph
from stretto.kernels import Csr, Reduce, accumulate_type, reference, vendor
from stretto.ops import extremum, library
from stretto.ops.checks import check_shape, check_values
from stretto.ops.cost import Cost, gathered, row_bytes, row_values
from stretto.ops.kernel import Kernel, Sample
from stretto.ops.pick import picker
from stretto.ops.sddmm import sddmm
from stretto.ops.variants import Variant, legal

REDUCES = (Reduce.SUM, Reduce.MEAN, Reduce.MAX, Reduce.MIN)


def spmm(
    graph: Graph,
    x: Tensor,
    weight: Tensor | None = None,
    *,
    reduce: str | Reduce = "sum",
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    y: Tensor | None = None,
    beta: float = 1.0,
) -> Tensor:
    """row_scale * reduce over neighbours of (weight * col_scale * x) + beta * y; rows without neighbours give 0.

    graph [n, m], x [m], [m, k] or [m, h, f], weight [E] or [E, h] in the order of edge_index, row_scale [n],
    col_scale [m], y like the result -> [n], [n, k] or [n, h, f].
    """
    if reduce != "sum":
        reduce = Reduce.of(reduce, "spmm", REDUCES)
    _check(graph, x, weight, row_scale, col_scale, y, beta)
    if weight is not None and weight.dtype != x.dtype:
        x, weight = _promote(x, weight)
    if y is not None and y.dtype != x.dtype:
        y = y.to(x.dtype)
    if x.dim() != 2 and (weight is None or weight.dim() == 1):  # all heads alike: as one matrix
        shape = (graph.num_rows, *x.shape[1:])
        flat, added = _as_matrix(x), None if y is None else _as_matrix(y)
        out = spmm(graph, flat, weight, reduce=reduce, row_scale=row_scale, col_scale=col_scale, y=added, beta=beta)
        return out.reshape(shape)
    scaled = row_scale is not None or col_scale is not None
    if reduce in (Reduce.MAX, Reduce.MIN) or (scaled and _carries_grad(row_scale, col_scale)):
        return _scaled_outside(graph, x, weight, reduce, row_scale, col_scale, y, beta)
    if reduce == Reduce.MEAN:
        mean = library.mean_scale(graph, accumulate_type(x.dtype))
        row_scale = mean if row_scale is None else mean * row_scale
    return KERNEL(graph, x, weight, row_scale, col_scale, y, beta)


def run(
    graph: Graph,
    x: Tensor,
    weight: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    y: Tensor | None,
    beta: float,
) -> Tensor:
    """The sum, without autograd, by the variant the tuner picked. x [m, k] or [m, h, f]."""
    csr = graph.csr if weight is None else graph.edge_csr
    backend = kernels.backend(x.device)
    width = x.size(1) if x.dim() == 2 else x.size(1) * x.size(2)
    device = backend.variants
    if not device or csr.num_edges * width < SMALL[device]:
        return backend.spmm(csr, x, weight, row_scale=row_scale, col_scale=col_scale, y=y, beta=beta)[0]
    options = {"row_scale": row_scale, "col_scale": col_scale, "y": y, "beta": beta}
    plain = row_scale is None and col_scale is None and y is None and x.dim() == 2 and x.dtype in _PLAIN_TYPES
    key = (
        "spmm",
        graph.size_class,
        x.dtype,
        x.shape[1:],
        0 if weight is None else weight.dim(),
        col_scale is not None,
        plain,
        *([device] if device != "cpu" else []),
    )

    known = picker.known(key)
    if known is not None and known.backend != "torch":
        return backend.spmm(csr, x, weight, **options, **known.options)[0]
    variants = legal("spmm", device, width=width, plain=plain)
    tuned = settings.tuning() and not torch.are_deterministic_algorithms_enabled()
    if known is None and tuned and device == "cuda" and len(variants) > 1:
        backend.tape.unsettled()

    def call(variant: Variant) -> Tensor:
        if variant.backend == "torch":
            return vendor.spmm(csr, x, weight)[0]
        return backend.spmm(csr, x, weight, **options, **variant.options)[0]

    wait = torch.cuda.synchronize if device == "cuda" else None
    return picker.run(key, variants, call, wait=wait)


def chosen(width: int, device: str) -> list[str]:
    """Names of the variants the tuner has settled on so far for aggregations of this width, on any graph."""
    result = set()
    for key, variant in picker.choices():
        if key[0] == "spmm" and math.prod(key[3]) == width and (*key[7:], "cpu")[0] == device:
            result.add(variant.name)
    return sorted(result)


# Gathered values below which no variant differs enough to be worth a look.
SMALL = {"cpu": 1 << 18, "cuda": 1 << 24}
_PLAIN_TYPES = (torch.float32, torch.float64)


def saves(tensors: Sequence[Any], result: Tensor, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Save x for the gradient of the weight, the weight for that of x, and the scales."""
    x, weight, row_scale, col_scale, _ = tensors
    return x if needs[1] else None, weight if needs[0] else None, row_scale, col_scale


def gradient(
    graph: Graph, saved: Sequence[Any], grads: Sequence[Any], needs: Sequence[bool], beta: float
) -> tuple[Tensor | None, ...]:
    """Of out = R (A * w) C x + beta y, with R and C diagonal and constant."""
    (grad,), (x, weight, row_scale, col_scale) = grads, saved
    need_x, need_weight, _, _, need_y = needs
    dx = spmm(graph.T, grad, weight, row_scale=col_scale, col_scale=row_scale) if need_x else None
    dweight = weight_grad(graph, grad, x, row_scale, col_scale) if need_weight else None
    return dx, dweight, None, None, grad * beta if need_y else None


def weight_grad(graph: Graph, grad: Tensor, x: Tensor, row_scale: Tensor | None, col_scale: Tensor | None) -> Tensor:
    """The gradient of weight[e, h], row_scale[i] col_scale[j] grad[i, h] . x[j, h]; without heads: [E]."""
    if row_scale is not None:
        grad = grad * _rowwise(row_scale, grad)
    if col_scale is not None:
        x = x * _rowwise(col_scale, x)
    return sddmm(graph, grad, x)


def _as_matrix(x: Tensor) -> Tensor:
    return x.unsqueeze(1) if x.dim() == 1 else x.flatten(1)


def _scaled_outside(
    graph: Graph, x: Tensor, weight: Any, reduce: Any, row_scale: Any, col_scale: Any, y: Any, beta: float
) -> Tensor:
    """Scales by plain multiplications: for reductions that do not commute with them, and scales with gradients."""
    if col_scale is not None:
        x = x * _rowwise(col_scale.to(x.dtype), x)
    if reduce in (Reduce.MAX, Reduce.MIN):
        out = extremum.extremum(graph, x, weight, reduce.value)
    else:
        out = spmm(graph, x, weight, reduce=reduce)
    if row_scale is not None:
        out = out * _rowwise(row_scale.to(x.dtype), out)
    return out if y is None else out + beta * y.to(out.dtype)


def _rowwise(scale: Tensor, like: Tensor) -> Tensor:
    return scale.to(like.dtype).reshape(-1, *([1] * (like.dim() - 1)))


def _carries_grad(*tensors: Tensor | None) -> bool:
    return any(t is not None and t.requires_grad for t in tensors)


def _promote(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Mixed types meet in the wider one, as in torch's own arithmetic (and as autocast does for such ops)."""
    wide = torch.promote_types(x.dtype, weight.dtype)
    return x.to(wide), weight.to(wide)


def _plainly_right(graph: Graph, x: Tensor) -> bool:
    return (
        isinstance(x, Tensor)
        and x.dtype in kernels.DTYPES
        and x.layout is torch.strided
        and x.dim() == 2
        and x.size(0) == graph.num_cols
        and x.device == graph.device
    )


def _check(graph: Graph, x: Tensor, weight: Any, row_scale: Any, col_scale: Any, y: Any, beta: Any) -> None:
    if weight is row_scale is col_scale is y is None and _plainly_right(graph, x):
        return
    check_values("spmm", "x", x, graph.device)
    if not 1 <= x.dim() <= 3 or x.size(0) != graph.num_cols:
        fail(
            f"spmm: 'x' has {x.size(0) if x.dim() else 0} rows, but the graph has {graph.num_cols} columns "
            f"(graph {graph.num_rows}x{graph.num_cols}, x {'x'.join(map(str, x.shape))})"
        )
    if not isinstance(beta, (int, float)):
        fail(f"spmm: 'beta' is {beta!r}, wanted a number")
    if weight is not None:
        _check_weight(graph, x, weight)
    for name, scale, size in (("row_scale", row_scale, graph.num_rows), ("col_scale", col_scale, graph.num_cols)):
        if scale is not None:
            check_shape("spmm", name, scale, graph.device, size)
    if y is not None:
        check_shape("spmm", "y", y, graph.device, graph.num_rows, *x.shape[1:])


def _check_weight(graph: Graph, x: Tensor, weight: Any) -> None:
    check_values("spmm", "weight", weight, graph.device)
    heads = x.size(1) if x.dim() == 3 else None
    if not (weight.shape == (graph.num_edges,) or weight.shape == (graph.num_edges, heads)):
        wanted = f"[{graph.num_edges}]" + (f" or [{graph.num_edges}, {heads}]" if heads is not None else "")
        fail(f"spmm: 'weight' has shape {list(weight.shape)}, wanted {wanted}")


# ---- the declaration ----


def reference_spmm(
    graph: Graph,
    x: Tensor,
    weight: Tensor | None = None,
    *,
    reduce: str = "sum",
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    y: Tensor | None = None,
    beta: float = 1.0,
) -> Tensor:
    """The same in plain PyTorch."""
    csr: Csr = graph.edge_csr
    if x.dim() == 1:
        added = None if y is None else y.unsqueeze(1)
        options: dict[str, Any] = {"reduce": reduce, "row_scale": row_scale, "col_scale": col_scale, "beta": beta}
        return reference_spmm(graph, x.unsqueeze(1), weight, y=added, **options).squeeze(1)
    if reduce == "mean":
        mean = graph.mean_scale(accumulate_type(x.dtype))
        row_scale = mean if row_scale is None else mean * row_scale
    how = "sum" if reduce in ("sum", "mean") else reduce
    return reference.spmm(csr, x, weight, reduce=how, row_scale=row_scale, col_scale=col_scale, y=y, beta=beta)[0]


def samples(graph: Graph, dtype: torch.dtype) -> Iterator[Sample]:
    """Every reduction, weighting, scaling and number of dimensions."""
    n, m, e = graph.num_rows, graph.num_cols, graph.num_edges
    acc = accumulate_type(dtype)

    def values(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64).to(dtype)

    for reduce in ("sum", "mean", "max", "min"):
        yield Sample((graph, values(m, 5)), {"reduce": reduce})
        yield Sample((graph, values(m, 5), values(e)), {"reduce": reduce})
        yield Sample((graph, values(m, 2, 3), values(e, 2)), {"reduce": reduce})
        yield Sample((graph, values(m, 2, 3), values(e)), {"reduce": reduce})
        yield Sample((graph, values(m)), {"reduce": reduce})
    scales = {"row_scale": torch.rand(n, dtype=acc) + 0.5, "col_scale": torch.rand(m, dtype=acc) + 0.5}
    yield Sample((graph, values(m, 17)), dict(scales))
    yield Sample((graph, values(m, 17), values(e)), {**scales, "y": values(n, 17), "beta": 0.5})
    yield Sample((graph, values(m, 3)), {**scales, "reduce": "max", "y": values(n, 3), "beta": -2.0})


def flops(graph: Graph, x: Tensor, weight: Tensor | None = None, *, reduce: str = "sum", **options: Any) -> int:
    """One addition (or comparison) per gathered value, one multiplication if weighted or scaled."""
    scaled = weight is not None or options.get("col_scale") is not None
    return graph.num_edges * row_values(x) * (2 if scaled else 1)


def bytes_moved(graph: Graph, x: Tensor, weight: Tensor | None = None, **options: Any) -> int:
    """Pointers, columns, weights, one row of x per edge, the result once."""
    row = row_bytes(x)
    weights = 0 if weight is None else weight.nbytes
    extra = graph.num_rows * row if options.get("y") is not None else 0
    edges = graph.num_edges * (graph.index_bytes + row)
    return 8 * (graph.num_rows + 1) + edges + weights + graph.num_rows * row + extra


def _cost(graph: Any, x: Any, weight: Any = None, **options: Any) -> Cost:
    ordered = bytes_moved(graph, x, weight, **options) - graph.num_edges * row_bytes(x)
    return gathered("spmm", flops(graph, x, weight, **options), ordered, graph.num_edges, x)


KERNEL = Kernel(
    "spmm",
    "Tensor x, Tensor? weight, Tensor? row_scale, Tensor? col_scale, Tensor? y, float beta",
    run=run,
    shapes=lambda graph, x, *rest: x.new_empty(graph.num_rows, *x.shape[1:]),
    gradient=gradient,
    saves=saves,
    function=spmm,
    reference=reference_spmm,
    samples=samples,
    flops=flops,
    bytes=bytes_moved,
    costs={"spmm": _cost},
)
