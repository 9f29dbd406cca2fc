"""Flops and compulsory bytes of every ATen op: one explicit table, no op counted as nothing in silence.

Conventions. One flop per addition, multiplication, comparison or transcendental; 2 n k m for a product of matrices.
Bytes as if no cache helped: each operand once, one row per entry of an index; bytes at places that an index decides are
kept apart as `random`, with the row they come in and the span they fall into (`row` of a product is its smallest
dimension, of a sum along the last dimension the bytes of one sum). Views and bare allocations cost nothing.
stretto's own kernels: kernel_costs.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import sympy

from stretto.observe.specs import Size, Spec, matrices, product, tensors
from stretto.ops.cost import Cost

DEGREE = sympy.Symbol("d", positive=True, integer=True)  # the largest in-degree
TREE = 1 + sympy.log(DEGREE, 2)  # a reduction over the neighbours of a node
LSTM = 2  # torch's number for it among recurrent networks
Args = tuple[Any, ...]
Formula = Callable[[str, Args, dict[str, Any], Any], Cost]


def log2(size: Size) -> Size:
    """Levels of a tree over `size` leaves."""
    if isinstance(size, sympy.Expr):
        return sympy.log(size, 2)
    return math.log2(size) if size > 1 else 0


def bytes_of(*values: Any) -> Size:
    specs = [spec for value in values for spec in tensors(value)]
    return sum(spec.nbytes for spec in specs) + sum(m.nbytes for value in values for m in matrices(value))


# ---- families of ATen ops ----


def _view(name: str, args: Args, kwargs: dict[str, Any], out: Any) -> Cost:
    return Cost("view", depth=0)


def _create(name: str, args: Args, kwargs: dict[str, Any], out: Any) -> Cost:
    return Cost("create", stream=bytes_of(out))


def _draw(name: str, args: Args, kwargs: dict[str, Any], out: Any) -> Cost:
    return Cost("draw", stream=bytes_of(out))


def _copy(name: str, args: Args, kwargs: dict[str, Any], out: Any) -> Cost:
    if name == "aten::copy_":
        return Cost("copy", stream=bytes_of(args[1]) + bytes_of(out))
    return Cost("copy", stream=bytes_of(args, kwargs) + bytes_of(out))


def pointwise(weight: int = 1) -> Formula:
    def cost(name: str, args: Args, kwargs: dict[str, Any], out: Any) -> Cost:
        flops = weight * sum(spec.numel for spec in tensors(out)) if not name.startswith("aten::_foreach") else None
        if flops is None:  # one list of tensors in, changed in place: nothing comes out
            flops = weight * sum(spec.numel for spec in tensors(args[0]))
            return Cost("optimizer", flops, bytes_of(args, kwargs) + bytes_of(args[0]))
        inplace = name.endswith("_") and not name.endswith("__")
        return Cost("pointwise", flops, bytes_of(args, kwargs) + (bytes_of(args[0]) if inplace else bytes_of(out)))

    return cost


def _along_last(args: Args, source: Spec) -> bool:
    """Whether the last dimension, and not all of them, is reduced."""
    dims = args[1] if len(args) > 1 else ()
    dims = dims if isinstance(dims, tuple) else (dims,)
    last = len(source.shape) - 1
    return last > 0 and any(d in (-1, last) and not isinstance(d, bool) for d in dims if isinstance(d, int))


def _reduce(weight: int = 1) -> Formula:
    def cost(name: str, args: Args, kwargs: dict[str, Any], out: Any) -> Cost:
        source = tensors(args)[0]
        results = tensors(out)
        saved = results[0].numel if results else 1
        ratio = source.numel / saved if isinstance(source.numel, sympy.Expr) or saved else 1
        row = source.shape[-1] * source.itemsize if _along_last(args, source) else 0
        return Cost("reduce", weight * source.numel, bytes_of(args) + bytes_of(out), row=row, depth=1 + log2(ratio))

    return cost


def _gemm(name: str, args: Args, kwargs: dict[str, Any], out: Any) -> Cost:
    added = name.startswith(("aten::addmm", "aten::baddbmm", "aten::addmv", "aten::addbmm"))
    left = tensors(args)[1 if added else 0]
    result = tensors(out)[0]
    flops = 2 * result.numel * left.shape[-1] + (result.numel if added else 0)
    narrow = least((*left.shape[-2:], result.shape[-1] if result.shape else 1))
    return Cost("gemm", flops, bytes_of(args) + bytes_of(out), row=narrow, depth=1 + log2(left.shape[-1]))


def least(sizes: Args) -> Size:
    """The smallest of the sizes that are numbers: what stands for a number of nodes or edges is never that."""
    return min((s for s in sizes if not isinstance(s, sympy.Expr)), default=1)


def _sparse_product(name: str, args: Args, kwargs: dict[str, Any], out: Any) -> Cost:
    matrix, dense = matrices(args)[0], tensors(args)[-1]
    width = dense.row
    row = width * dense.itemsize
    return Cost(
        "spmm",
        2 * matrix.num_edges * width,
        matrix.nbytes + bytes_of(out),
        matrix.num_edges * row,
        row,
        dense.nbytes,
        TREE,
    )


def _expanded(index: Spec) -> Size:
    """Elements that share one entry of the index."""
    return product([s for s, step in zip(index.shape, index.stride, strict=True) if step == 0])


def _gather(name: str, args: Args, kwargs: dict[str, Any], out: Any) -> Cost:
    table, result = tensors(args)[0], tensors(out)[0]
    if name.startswith("aten::index.") or name == "aten::index":  # x[:, i]: what follows the last index is a row
        places = args[1] if isinstance(args[1], tuple) else (args[1],)
        row = product(table.shape[len(places) :]) * table.itemsize
    elif name.startswith(("aten::embedding", "aten::index_select")):
        row = table.row * table.itemsize
    else:  # gather: an index for every element, or one for a whole row where it was expanded
        row = _expanded(tensors(args)[1]) * table.itemsize
    indices = sum(spec.nbytes for spec in tensors(args)[1:])
    return Cost("gather", 0, indices + result.nbytes, result.numel * table.itemsize, row, table.nbytes)


def _scatter(name: str, args: Args, kwargs: dict[str, Any], out: Any) -> Cost:
    # (self, dim, index, source) or index_put(self, (index, ...), values, accumulate)
    result = tensors(args)
    target, source = result[0], result[-1]
    index = result[1:-1]
    puts = name.startswith("aten::index_put") and not (len(args) > 3 and args[3])
    adds = not puts and not name.startswith("aten::index_copy")
    plain = name.split(".")[0].endswith("_")
    copies = 0 if plain else 2 * target.nbytes
    width = _expanded(index[0]) if index else 1
    row = (
        source.row if name.startswith(("aten::index_add", "aten::index_put", "aten::index_copy")) else width
    ) * source.itemsize
    moved = source.numel * source.itemsize
    return Cost(
        "scatter",
        source.numel if adds else 0,
        source.nbytes + bytes_of(tuple(index)) + copies,
        (2 if adds else 1) * moved,
        row,
        target.nbytes,
        TREE,
    )


def _embedding_grad(name: str, args: Args, kwargs: dict[str, Any], out: Any) -> Cost:
    grad, index, table = *tensors(args)[:2], tensors(out)[0]
    row = table.row * table.itemsize
    moved = grad.numel * grad.itemsize
    return Cost("scatter", grad.numel, moved + index.nbytes + table.nbytes, 2 * moved, row, table.nbytes, TREE)


def _fixed(family: str, weight: int, depth: Callable[[Spec], Size]) -> Formula:
    """`weight` flops per element of the first input, everything read and written once."""

    def cost(name: str, args: Args, kwargs: dict[str, Any], out: Any) -> Cost:
        first = tensors(args)[0]
        return Cost(family, weight * first.numel, bytes_of(args) + bytes_of(out), depth=depth(first))

    return cost


def _weight_norm(name: str, args: Args, kwargs: dict[str, Any], out: Any) -> Cost:
    """Count w = v g / |v|: squares, their sum, the product; a root and a division for each norm."""
    v, g = tensors(args)
    return Cost("norm", 3 * v.numel + 2 * g.numel, bytes_of(args) + bytes_of(out), depth=_whole(v))


def _weight_norm_grad(name: str, args: Args, kwargs: dict[str, Any], out: Any) -> Cost:
    """Count s = sum(grad v); g / |v| (grad - v s / |v|^2) and s / |v|: five for each value, four for each norm."""
    grad, _, g = tensors(args)[:3]
    return Cost("norm", 5 * grad.numel + 4 * g.numel, bytes_of(args) + bytes_of(out), depth=_whole(grad))


def _self_attention(name: str, args: Args, kwargs: dict[str, Any], out: Any) -> Cost:
    """Of query [B, L, D], key and value [B, M, D]: projections, scores, their softmax, the sum, one projection more."""
    (batch, rows, width), others, heads = args[0].shape, args[1].shape[1], args[4]
    more = dict(zip(("mask", "weights", "mean"), args[9:12], strict=False))
    scores = batch * heads * rows * others
    inputs = 2 * batch * rows + 2 * batch * others  # rows that are projected
    flops = inputs * (2 * width**2 + width) + batch * rows * width  # with a bias; queries are scaled
    flops += 4 * batch * rows * others * width + (5 if more.get("mask") is None else 6) * scores
    if more.get("weights", True) and more.get("mean", True):  # which are returned, for all heads together
        flops += scores + batch * rows * others
    depth = 3 * (1 + log2(width)) + 4 + 3 * log2(others)
    row = least((rows, others, width // heads))
    return Cost("gemm", flops, bytes_of(args) + bytes_of(out), row=row, depth=depth)


def _lstm(name: str, args: Args, kwargs: dict[str, Any], out: Any) -> Cost:
    """Of input [T, B, I], weights [4H, I] and [4H, H]: two products, their sum and the biases for each gate; of each
    unit four gates are bent, and five more make its cell and its state."""
    mode, biased = args[9], args[12]
    if mode != LSTM:
        return unknown(name, args, kwargs, out)
    (steps, batch, width), hidden = args[0].shape, args[2].shape[1]
    each = 8 * hidden * (width + hidden) + 4 * hidden * (3 if biased else 1) + 9 * hidden
    depth = 3 + log2(width) + steps * (7 + log2(hidden))
    row = least((batch, width, hidden))
    return Cost("gemm", steps * batch * each, bytes_of(args) + bytes_of(out), row=row, depth=depth)


def _unscale(name: str, args: Args, kwargs: dict[str, Any], out: Any) -> Cost:
    """Gradients times one number, in place, and whether each is finite."""
    return Cost("optimizer", 2 * sum(s.numel for s in tensors(args[0])), bytes_of(args) + bytes_of(args[0]))


def _last(spec: Spec) -> Size:
    return 2 + 2 * log2(spec.shape[-1]) if spec.shape else 1


def _all(spec: Spec) -> Size:
    return log2(spec.numel) ** 2


def _whole(spec: Spec) -> Size:
    return 2 + log2(spec.numel)


def unknown(name: str, args: Args, kwargs: dict[str, Any], out: Any) -> Cost:
    return Cost("other", 0, bytes_of(args, kwargs) + bytes_of(out), known=False)


def _same(names: str, formula: Formula) -> dict[str, Formula]:
    return dict.fromkeys(names.split(), formula)


# Name without overload -> formula. What is not here is judged by its tags (pointwise, reduction) and schema (views).
ATEN: dict[str, Formula] = {
    **_same("mm addmm addmm_ bmm baddbmm baddbmm_ mv addmv addmv_ dot", _gemm),
    **_same("_sparse_mm _sparse_addmm _sparse_mm_reduce_impl", _sparse_product),
    **_same("index_select index gather embedding take", _gather),
    **_same("scatter_add scatter_add_ scatter_reduce scatter_reduce_ index_add index_add_ index_reduce_", _scatter),
    **_same("index_copy index_copy_", _scatter),
    **_same("index_put index_put_ _index_put_impl_ scatter scatter_", _scatter),
    **_same("clone copy_ _to_copy cat stack repeat constant_pad_nd flip contiguous slice_backward", _copy),
    "embedding_dense_backward": _embedding_grad,
    **_same("select_backward index_fill index_fill_ tril triu lift_fresh_copy roll", _copy),
    **_same("zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full arange eye", _create),
    **_same("scalar_tensor fill_ zero_ linspace", _create),
    **_same("rand randn rand_like randn_like randint randperm", _draw),
    **_same("bernoulli bernoulli_ uniform_ normal_ random_ exponential_", _draw),
    **_same("empty empty_like new_empty empty_strided new_empty_strided resize_ set_ _local_scalar_dense", _view),
    **_same("is_same_size sym_size detach_ _unsafe_view lift_fresh sparse_csr_tensor _indices _values _nnz", _view),
    **_same("_sparse_csr_tensor_unsafe _sparse_coo_tensor_unsafe _sparse_coo_tensor_with_dims_and_tensors", _view),
    **_same("is_coalesced _coalesced_ _sparse_compressed_tensor_unsafe sparse_compressed_tensor", _view),
    **_same("unsafe_split unsafe_split_with_sizes", _view),
    **_same("sum mean amax amin max min prod any all argmax argmin norm linalg_vector_norm", _reduce()),
    **_same("count_nonzero bincount equal _is_any_true _is_all_true", _reduce()),
    **_same("var var_mean std logsumexp", _reduce(3)),
    **_same("nonzero masked_select cumsum repeat_interleave", _fixed("scan", 1, lambda s: log2(s.numel))),
    **_same("sort argsort unique _unique2 unique_consecutive topk searchsorted _coalesce", _fixed("sort", 1, _all)),
    **_same("_softmax _log_softmax _safe_softmax", _fixed("softmax", 5, _last)),
    **_same("_softmax_backward_data _log_softmax_backward_data", _fixed("softmax", 4, _last)),
    **_same("nll_loss_forward nll_loss_backward", _fixed("loss", 0, lambda s: 1 + log2(s.numel))),
    **_same("mse_loss smooth_l1_loss huber_loss binary_cross_entropy", _fixed("loss", 3, _whole)),
    "binary_cross_entropy_with_logits": _fixed("loss", 6, _whole),
    **_same("mse_loss_backward smooth_l1_loss_backward huber_loss_backward", pointwise(2)),
    "binary_cross_entropy_backward": pointwise(4),
    **_same("native_batch_norm native_layer_norm native_group_norm", _fixed("norm", 8, _whole)),
    **_same("_native_batch_norm_legit _native_batch_norm_legit_no_training", _fixed("norm", 8, _whole)),
    **_same(
        "native_batch_norm_backward native_layer_norm_backward native_group_norm_backward", _fixed("norm", 11, _whole)
    ),
    **_same("masked_fill_ masked_fill leaky_relu_backward elu_backward where", pointwise()),
    **_same("leaky_relu leaky_relu_ elu elu_", pointwise()),  # older torch does not tag them as pointwise
    **_same("softplus_backward mish_backward hardswish hardswish_backward hardtanh_backward", pointwise()),
    **_same("_prelu_kernel _prelu_kernel_backward log_sigmoid_forward log_sigmoid_backward", pointwise()),
    **_same("glu glu_backward", pointwise()),
    **_same("native_dropout native_dropout_backward", pointwise(2)),
    **_same("addcmul addcmul_ addcdiv addcdiv_ _foreach_addcmul_ _foreach_addcdiv_ _foreach_lerp_", pointwise(3)),
    "linalg_cross": pointwise(3),
    "_convert_indices_from_coo_to_csr": _fixed("scan", 1, lambda s: 1),  # where an entry is in another row
    "_convert_indices_from_csr_to_coo": _copy,
    "_weight_norm_interface": _weight_norm,
    "_weight_norm_interface_backward": _weight_norm_grad,
    "_native_multi_head_attention": _self_attention,
    "mkldnn_rnn_layer": _lstm,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
    "_fused_adam_": _fixed("optimizer", 12, lambda s: 1),
}


def _on_sparse(name: str, args: Args, kwargs: dict[str, Any], out: Any) -> Cost:
    """Ops on torch's sparse matrices: products with a dense one are spmm; what fills in cannot be known beforehand."""
    product_like = "mm" in name.split("::")[1].split(".")[0]
    if product_like and tensors(args) and tensors(out):
        return _sparse_product(name, args, kwargs, out)
    moved = bytes_of(args, kwargs) + bytes_of(out)
    return Cost("sparse", sum(m.num_edges for m in matrices(args)), moved, known=not product_like)


def of_aten(name: str, tags: frozenset[str], is_view: bool, args: Args, kwargs: dict[str, Any], out: Any) -> Cost:
    """Cost of an ATen op or of another library's; name like "aten::mm"."""
    space, _, base = name.split(".")[0].partition("::")
    if space == "aten" and matrices(args):
        return _on_sparse(name, args, kwargs, out)
    if space == "aten" and base in ATEN:
        return ATEN[base](name, args, kwargs, out)
    if is_view or space == "profiler":  # marks of record_function, in every optimizer's step
        return _view(name, args, kwargs, out)
    if "pointwise" in tags or base.startswith("_foreach"):
        return pointwise()(name, args, kwargs, out)
    if "reduction" in tags:
        return _reduce()(name, args, kwargs, out)
    return unknown(name, args, kwargs, out)
