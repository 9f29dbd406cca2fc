"""PyG's aggregation modules over the cached index: what any MessagePassing layer, a user's own included, reduces with.

Messages are as the layer makes them; their sum (mean, maximum, softmax, ...) walks the sorted index without atomics.
The index is sorted once: the same edge_index, or one of equal content, is known again. StdAggregation needs no entry:
it asks the VarAggregation inside it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import aggr as stock
from torch_geometric.utils import softmax

from stretto.graph import Graph
from stretto.kernels import DTYPES, autocasts, has_own_memory
from stretto.layers.adjacency import PASSING
from stretto.layers.base import Decline
from stretto.layers.layer import Fast, Layer
from stretto.ops import gather_rows, segment_reduce

SMALL = 1 << 10  # values below which finding the index again costs more than stock's scatter


def _check(aggr: Any, x: Any, index: Any, ptr: Any, dim_size: Any, dim: int) -> Tensor:
    """The index as segment_reduce takes it, or Decline. ptr None: of an aggregation that needs an index."""
    if dim_size is None or not isinstance(ptr if index is None else index, Tensor):
        raise Decline("no index is given")
    if ptr is not None and index is not None and aggr._deterministic:
        raise Decline("ptr is given and torch is deterministic")
    _check_values(x, dim)
    if index is not None and index.shape != x.shape[:1]:
        raise Decline("the index is not one number a row")
    if index is None:
        if has_own_memory(x.device):
            raise Decline("ptr without an index on a device, whose host would have to wait for it")
        index = _from_pointers(ptr, x.size(0))
    plain: Tensor = index.as_tensor() if hasattr(index, "as_tensor") else index
    if plain.dtype not in (torch.int64, torch.int32):
        raise Decline(f"the index is {plain.dtype}")
    if has_own_memory(plain.device) and plain.numel() < PASSING and not Graph.is_known(plain, int(dim_size)):
        raise Decline("a small index not seen before: stock costs a GPU's host less than sorting it")
    return plain


def _check_values(x: Any, dim: int) -> None:
    """Decline values that are no plain tensor of numbers, not reduced along the first dimension, or few."""
    if type(x) not in (Tensor, torch.nn.Parameter) or x.dtype not in DTYPES or x.dim() == 0:
        raise Decline(f"the input is a {type(x).__name__}, or not of a floating type")
    if dim not in (0, -x.dim()):
        raise Decline(f"dimension {dim} of {x.dim()} is reduced")
    if x.numel() < SMALL:
        raise Decline("a few values only")


def _from_pointers(ptr: Any, rows: int) -> Tensor:
    """The segment of each row, from where segments start. ptr [n + 1] -> [rows]; known again by its content."""
    if type(ptr) is not Tensor or ptr.dim() != 1 or ptr.dtype not in (torch.int64, torch.int32) or ptr.numel() < 1:
        raise Decline("ptr is not a vector of integers")
    count = ptr.diff()
    if int(ptr[0]) != 0 or int(ptr[-1]) != rows or bool((count < 0).any()):
        raise Decline("ptr does not lead from 0 to the number of rows")
    return torch.arange(count.numel(), device=ptr.device).repeat_interleave(count, output_size=rows)


def _simple(reduce: str) -> Fast:
    def fast(aggr: Any, x: Tensor, index: Any = None, ptr: Any = None, dim_size: Any = None, dim: int = -2) -> Tensor:
        ptr = None if reduce == "mul" else ptr  # stock's product needs an index
        return segment_reduce(x, _check(aggr, x, index, ptr, dim_size, dim), dim_size, reduce=reduce)

    return fast


def fast_var(aggr: Any, x: Tensor, index: Any = None, ptr: Any = None, dim_size: Any = None, dim: int = -2) -> Tensor:
    """What VarAggregation.forward computes: the mean of squares less the square of the mean, as stock does."""
    return _var(x, _check(aggr, x, index, ptr, dim_size, dim), dim_size, aggr.semi_grad)


def fast_softmax(
    aggr: Any, x: Tensor, index: Any = None, ptr: Any = None, dim_size: Any = None, dim: int = -2
) -> Tensor:
    """What SoftmaxAggregation.forward computes."""
    where = _check(aggr, x, index, ptr, dim_size, dim)
    t = aggr.t
    if aggr.channels != 1:
        if x.dim() != 2:
            raise Decline("a temperature per channel of more than two dimensions")
        t = t.view(-1, aggr.channels)
    score = x * t
    if not aggr.learn and aggr.semi_grad:
        score = score.detach()
    alpha = segment_reduce(score, where, dim_size, reduce="softmax")
    return segment_reduce(x * alpha, where, dim_size)


def fast_power(aggr: Any, x: Tensor, index: Any = None, ptr: Any = None, dim_size: Any = None, dim: int = -2) -> Tensor:
    """What PowerMeanAggregation.forward computes."""
    where = _check(aggr, x, index, ptr, dim_size, dim)
    p = aggr.p
    if aggr.channels != 1:
        if x.dim() != 2:
            raise Decline("a power per channel of more than two dimensions")
        p = p.view(-1, aggr.channels)
    if isinstance(p, (int, float)) and p == 1:
        return segment_reduce(x, where, dim_size, reduce="mean")
    low, high = aggr.min_value, aggr.max_value
    out = segment_reduce(x.clamp(min=low, max=high).pow(p), where, dim_size, reduce="mean")
    return out.clamp(min=low, max=high).pow(1.0 / p)


def fast_median(
    aggr: Any, x: Tensor, index: Any = None, ptr: Any = None, dim_size: Any = None, dim: int = -2
) -> Tensor:
    """What MedianAggregation.forward computes."""
    if aggr.fill_value != 0 or aggr.interpolation != "lower":
        raise Decline("fill_value is not 0, or interpolation is not 'lower'")
    if aggr.q.numel() != 1 or float(aggr.q) != 0.5:  # a buffer, which may be set; stock waits for a GPU here, too
        raise Decline("q is not 0.5")
    return segment_reduce(x, _check(aggr, x, index, None, dim_size, dim), dim_size, reduce="median")


def fast_attentional(
    aggr: Any, x: Tensor, index: Any = None, ptr: Any = None, dim_size: Any = None, dim: int = -2
) -> Tensor:
    """What AttentionalAggregation.forward computes."""
    where = _check(aggr, x, index, ptr, dim_size, dim)
    _no_autocast(x)
    gate = aggr.gate_nn(x) if aggr.gate_mlp is None else aggr.gate_mlp(x, batch=index, batch_size=dim_size)
    if aggr.mlp is not None:
        x = aggr.mlp(x, batch=index, batch_size=dim_size)
    elif aggr.nn is not None:
        x = aggr.nn(x)
    if any(t.dim() != 2 or t.size(0) != where.numel() or t.dtype not in DTYPES for t in (gate, x)):
        gate = softmax(gate, index, ptr, dim_size, dim)  # the networks have run: PyG's own functions end it
        result: Tensor = aggr.reduce(gate * x, index, ptr, dim_size, dim)
        return result
    return segment_reduce(segment_reduce(gate, where, dim_size, reduce="softmax") * x, where, dim_size)


def fast_variance_preserving(
    aggr: Any, x: Tensor, index: Any = None, ptr: Any = None, dim_size: Any = None, dim: int = -2
) -> Tensor:
    """What VariancePreservingAggregation.forward computes: the sum over the square root of how many were added."""
    where = _check(aggr, x, index, ptr, dim_size, dim)
    _no_autocast(x)
    out = segment_reduce(x, where, dim_size)
    count = Graph.of_segments(where, dim_size).degree.to(out.dtype).sqrt().clamp(min=1.0)
    return out / count.view(-1, *[1] * (out.dim() - 1))


def fast_set2set(
    aggr: Any, x: Tensor, index: Any = None, ptr: Any = None, dim_size: Any = None, dim: int = -2
) -> Tensor:
    """What Set2Set.forward computes: attention over a set, its query made by an LSTM, several times."""
    if ptr is not None:
        raise Decline("ptr is given")
    where = _check(aggr, x, index, None, dim_size, dim)
    _no_autocast(x)
    if x.dim() != 2:
        raise Decline("more than two dimensions")
    shape = aggr.lstm.num_layers, dim_size, x.size(-1)
    state = x.new_zeros(shape), x.new_zeros(shape)
    query = x.new_zeros(dim_size, aggr.out_channels)
    for _ in range(aggr.processing_steps):
        q, state = aggr.lstm(query.unsqueeze(0), state)
        q = q.view(dim_size, aggr.in_channels)
        score = (x * gather_rows(q, where)).sum(dim=-1, keepdim=True)
        alpha = segment_reduce(score, where, dim_size, reduce="softmax")
        query = torch.cat([q, segment_reduce(alpha * x, where, dim_size)], dim=-1)
    return query


def _no_autocast(x: Tensor) -> None:
    if autocasts(x):
        raise Decline("autocast is on")


def fast_fused(
    aggr: Any, x: Tensor, index: Any = None, ptr: Any = None, dim_size: Any = None, dim: int = -2
) -> list[Tensor]:
    """What FusedAggregation.forward computes: several aggregations of the same messages."""
    where = _check(aggr, x, index, None, dim_size, dim)
    if x.dim() != 2:
        raise Decline("more than two dimensions")
    outs = []
    for name in aggr.aggr_names:
        if name in ("VarAggregation", "StdAggregation"):
            out = _var(x, where, dim_size, aggr.semi_grad)
            if name == "StdAggregation":
                out = out.clamp(min=1e-5).sqrt()
                out = out.masked_fill(out <= math.sqrt(1e-5), 0.0)
        else:
            out = segment_reduce(x, where, dim_size, reduce=name.removesuffix("Aggregation").lower())
        outs.append(out)
    return outs


def _var(x: Tensor, index: Tensor, dim_size: int, semi_grad: bool) -> Tensor:
    mean = segment_reduce(x, index, dim_size, reduce="mean")
    with torch.set_grad_enabled(torch.is_grad_enabled() and not semi_grad):
        square = segment_reduce(x * x, index, dim_size, reduce="mean")
    return square - mean * mean


LAYERS = (
    Layer(stock.SumAggregation, _simple("sum")),
    Layer(stock.MeanAggregation, _simple("mean")),
    Layer(stock.MaxAggregation, _simple("max")),
    Layer(stock.MinAggregation, _simple("min")),
    Layer(stock.MulAggregation, _simple("mul")),
    Layer(stock.VarAggregation, fast_var),
    Layer(stock.SoftmaxAggregation, fast_softmax),
    Layer(stock.PowerMeanAggregation, fast_power),
    Layer(stock.MedianAggregation, fast_median),
    Layer(stock.fused.FusedAggregation, fast_fused),
    Layer(stock.AttentionalAggregation, fast_attentional),
    Layer(stock.VariancePreservingAggregation, fast_variance_preserving),
    Layer(stock.Set2Set, fast_set2set),
)
