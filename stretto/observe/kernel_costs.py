"""Flops and compulsory bytes of stretto's own kernels, counted as costs.py counts ATen's: an explicit table.

Where stretto.ops.OPS declares the op, its declaration is what counts.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from stretto.observe.costs import TREE, Args, Cost, Formula, bytes_of, least, log2, numel_of, pointwise, unknown
from stretto.observe.specs import Matrix, Size, Spec, matrices, tensors
from stretto.ops import OPS


def _tensor(spec: Any) -> Any:
    """A Spec behind the few methods that an op's declaration calls."""
    if not isinstance(spec, Spec):
        return spec
    return SimpleNamespace(
        numel=lambda: spec.numel,
        size=lambda i: spec.shape[i],
        dim=lambda: len(spec.shape),
        shape=spec.shape,
        element_size=lambda: spec.itemsize,
    )


def _graph(matrix: Matrix) -> Any:
    column = SimpleNamespace(element_size=lambda: matrix.index_bytes)
    return SimpleNamespace(
        num_rows=matrix.num_rows,
        num_cols=matrix.num_cols,
        num_edges=matrix.num_edges,
        csr=SimpleNamespace(col=column if matrix.index_bytes else None),
    )


def _declared(op: str, family: str, gathered: int | None) -> Formula:
    """Cost as the op declares it; gathered: the position of the tensor whose rows are read once per edge."""

    def cost(name: str, args: Args, kwargs: dict[str, Any], out: Any) -> Cost:
        graph = matrices(args)[0]
        called = [_graph(a) if isinstance(a, Matrix) else _tensor(a) for a in args]
        options = {k: _tensor(v) for k, v in kwargs.items()}
        if op == "sddmm":
            options = {"op": "add" if name.endswith("sddmm_add") else "dot"}
        total = OPS[op].bytes(*called, **options)
        row = random = span = 0
        if gathered is not None:
            table = args[gathered]
            row, span = table.row * table.itemsize, table.nbytes
            random = graph.num_edges * row
        return Cost(family, OPS[op].flops(*called, **options), total - random, random, row, span, TREE)

    return cost


def _gather_rows(name: str, args: Args, kwargs: dict[str, Any], out: Any) -> Cost:
    table, index = _tensor(args[0]), _tensor(args[1])
    row = args[0].row * args[0].itemsize
    random = args[1].numel * row
    return Cost("gather", 0, OPS["gather_rows"].bytes(table, index) - random, random, row, args[0].nbytes)


def _per_edge(weight: int) -> Formula:
    def cost(name: str, args: Args, kwargs: dict[str, Any], out: Any) -> Cost:
        return Cost("softmax", weight * numel_of(out), bytes_of(args) + bytes_of(out), depth=TREE)

    return cost


def _extremum_grad(name: str, args: Args, kwargs: dict[str, Any], out: Any) -> Cost:
    matrix, x = matrices(args)[0], tensors(args)[0]
    row = x.row * x.itemsize
    random = 2 * matrix.num_edges * row  # the extremum and its share of the gradient, per entry
    return Cost("spmm", 2 * matrix.num_edges * x.row, matrix.nbytes + 2 * x.nbytes, random, row, 2 * x.nbytes, TREE)


def _attention(name: str, args: Args, kwargs: dict[str, Any], out: Any) -> Cost:
    """As declared: the score, the softmax and the sum per edge and head. The gradient does it again, both ways."""
    graph, inputs = args[0], next(a for a in args if isinstance(a, dict))
    value = inputs["right"] if inputs["v"] is None else inputs["v"]
    called = [_tensor(inputs[key]) for key in ("v", "left", "right", "edge")]
    flops = OPS["attention"].flops(_graph(graph), *called, form=inputs["form"])
    read = [inputs[key] for key in ("v", "right") if inputs[key] is not None]
    rows = sum(spec.row * spec.itemsize for spec in read)
    span = sum(spec.nbytes for spec in read)
    heads = called[1].size(1) if called[1] is not None else value.shape[1]
    edge = 0 if inputs["edge"] is None else inputs["edge"].nbytes
    result = graph.num_rows * heads * value.shape[2] * value.itemsize
    stream = 8 * (graph.num_rows + 1) + graph.index_bytes * graph.num_edges + edge + result
    if inputs["bias"] is not None:  # added to the result; backward takes it off again and sums the gradient
        flops += graph.num_rows * heads * value.shape[2]
    if name.endswith("_grad"):
        rows += heads * value.shape[2] * value.itemsize  # the gradient of the result, one row per entry
        return Cost("attention", 2 * flops, 2 * stream + 2 * span, 2 * graph.num_edges * rows, rows, 2 * span, TREE)
    return Cost("attention", flops, stream, graph.num_edges * rows, rows, span, TREE)


def _messages(per_value: int) -> Formula:
    """Terms of rows, columns and edges, joined per edge and channel and summed over the edges of a node."""

    def cost(name: str, args: Args, kwargs: dict[str, Any], out: Any) -> Cost:
        graph, inputs = args[0], [spec for a in args[1:] for spec in tensors(a) if len(spec.shape) == 2]
        width = inputs[0].row
        row = width * inputs[0].itemsize
        ways = 2 if name.endswith("_grad") else 1
        tables = ways * max(1, len(inputs) - 1)
        random = tables * graph.num_edges * row
        stream = ways * (graph.nbytes + 2 * graph.num_rows * row)
        flops = ways * per_value * graph.num_edges * width * len(inputs)
        return Cost("spmm", flops, stream, random, row, tables * inputs[0].nbytes, TREE)

    return cost


def _statistics(name: str, args: Args, kwargs: dict[str, Any], out: Any) -> Cost:
    """As declared: every statistic of x_j + own_i over the neighbours; the gradient reads them both ways."""
    graph = matrices(args)[0]
    x, own, names = args[2:5] if name.endswith("_grad") else args[1:4]
    called = (_graph(graph), _tensor(x), _tensor(own))
    row = x.row * x.itemsize
    ways = 2 if name.endswith("_grad") else 1
    random = graph.num_edges * row
    stream = OPS["statistics"].bytes(*called, names=names) - random
    flops = ways * OPS["statistics"].flops(*called, names=names)
    return Cost("spmm", flops, ways * stream, ways * random, row, ways * x.nbytes, TREE)


def _tall_product(name: str, args: Args, kwargs: dict[str, Any], out: Any) -> Cost:
    """Count x w, and an addition per value where a bias or another matrix is added: as torch's mm and addmm count."""
    (m, k), n = args[0].shape, args[1].shape[1]
    added, beside = kwargs.get("add"), kwargs.get("beside")
    flops = 2 * m * k * n + (m * n if added is not None or (args[2:] and args[2] is not None) else 0)
    total = bytes_of(args) + bytes_of((added,)) + bytes_of(out)
    if beside is not None:  # what another call would do, which adds
        flops += 2 * m * beside[0].shape[1] * n + m * n
        total += bytes_of(beside)
    if kwargs.get("sums"):
        flops += m * k
    return Cost("gemm", flops, total, row=least((m, k, n)), depth=1 + log2(k))


def _relu_dense(name: str, args: Args, kwargs: dict[str, Any], out: Any) -> Cost:
    """relu(z + b) W' + c: the product, one comparison or addition per value of z, one per value of the result."""
    z, z_bias, weight, bias = args
    (n, i), o = z.shape, weight.shape[0]
    flops = 2 * n * i * o + n * i * (1 if z_bias is None else 2) + (0 if bias is None else n * o)
    return Cost("gemm", flops, bytes_of(args) + bytes_of(out), row=least((n, i, o)), depth=1 + log2(i))


def _relu_dense_grad(name: str, args: Args, kwargs: dict[str, Any], out: Any) -> Cost:
    """Gradients of weight and bias, and of z where it is needed; relu(z + b) is made again."""
    z, z_bias, weight = args[:3]
    (n, i), o = z.shape, weight.shape[0]
    flops = 2 * n * i * o + n * o + n * i * (1 if z_bias is None else 2)
    if kwargs["need_z"]:
        flops += 2 * n * i * o + n * i * (1 if z_bias is None else 2)
    return Cost("gemm", flops, bytes_of(args) + bytes_of(out), row=least((n, i, o)), depth=1 + log2(n))


def _chain(name: str, args: Args, kwargs: dict[str, Any], out: Any) -> Cost:
    """Linears and activations over the same rows. The gradient: both products of every Linear."""
    back = name.endswith("_grad")
    stages, first, parameters = args[0], args[3] if back else args[1], args[2]
    if not stages:
        return Cost("view", depth=0)
    n, at, flops, depth = first.shape[0], 0, 0, 0
    narrow: list[Size] = []
    width = args[1][0].shape[1] if back else first.shape[1]
    for kind, detail in stages:
        if kind == "dense":
            width, inner = parameters[at].shape
            flops += (4 if back else 2) * n * width * inner + (n * width if detail else 0)
            depth += 1 + log2(inner)
            narrow += [width, inner]
            at += 1 + bool(detail)
        else:
            flops += {"relu": 1, "softplus": 4, "scale": 1}[kind] * n * width
            depth += 1
            at += kind == "scale"
    return Cost("gemm", flops, bytes_of(args) + bytes_of(out), row=least((n, *narrow)), depth=depth)


KERNELS: dict[str, Formula] = {
    "attention": _attention,
    "attention_grad": _attention,
    "edge_messages": _messages(2),
    "edge_messages_grad": _messages(2),
    "softmax_sum": _messages(7),
    "softmax_sum_grad": _messages(7),
    "spmm": _declared("spmm", "spmm", 1),
    "sddmm": _declared("sddmm", "sddmm", 2),
    "sddmm_add": _declared("sddmm", "sddmm", 2),
    "edge_softmax": _declared("edge_softmax", "softmax", None),
    "edge_softmax_grad": _per_edge(4),
    "mul_grad": _per_edge(3),
    "spmm_extremum_grad": _extremum_grad,
    "gather_rows": _gather_rows,
    "statistics": _statistics,
    "statistics_grad": _statistics,
    "tall_product": _tall_product,
    "sum_product": _tall_product,
    "relu_dense": _relu_dense,
    "relu_dense_grad": _relu_dense_grad,
    "chain": _chain,
    "chain_grad": _chain,
    "softplus": pointwise(4),
}


def _device_product(name: str, args: Args, kwargs: dict[str, Any], out: Any) -> Cost:
    """Count x w by rows, or over the rows of both; an addition per value where a bias or another matrix is added."""
    (m, k), n = args[0].shape, args[1].shape[1]
    more = sum(spec.numel == m * n or len(spec.shape) == 1 for spec in tensors((args[2:], kwargs)))
    flops = 2 * m * k * n + (m * n if more and not name.startswith("stretto::transposed") else 0)
    return Cost("gemm", flops, bytes_of(args) + bytes_of(out), row=least((m, k, n)), depth=1 + log2(k))


def _device_sum(name: str, args: Args, kwargs: dict[str, Any], out: Any) -> Cost:
    """The sum of every column."""
    return Cost("reduce", args[0].numel, bytes_of(args) + bytes_of(out), depth=log2(args[0].shape[0]))


# Kernels for cards that have no namesake on the processor.
ON_A_CARD: dict[str, Formula] = {
    "product": _device_product,
    "product_with_scores": _device_product,
    "transposed_product": _device_product,
    "column_sum": _device_sum,
}


def of_kernel(name: str, args: Args, kwargs: dict[str, Any], out: Any) -> Cost:
    """Cost of one of stretto's kernels; name like "stretto::spmm"."""
    plain = name.partition("::")[2]
    return (KERNELS.get(plain) or ON_A_CARD.get(plain, unknown))(name, args, kwargs, out)
