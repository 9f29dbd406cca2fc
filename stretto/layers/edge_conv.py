"""EdgeConv: nn([x_i, x_j - x_i]). The first Linear moves to the nodes: x_i (W_1 - W_2) + x_j W_2, d times less work.

Where nn is that Linear alone, the reduction moves there too: max of (u_i + v_j) is u_i + max of v_j.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch_geometric.nn as pyg
from torch import Tensor

from stretto.layers import edges
from stretto.layers.base import LINEAR, Decline, note
from stretto.layers.edges import norms, streaming
from stretto.layers.gin import first_linear
from stretto.layers.layer import SIMPLE, Conv, Layer, as_wide_as_result, when
from stretto.ops import spmm
from stretto.ops.dense import dense
from stretto.ops.edge_mlp import Ends
from stretto.ops.extremum import extremum


def fast(conv: Conv, x: Any, edge_index: Any) -> Tensor:
    """What EdgeConv.forward computes."""
    x_src, x_dst = edges.both_ends(x)
    reduce = edges.reduction(conv)
    first, rest = first_linear(conv.nn)
    if x_src.size(1) != x_dst.size(1):
        raise Decline("x_src and x_dst differ in width")
    own, other = edges.split_weight(first, x_src, x_dst.size(1), x_src.size(1))
    graph = edges.graph_between(conv, edge_index, x_src, x_dst)
    if not edges.no_infinity(x_src, None if x_dst is x_src else x_dst):
        x_src, x_dst = edges.only_read(graph, x_src, target=False), edges.only_read(graph, x_dst, target=True)
    u = dense(x_dst, own - other, first.bias)
    v = dense(x_src, other)
    if type(conv.nn) in LINEAR:
        note(conv, "X (W1 - W2)' + reduce(A, X W2')")
        if reduce in ("max", "min"):
            return extremum(graph, v, None, reduce, u)
        return edges.plus_own(graph, spmm(graph, v, reduce=reduce), u, reduce)
    modules = norms.in_order(conv.nn)[1:]
    width, parameters = _widest(modules, u.size(1)), streaming.parameters_of(modules)
    plain = not norms.watched(conv.nn)
    steady = plain and streaming.row_by_row(modules, random=True)

    def message(a: Tensor, b: Tensor) -> Tensor:
        return rest(a + b)

    def stage(until: Any, known: norms.Known) -> Callable[..., Tensor]:
        return lambda a, b: norms.run(modules, a + b, until, known)

    function: Callable[..., Tensor] = message
    numbers: Ends = None
    shared: list[Tensor] = []
    if plain and not steady and norms.takes(graph, modules, width, u):
        function, numbers, shared = norms.with_statistics(graph, stage, modules, parameters, u, v, None)
        steady = True
    (out,), how = streaming.reduced(
        graph,
        function,
        u,
        v,
        numbers,
        (reduce,),
        width=width,
        parameters=parameters,
        modules=[conv.nn],
        shared=shared,
        steady=steady,
    )
    note(conv, f"first Linear on nodes, the rest of nn on edges, {how}", builds=how.builds)
    return out


def _widest(modules: list[Any], width: int) -> int:
    result: int = max([width, *(m.weight.size(0) for m in modules if type(m) in LINEAR)])
    return result


LAYER = Layer(
    pyg.EdgeConv,
    fast,
    aggr=SIMPLE,
    declines=(when(lambda c: first_linear(c.nn)[0] is None, "nn does not start with a Linear"),),
    message=as_wide_as_result,
)
