"""What layers with more than a matrix product share: their two ends, their graph, self-loops, and values per edge."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.utils import add_self_loops, remove_self_loops

from stretto.compile import Adjacency
from stretto.graph import Graph
from stretto.kernels import autocasts, on_host
from stretto.layers import adjacency
from stretto.layers.base import LAZY, Decline, check_input, weight_of
from stretto.layers.declines import pair_of
from stretto.layers.layer import Conv  # layers ask edges for it
from stretto.layers.layer import is_stock as is_stock
from stretto.ops import gather_rows, segment_reduce
from stretto.ops.rows import only_reached as only_reached  # layers ask edges for it
from stretto.recording import finite


def ends(x: Any) -> tuple[Tensor, Tensor | None, bool]:
    """(x_src, x_dst, whether they are one) of what a user hands to a conv, or Decline."""
    x_src, x_dst = pair_of(x)
    own = x_dst is x_src
    check_input(x_src, *(() if x_dst is None or own else (x_dst,)))
    if autocasts(x_src):
        raise Decline("autocast is on")
    if x_dst is not None and x_dst.dtype != x_src.dtype:
        raise Decline(f"the two inputs are {x_src.dtype} and {x_dst.dtype}")
    return x_src, x_dst, own


def both_ends(x: Any) -> tuple[Tensor, Tensor]:
    """ends() of a layer that needs both."""
    x_src, x_dst, _ = ends(x)
    if x_dst is None:
        raise Decline("x has no destination part")
    return x_src, x_dst


def reduction(conv: Conv) -> str:
    """The name of a layer's simple aggregation, as our kernels have it."""
    return "sum" if conv.aggr == "add" else str(conv.aggr)


def initialised(*parameters: Tensor | None) -> None:
    """Decline while a parameter has no shape yet."""
    for parameter in parameters:
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise Decline(LAZY)


def is_plain(edge_index: Any) -> bool:
    """Whether edges come as [2, E], in a tensor or an EdgeIndex."""
    return isinstance(edge_index, Tensor) and edge_index.layout == torch.strided


def unpacked(conv: Conv, edge_index: Any, edge_attr: Any, size: Any = None) -> tuple[Any, Any, Any]:
    """A sparse matrix with a vector of features per entry as edge_index, edge_attr and size; the rest as it is."""
    if conv.flow == "target_to_source":  # PyG refuses sparse matrices there
        return edge_index, edge_attr, size
    sparse = isinstance(edge_index, Tensor) and edge_index.layout == torch.sparse_coo
    if sparse and edge_attr is None and edge_index.dense_dim() == 1 and edge_index.is_coalesced():
        rows, cols = edge_index.shape[:2]
        return edge_index.indices().flip(0), edge_index.values(), (cols, rows) if size is None else size
    if not isinstance(edge_index, Tensor) and hasattr(edge_index, "coo") and edge_attr is None:  # a SparseTensor
        row, col, values = edge_index.coo()
        if values is not None and values.dim() == 2:
            rows, cols = edge_index.sparse_sizes()
            return torch.stack([col, row]), values, (cols, rows) if size is None else size
    return edge_index, edge_attr, size


def graph_between(conv: Conv, edge_index: Any, x_src: Tensor, x_dst: Tensor | None, size: Any = None) -> Graph:
    """The graph of a call, as PyG infers its sizes."""
    num_dst = adjacency.destinations(edge_index, size, x_dst, x_src)
    if conv.flow == "target_to_source" and num_dst != x_src.size(0):
        raise Decline("flow target_to_source between two sets of nodes")
    return adjacency.graph_of(conv, edge_index, x_src.size(0), num_dst, adjacency.PASSING_EDGEWISE)


def plain_graph(conv: Conv, edge_index: Any, x_src: Tensor, x_dst: Tensor | None, size: Any = None) -> Graph:
    """graph_between, for layers whose stock form takes no sparse matrix or reads its values in its own way."""
    if not is_plain(edge_index):
        raise Decline(f"edge_index is a {type(edge_index).__name__}, not [2, E]")
    return graph_between(conv, edge_index, x_src, x_dst, size)


def sources(graph: Graph) -> Tensor:
    """Source of every edge in the user's order, one tensor for the graph's life. [E]."""
    result: Tensor = graph.derived("sources", lambda: graph.edge_index[0].contiguous())
    return result


def at_sources(graph: Graph, x: Tensor) -> Tensor:
    """x_j: one row per edge. x [m, ...] -> [E, ...]."""
    return gather_rows(x, sources(graph))


def at_targets(graph: Graph, x: Tensor) -> Tensor:
    """x_i: one row per edge. x [n, ...] -> [E, ...]."""
    return gather_rows(x, graph.segment_index)


def reduce_edges(graph: Graph, src: Tensor, reduce: str) -> Tensor:
    """Messages in the user's order, combined at their destination. src [E, ...] -> [n, ...]."""
    return segment_reduce(src, graph, reduce=reduce)


def one_per_edge(graph: Graph, edge_attr: Any, x: Tensor, name: str = "edge_attr") -> Tensor:
    """Features of edges [E, d] of x's type, or Decline."""
    if not isinstance(edge_attr, Tensor) or edge_attr.layout != torch.strided:
        raise Decline(f"{name} is a {type(edge_attr).__name__}")
    if edge_attr.dim() not in (1, 2) or edge_attr.size(0) != graph.num_edges or edge_attr.dtype != x.dtype:
        raise Decline(f"{name} is {edge_attr.dtype} of shape {list(edge_attr.shape)} for {graph.num_edges} edges")
    return edge_attr


def no_infinity(*tensors: Tensor | None) -> bool:
    """Whether all inputs seem finite; Decline where one holds an infinity.

    For plans that add weights up, multiply them out, take a difference apart or sum an edge's gradients before they
    meet the input: the infinity meets a sum, where in stock it meets one term after the other, and a NaN more or less
    comes of it. A NaN itself goes where stock sends it.
    """
    strange = [tensor for tensor in tensors if tensor is not None and not seems_finite(tensor)]
    if any(bool(tensor.isinf().any()) for tensor in strange):
        raise Decline("an input holds an infinity, which would meet weights in another order than in stock")
    return not strange


def only_read(graph: Graph, x: Tensor, *, target: bool) -> Tensor:
    """x, with 0 in the rows that no edge reads at this end.

    For a Linear that stock has on edges and a plan on nodes: the gradient of such a row is 0, and what is not finite
    there would make a NaN of it in the gradient of the weight.
    """
    if target:
        return only_reached(graph, x)
    read = graph.derived("read", lambda: torch.bincount(graph.edge_csr.columns(), minlength=graph.num_cols) > 0)
    return torch.where(read.view(-1, *([1] * (x.dim() - 1))), x, 0.0)


def seems_finite(tensor: Tensor) -> bool:
    """Whether the sum of all values is finite. Not looked at on a device, where the host would wait for the answer."""
    if not on_host(tensor):
        return True
    return finite(tensor)


def with_loops(conv: Conv, graph: Graph, num_loops: int) -> Graph:
    """Every edge but the self-loops, then one loop for each of the first num_loops nodes, in that order; kept."""
    if graph.num_rows == graph.num_cols == num_loops:
        return graph.with_self_loops

    def make() -> Graph:
        pairs = graph.edge_index[:, graph.kept_edges]
        loops = torch.arange(num_loops, device=pairs.device)
        return Graph.of(torch.cat([pairs, torch.stack([loops, loops])], dim=1), (graph.num_cols, graph.num_rows))

    result: Graph = graph.derived(("loops", num_loops), make)
    return result


FILLS = ("mean", "add", "sum", "max", "min", "mul")  # of a node's edges, for its loop


def loop_attributes(
    conv: Conv, graph: Graph, edge_attr: Tensor | None, num_loops: int, fill_value: Any
) -> Tensor | None:
    """edge_attr to go with with_loops(): what PyG's remove_self_loops and add_self_loops make of it."""
    if edge_attr is None:
        return None
    square = graph.num_rows == graph.num_cols == num_loops
    if not isinstance(fill_value, str) or fill_value not in FILLS or conv.flow == "target_to_source" or not square:
        edges = graph.edge_index.flip(0) if conv.flow == "target_to_source" else graph.edge_index
        edges, kept = remove_self_loops(edges, edge_attr)
        result: Tensor | None = add_self_loops(edges, kept, fill_value=fill_value, num_nodes=num_loops)[1]
        return result
    into = graph
    if graph.has_self_loops:
        edge_attr = gather_rows(edge_attr, graph.kept_edges)
        into = graph.derived("segments without loops", lambda: _segments_without_loops(graph))
    return torch.cat([edge_attr, segment_reduce(edge_attr, into, reduce=fill_value)])


def _segments_without_loops(graph: Graph) -> Graph:
    """The graph that sends every edge that is no loop to its destination. [n, E']."""
    return Graph.of_segments(graph.segment_index[graph.kept_edges], graph.num_rows)


def learns(adj: Adjacency) -> bool:
    """Whether the adjacency's weights carry gradients: then the differentiable op runs instead of a plan."""
    return adj.weight is not None and adj.weight.requires_grad and torch.is_grad_enabled()


def split_weight(linear: Any, like: Tensor, *widths: int) -> tuple[Tensor, ...]:
    """The columns of a Linear that act on each part of its concatenated input, or Decline. -> [o, w] each.

    The caller adds the Linear's bias.
    """
    weight = weight_of(linear, like.new_empty(0, sum(widths)), bias=True)
    result: tuple[Tensor, ...] = weight.split(list(widths), dim=1)
    return result


def plus_own(graph: Graph, value: Tensor, own: Tensor, reduce: str) -> Tensor:
    """The sum or mean of messages m + own_i from that of m; what is not finite stays out of nodes without edges.

    value, own [n, k], value 0 for nodes without edges -> [n, k].
    """
    if reduce == "sum":
        moved = torch.addcmul(value, own, graph.degree.to(own.dtype).unsqueeze(1))
    else:
        moved = value + own
    return only_reached(graph, moved)


def map_of(linear: Any) -> list[Tensor]:
    """Weight and bias of a Linear, as functional.linear takes them. What runs again in backward is handed these, not
    the module, which may have others by then (torch.func.functional_call)."""
    return [linear.weight] if linear.bias is None else [linear.weight, linear.bias]


def bias_of(linear: Any) -> Tensor:
    """The bias of a Linear, zeros where it has none. [o]."""
    weight: Tensor = linear.weight
    return weight.new_zeros(weight.size(0)) if linear.bias is None else linear.bias
