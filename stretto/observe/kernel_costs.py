"""Flops and compulsory bytes of stretto's own kernels, counted as costs.py counts ATen's: an explicit table.

A kernel over a graph says its cost where it is declared (stretto.ops.KERNELS); those of dense products are here.
"""

from __future__ import annotations

from typing import Any

from stretto.observe.costs import TREE, Args, Formula, bytes_of, least, log2, pointwise, unknown
from stretto.observe.specs import Size, tensors
from stretto.ops import KERNELS as DECLARED
from stretto.ops.cost import Cost
from stretto.ops.cost import Formula as Declared


def _declared(formula: Declared) -> Formula:
    def cost(name: str, args: Args, kwargs: dict[str, Any], out: Any) -> Cost:
        counted = formula(*args, **kwargs)
        return counted._replace(depth=TREE) if counted.depth is None else counted

    return cost


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
    **{name: _declared(formula) for kernel in DECLARED for name, formula in kernel.costs.items()},
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
